"""``manyhands checkpoint``: look at checkpoints, check them, and take the model out. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from manyhands.base.text import amount_of, counted
from manyhands.checkpoints.checkpoint_dir import (
    checkpoints_in,
    export_model,
    faults_in,
    newest_checkpoint,
    read_checkpoint_info,
)
from manyhands.optim.manifest import RunManifest
from manyhands.recipes.albert.adoption import is_recipe

checkpoint = App(name="checkpoint", help="Look at checkpoints, check them, and take the model out.")

Folder = Annotated[Path, Parameter(help="The checkpoint folder of a trainer, or one checkpoint in it.")]


@checkpoint.command
def show(folder: Folder, /) -> int:
    """Print the run and step of each checkpoint, and the model and settings of the newest.

    The files are not checked. The exit code is 1 if a checkpoint cannot be read.
    For example:

        manyhands checkpoint show manyhands-my-albert
    """
    newest = None
    code = 0
    for path in checkpoints_in(folder):
        try:
            about = read_checkpoint_info(path)
        except (OSError, msgspec.MsgspecError) as error:
            if not path.exists():  # a trainer has removed it meanwhile
                continue
            code = 1
            print(_printable(f"{path}: cannot be read: {error}"))  # noqa: T201
            continue
        size = amount_of(sum(file.bytes for file in about.files.values()))
        what = f"run {about.run.run_id}, global step {about.global_step}, {size}, format {about.format}"
        print(_printable(f"{path}: {what}"))  # noqa: T201
        newest = newest or about
    for name, text in _lines_of(newest.run) if newest is not None else []:
        print(f"  {name:<10} {_printable(text)}")  # noqa: T201
    return code


@checkpoint.command
def verify(folder: Folder, /) -> int:
    """Check the size and SHA-256 of each file of each checkpoint.

    Prints a line for each problem; the exit code is 1 if there is one. For
    example:

        manyhands checkpoint verify manyhands-my-albert
    """
    num_problems = 0
    for path in checkpoints_in(folder):
        faults = faults_in(path)
        if not path.exists():  # a trainer has removed it meanwhile
            continue
        problems = [_printable(f"{path / name} {fault}") for name, fault in faults.items() if fault]
        num_problems += len(problems)
        print("\n".join(problems) or f"{path}: {counted(len(faults), 'file')}, no problems")  # noqa: T201
    return 1 if num_problems else 0


@checkpoint.command
def export(
    folder: Folder,
    /,
    *,
    to: Annotated[Path | None, Parameter(help="Folder to make; by default model-STEP.")] = None,
) -> None:
    """Copy the model of the newest intact checkpoint to a folder of its own.

    It is a folder that transformers loads, or model.safetensors alone for another
    module. For example:

        manyhands checkpoint export manyhands-my-albert --to my-albert
    """
    path = newest_checkpoint(folder)
    about = read_checkpoint_info(path)
    to = to or Path(f"model-{about.global_step}")
    export_model(path, to)
    print(f"{to}: the model of run {about.run.run_id!r} at global step {about.global_step}. To load it:")  # noqa: T201
    if "config.json" in about.files:
        print(f'    model = transformers.{_class_of(to)}.from_pretrained("{to}")')  # noqa: T201
    else:
        print(f'    safetensors.torch.load_model(model, "{to / "model.safetensors"}")')  # noqa: T201


def _class_of(folder: Path) -> str:
    """The class of ``transformers`` that was saved: ``AutoModel`` would leave its heads out."""
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    names = config.get("architectures") if isinstance(config, dict) else None
    name = names[0] if isinstance(names, list) and names else ""
    return name if isinstance(name, str) and name.isidentifier() else "AutoModel"


def _lines_of(run: RunManifest) -> list[tuple[str, str]]:
    num_parameters = sum(math.prod(spec.shape) for spec in run.tensors)
    groups = [", ".join(f"{name} {value}" for name, value in group.items()) for group in run.hyper_parameters]
    return [
        ("model", f"{num_parameters:,} parameters in {counted(len(run.tensors), 'tensor')}, {len(run.frozen)} frozen"),
        ("optimizer", f"{run.optimizer}, {counted(len(groups), 'parameter group')}"),
        *(("", group) for group in groups),
        ("schedule", _schedule_of(run)),
        ("batch", f"{counted(run.target_batch_size, 'sample')} of all peers"),
        ("settings", ", ".join(f"{name} {value}" for name, value in sorted(run.extra.items())) or "none"),
    ]


def _schedule_of(run: RunManifest) -> str:
    warmup = run.extra.get("warmup_steps")
    total = run.extra.get("total_steps")
    if is_recipe(run.extra) and warmup and total:
        return f"linear: warm-up of {warmup} steps, {total} in all"
    return run.scheduler or "none"


def _printable(text: str) -> str:
    """Replace control characters: a checkpoint may come from a stranger."""
    return "".join(char if char.isprintable() else "?" for char in text)
