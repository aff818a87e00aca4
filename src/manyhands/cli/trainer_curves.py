"""The curves of one trainer, for TensorBoard. Those of the whole run are drawn by ``manyhands monitor``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.recipes.albert.events import BatchDone, StepDone


class TrainerCurves:
    """Writes what a trainer tells of each global step into a folder.

    Raises:
        MissingExtra: the package of ``manyhands[tensorboard]`` is not installed.
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise MissingExtra("--tensorboard", "tensorboard") from error
        try:
            self._writer = SummaryWriter(str(folder), flush_secs=10)
        except OSError as error:
            raise ConfigError(f"--tensorboard {folder}: {error.strerror}; name a folder that can be written") from error
        self._samples_per_second = 0.0
        self._samples_used = 0

    def __call__(self, event: msgspec.Struct) -> None:
        if isinstance(event, BatchDone):
            self._samples_per_second = event.samples_per_second
        elif isinstance(event, StepDone):
            used, self._samples_used = event.counts.samples_used - self._samples_used, event.counts.samples_used
            curves = {"samples": used, "performance": self._samples_per_second, "peers": event.num_peers}
            if event.loss is not None:
                curves["local loss"] = event.loss
            for name, value in curves.items():
                self._writer.add_scalar(name, value, event.step)
            self._writer.flush()  # a trainer may end at any time
