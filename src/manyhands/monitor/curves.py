"""Draws the curves of a run with Weights & Biases, TensorBoard and Trackio, in threads that never block the monitor.

Imports none of them, nor torch, until they are needed.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.text import reason_of, shell_option
from manyhands.monitor.monitor_events import HeldoutSeen, StepMade
from manyhands.runtime.exit_delay import delay_exit

logger = logging.getLogger(__name__)

WandbMode = Literal["online", "offline", "disabled"]
CurvePoint = Mapping[str, float]

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 6.0
"""Longest time in seconds for wandb to send its points when it ends; the others stay on the disk."""
CLOSE_TIMEOUT_S = 8.0
REOPEN_S = 60.0
"""Seconds from the failure of a sink until it is opened again."""
MAX_WAITING = 1000
"""Largest backlog of a slow sink, in points."""


def point_of(event: msgspec.Struct) -> CurvePoint | None:
    """The point for an event, with the names of the tutorials; None if the curves do not show the event."""
    if isinstance(event, StepMade):
        return {
            "loss": event.loss,
            "alive peers": event.alive_peers,
            "samples": event.samples,
            "performance": event.samples_per_second,
            "step": event.step,
        }
    if isinstance(event, HeldoutSeen):
        return {
            "heldout loss": event.heldout_loss,
            "mlm accuracy": event.mlm_accuracy,
            "sop accuracy": event.sop_accuracy,
            "step": event.step,
        }
    return None


class Sink(Protocol):
    """A destination of points. All calls come from one thread."""

    def open(self) -> None:
        """Start, and log where the curves are."""

    def add(self, point: CurvePoint) -> None: ...

    def close(self) -> None: ...


class Curves:
    """Sends each point to all sinks, each in its own thread.

    A sink that fails loses one point. It is opened again every :data:`REOPEN_S`, and the newest :data:`MAX_WAITING`
    points wait for it. A sink that works but falls so far behind is dropped. Each case is logged with one warning.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._writers = [_Writer(name, sink) for name, sink in sinks.items()]

    def add(self, event: msgspec.Struct) -> None:
        """Draw an event, if the curves show it; never blocks."""
        if (point := point_of(event)) is not None:
            for writer in self._writers:
                writer.put(point)

    def close(self) -> bool:
        """Write queued points, within :data:`CLOSE_TIMEOUT_S`; returns whether all sinks have ended."""
        with delay_exit(CLOSE_TIMEOUT_S):
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            for writer in self._writers:
                writer.end()
            ended = [writer.join(deadline) for writer in self._writers]  # each one logs missing points
        return all(ended)


class _Writer:
    def __init__(self, name: str, sink: Sink) -> None:
        self._name = name
        self._sink = sink
        self._points: queue.Queue[CurvePoint | None] = queue.Queue(MAX_WAITING)
        self._is_left_behind = False
        self._has_failed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"curves: {name}", daemon=True)
        self._thread.start()

    def put(self, point: CurvePoint) -> None:
        if self._is_left_behind:
            return
        try:
            if self._has_failed and self._points.full():
                self._points.get_nowait()
            self._points.put_nowait(point)
        except queue.Full:
            self._leave_behind(f"it is {MAX_WAITING} points behind")

    def end(self) -> None:
        self._is_over.set()
        try:
            self._points.put_nowait(None)
        except queue.Full:
            self._leave_behind(f"it is {MAX_WAITING} points behind")

    def join(self, deadline: float) -> bool:
        """Wait until all points are written; return whether that was before the deadline."""
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if not self._thread.is_alive():
            return True
        if not self._is_left_behind:
            logger.warning(
                "The last points may be missing in %s: it did not close within %g s", self._name, CLOSE_TIMEOUT_S
            )
        self._is_left_behind = True
        return False

    def _run(self) -> None:
        while not self._draw() and not self._is_over.wait(REOPEN_S):
            with suppress(Exception):
                self._sink.close()

    def _draw(self) -> bool:
        """Write points until the end; False if the sink fails."""
        try:
            self._sink.open()
            for point in iter(self._points.get, None):
                self._sink.add(point)
                if self._has_failed:
                    logger.info("%s gets points again", self._name)
                    self._has_failed = False
            self._sink.close()
        except Exception as error:  # noqa: BLE001 (a tracker may raise anything; the monitor goes on)
            if not self._has_failed:
                then = "the monitor ends" if self._is_over.is_set() else f"the monitor tries again every {REOPEN_S:g} s"
                logger.warning("%s gets no points (%s); %s", self._name, reason_of(error), then)
            self._has_failed = True
            return False
        return True

    def _leave_behind(self, reason: str) -> None:
        if self._is_left_behind:
            return
        self._is_left_behind = True
        logger.warning("%s gets no more points (%s); the monitor goes on without it", self._name, reason)


class WandbSink:
    """A wandb run in a project, in the group of the training run.

    Without an API key, or when the server does not answer, it is written to disk for ``wandb sync``.

    Args:
        mode: None for that in wandb's own variable ``WANDB_MODE``, or online without it.
    Raises:
        MissingExtra: wandb is not installed.
    """

    def __init__(self, project: str, run_id: str, mode: WandbMode | None) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise MissingExtra("--wandb-project", "wandb")
        self._project = project
        self._run_id = run_id
        self._mode = mode
        self._run: Any = None

    def open(self) -> None:
        import wandb

        mode = self._mode or os.environ.get("WANDB_MODE") or "online"
        wandb.setup(wandb.Settings(silent=True))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            logger.warning("There is no API key for wandb (wandb login stores one): the curves are written offline")
            mode = "offline"
        try:
            self._run = self._begin(mode)
        except Exception as error:  # wandb raises errors of many kinds when its server is not reached
            if mode == "offline":
                raise
            logger.warning("The curves are written offline, as wandb cannot be reached: %s", reason_of(error))
            self._run = self._begin("offline")
        self._run.define_metric("*", step_metric="step")  # held-out losses arrive later than their step
        if mode == "disabled":
            logger.info("No curves go to wandb, which is disabled")
        elif url := (None if self._run.offline else self._run.url):
            logger.info("The curves are at %s", url)
        else:
            folder = self._run.settings.sync_dir
            logger.info("The curves are written to %s; to send them to wandb later: wandb sync %s", folder, folder)

    def _begin(self, mode: Any) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S, finish_timeout_raises=True,
            x_disable_stats=True, disable_git=True, disable_code=True,
        )  # fmt: skip
        return wandb.init(
            project=self._project, group=self._run_id, config={"run_id": self._run_id}, mode=mode, settings=settings
        )

    def add(self, point: CurvePoint) -> None:
        self._run.log(dict(point))

    def close(self) -> None:
        import wandb

        try:
            self._run.finish()
        except TimeoutError:
            folder = self._run.settings.sync_dir
            logger.warning("Not all points have reached wandb; to send them: wandb sync %s", folder)
        wandb.teardown()  # ends its process


class TensorBoardSink:
    """A separate subfolder with an event file.

    Args:
        folder: for all monitors together.
        name: of the subfolder.
    Raises:
        MissingExtra: tensorboardX is not installed.
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise MissingExtra("--tensorboard", "tensorboard")
        with _without_torch():
            import tensorboardX  # noqa: F401 (its parts are imported later)
        self._folder = folder
        self._own = folder / name
        nearest = next(path for path in self._own.absolute().parents if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ConfigError(
                f"--tensorboard {folder}: {nearest} is not a folder that can be written; name another one"
            )

    def open(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._own.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(self._own / "events"))
        logger.info("The curves are in %s; to see them: tensorboard --logdir %s", self._own, self._folder)

    def add(self, point: CurvePoint) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.items()]
        self._writer.write_event(Event(wall_time=time.time(), step=int(point["step"]), summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """A Trackio run in a project, in the group of the training run.

    It is kept on this machine, or sent to the place in Trackio's own ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL``.

    Args:
        name: of the Trackio run.
    Raises:
        MissingExtra: trackio is not installed.
    """

    def __init__(self, project: str, run_id: str, name: str) -> None:
        if importlib.util.find_spec("trackio") is None:
            raise MissingExtra("--trackio", "trackio")
        self._project = project
        self._run_id = run_id
        self._name = name
        self._run: Any = None

    def open(self) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):  # its greeting
            self._run = trackio.init(
                project=self._project, name=self._name, group=self._run_id, config={"run_id": self._run_id},
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        if place := self._run.url:
            logger.info("The curves are sent to Trackio at %s", place)
        else:
            show = f"trackio show {shell_option('--project', self._project)}"
            logger.info("The curves are in the Trackio project %s; to see them: %s", self._project, show)

    def add(self, point: CurvePoint) -> None:
        values = {name: value for name, value in point.items() if name != "step"}
        self._run.log(values, step=int(point["step"]))

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep tensorboardX from importing torch, which would cost a monitor seconds and memory."""
    modules: dict[str, Any] = sys.modules
    if "torch" in modules:
        yield
        return
    modules["torch"] = None
    try:
        yield
    finally:
        del modules["torch"]
