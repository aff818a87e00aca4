"""Counts the constants of the engine that are durations: each is one more time that a reader must keep in mind.

A duration is a constant of a module or a class whose name ends in ``_S``, but for rates. It is *derived* if it is
computed from others.

    python benchmarks/durations.py [--list]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "manyhands"
PACKAGES = ("averaging", "optim")


def durations_of(path: Path) -> Iterator[tuple[str, bool]]:
    """The names of a module's durations, and whether each is a number of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Module, ast.ClassDef)):
            continue
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign) and isinstance(node, ast.Module):
                targets = [statement.target]
            value = getattr(statement, "value", None)
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            if value is not None:
                is_number = not any(isinstance(one, ast.Name) and one.id.endswith("_S") for one in ast.walk(value))
                yield from ((name, is_number) for name in names if is_duration(name))


def is_duration(name: str) -> bool:
    """Whether a constant of this name is a duration."""
    return name.isupper() and name.endswith("_S") and not name.endswith(("_PER_S", "MBIT_S"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="show each of them")
    show_all = parser.parse_args().list
    for package in PACKAGES:
        files, numbers, derived = 0, 0, 0
        for path in sorted((SOURCE / package).rglob("*.py")):
            found = list(durations_of(path))
            files += bool(found)
            numbers += sum(is_number for _, is_number in found)
            derived += sum(not is_number for _, is_number in found)
            if show_all and found:
                print(f"{path.relative_to(SOURCE)}: {', '.join(name for name, _ in found)}")
        print(f"{package}: {numbers} durations and {derived} that are derived, in {files} files")


if __name__ == "__main__":
    main()
