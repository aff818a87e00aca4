"""Counts the durations of the engine: each is one more time that a reader must keep in mind.

A duration is a constant of a module or a class whose name ends in ``_S``, but for rates, or whose value is computed
from such constants. It is *derived* if it is computed from others. All belong in ``averaging/timing.py``. An *inline*
duration has no name: a sum, a product or a quotient of constants, such as ``2 * DIAL_S``, at the place of its use.

    python benchmarks/durations.py [--list]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "manyhands"
PACKAGES = ("averaging", "optim")


def constants_of(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The constants of a module and its classes, each with its value."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef)):
            continue
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign) and isinstance(node, ast.Module):
                targets = [statement.target]
            value = getattr(statement, "value", None)
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            if value is not None:
                yield from ((name, value) for name in names if name.isupper())


def durations_of(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The names of a module's durations, and whether each is a number of its own."""
    for name, value in constants_of(tree):
        if is_duration(name) or is_computed(value):
            yield name, not any(isinstance(one, ast.Name) and is_duration(one.id) for one in ast.walk(value))


def inline_durations_of(tree: ast.Module) -> Iterator[str]:
    """The durations without a name in a module, as they are written."""
    named = {id(value) for _, value in constants_of(tree)}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) in named:
            continue
        if isinstance(node, ast.BinOp) and is_computed(node):
            yield ast.unparse(node)
        else:
            waiting += ast.iter_child_nodes(node)


def is_duration(name: str) -> bool:
    """Whether a constant of this name is a duration."""
    return name.isupper() and name.endswith("_S") and not name.endswith(("_PER_S", "MBIT_S"))


def is_computed(value: ast.AST) -> bool:
    """Whether a value is a duration, or computed from durations and other constants alone."""
    parts = [part for part in ast.walk(value) if not isinstance(part, (ast.operator, ast.unaryop, ast.expr_context))]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    is_plain = all(isinstance(part, (ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name)) for part in parts)
    return is_plain and all(name.isupper() for name in names) and any(map(is_duration, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show each of them")
    show_all = parser.parse_args().list
    for package in PACKAGES:
        files, numbers, derived, num_inline = 0, 0, 0, 0
        for path in sorted((SOURCE / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found, inline = list(durations_of(tree)), list(inline_durations_of(tree))
            files += bool(found)
            numbers += sum(is_number for _, is_number in found)
            derived += sum(not is_number for _, is_number in found)
            num_inline += len(inline)
            if show_all and found + inline:
                print(f"{path.relative_to(SOURCE)}: {', '.join([*(name for name, _ in found), *inline])}")
        print(f"{package}: {numbers} durations and {derived} that are derived, in {files} files; {num_inline} inline")


if __name__ == "__main__":
    main()
