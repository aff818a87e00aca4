"""The TensorBoard curves of one trainer. ``manyhands monitor`` draws those of the whole run."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from manyhands.monitor.curves import TensorBoardSink
from manyhands.recipes.albert.trainer_events import BatchDone, StepDone


class TrainerCurves:
    """Writes the values of each global step of a trainer into a folder.

    Raises:
        MissingExtra: the package of ``manyhands[tensorboard]`` is not installed.
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._sink = TensorBoardSink(folder, time.strftime("%Y%m%d-%H%M%S"))
        self._sink.open()
        self._samples_per_second = 0.0
        self._samples_used = 0

    def __call__(self, event: msgspec.Struct) -> None:
        if isinstance(event, BatchDone):
            self._samples_per_second = event.samples_per_second
        elif isinstance(event, StepDone):
            used = event.counts.samples_used - self._samples_used
            self._samples_used = event.counts.samples_used
            point = {
                "step": event.step,
                "samples": used,
                "performance": self._samples_per_second,
                "peers": event.num_peers,
            }
            if event.loss is not None:
                point["local loss"] = event.loss
            self._sink.add(point)
