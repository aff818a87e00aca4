"""How much engine code one committed global step runs through, as a measure of what a newcomer must read.

    python benchmarks/step_trace.py [--json FILE]

Two peers train a tiny model, in a process each. This process is the follower; it records everything that runs in
``manyhands.averaging`` and ``manyhands.optim`` during one ``optimizer.step()`` that commits a round:

  files, functions, classes   entered, on the training thread and on the network thread
  tasks                       asyncio tasks made, by any package
  frames_average_to_exchange  of these two packages, from the optimizer's call for a round to the exchange of values,
                              through the tasks between

``from_step_to_step`` has the first three for two global steps, and for all that runs between them: the records that
are published and read.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Coroutine, Generator
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from _command_line import Parser, json_path, run
from _worker import Worker

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.base.identity import Identity
from manyhands.optim import ProgressConfig
from manyhands.optim.blocking_client import BlockingRunClient

T = TypeVar("T")
FROM, TO = BlockingRunClient.average.__code__, Butterfly.run.__code__
"""The optimizer's call for a round, and the exchange of values."""
PACKAGES = ("manyhands/averaging/", "manyhands/optim/")
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
TARGET = 16
EAGER = ProgressConfig(min_refresh_s=0.02, max_refresh_s=0.1, ttl_s=10.0)
PATIENCE_S = 60.0
STEPS_BEFORE = 3


def identities() -> list[Identity]:
    """Identities of which the first one leads: the dialable peer with the lowest id does."""
    return sorted((Identity.from_seed(bytes([number]) * 32) for number in range(2)), key=lambda one: one.peer_id)


def joined(peer: manyhands.Peer) -> tuple[torch.nn.Module, manyhands.Optimizer]:
    """A tiny model, and the optimizer of a peer of the run."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = manyhands.Optimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), peer=peer, run_id="traced", target_batch_size=TARGET,
        batch_size_per_step=TARGET // 2, progress=EAGER,
        averaging=AveragingConfig(codec="none", matchmaking_time_s=10.0), start_new=True,
    )  # fmt: skip
    return model, optimizer


class Leader:
    """The other peer; it trains in the background."""

    def __init__(self) -> None:
        self._peer = manyhands.Peer(listen=LISTEN, identity=identities()[0])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def addresses(self) -> list[str]:
        return self._peer.addresses

    def _train(self) -> None:
        model, optimizer = joined(self._peer)
        while not self._is_over.is_set():
            if optimizer.samples_accumulated >= TARGET // 2:  # one batch of each peer in every step
                time.sleep(0.01)
                if optimizer.num_peers < 2:
                    continue
            model(torch.ones(1, 8)).square().mean().backward()
            optimizer.step(batch_size=TARGET // 2 if not optimizer.samples_accumulated else 0)
            optimizer.zero_grad()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)
        self._peer.close()


class Trace:
    """Records what runs while it is on, in all threads that were started after it was made."""

    def __init__(self) -> None:
        self.is_on = False
        self.training_thread = threading.get_ident()
        self.clear()
        self._made_by: WeakKeyDictionary[asyncio.Task[Any], list[str]] = WeakKeyDictionary()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def clear(self) -> None:
        self.functions: set[Any] = set()
        self.classes: set[type] = set()
        self.num_tasks = 0
        self.frames: list[str] = []

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> asyncio.Task[T]:
        """A task factory that records which frames asked for each task."""
        task = asyncio.Task(coro, loop=loop, **options)
        self.num_tasks += 1
        self._made_by[task] = self._frames_of(sys._getframe())  # noqa: SLF001
        return task

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call" or not _is_ours(frame):
            return
        code = frame.f_code
        self.functions.add(code)
        if code.co_varnames[:1] == ("self",) and (one := frame.f_locals.get("self")) is not None:
            self.classes.update(cls for cls in type(one).__mro__ if cls.__module__.startswith("manyhands.averaging")
                                or cls.__module__.startswith("manyhands.optim"))  # fmt: skip
        if code is TO and not self.frames:
            self.frames = self._frames_of(frame)

    def _frames_of(self, frame: FrameType | None) -> list[str]:
        """The frames from the optimizer's call on, outermost first, across tasks to their creators."""
        names = _names(frame)
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        if task is not None and (above := self._made_by.get(task)) is not None:
            return above + names
        return self._asked_by() + names

    def _asked_by(self) -> list[str]:
        """The frames in which the training thread waits, from the optimizer's call inwards."""
        frame: FrameType | None = sys._current_frames().get(self.training_thread)  # noqa: SLF001
        frames = []
        while frame is not None:
            frames.append(frame)
            if frame.f_code is FROM:
                return [_name(one) for one in reversed(frames) if _is_ours(one)]
            frame = frame.f_back
        return []

    def figures(self) -> dict[str, int]:
        return {
            "files": len({code.co_filename for code in self.functions}),
            "functions": len(self.functions),
            "classes": len(self.classes),
            "tasks": self.num_tasks,
            "frames_average_to_exchange": len(self.frames),
        }


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename.replace("\\", "/")
    return any(package in name for package in PACKAGES) and not frame.f_code.co_name.startswith("<")


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"


def _names(frame: FrameType | None) -> list[str]:
    names: list[str] = []
    while frame is not None:
        if _is_ours(frame):
            names.append(_name(frame))
        frame = frame.f_back
    return names[::-1]


def measure(num_steps: int) -> tuple[dict[str, int], list[str]]:
    """The figures of one or two steps, and the frames between call and exchange, outermost first."""
    trace = Trace()
    leader = Worker(Leader)
    try:
        with manyhands.Peer(leader.call("addresses"), listen=LISTEN, identity=identities()[1]) as peer:

            async def watch_tasks() -> None:
                asyncio.get_running_loop().set_task_factory(trace.make_task)

            peer.run(watch_tasks(), 5.0, "watching tasks")
            model, optimizer = joined(peer)
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                before, committed = optimizer.global_step, optimizer.statistics.rounds_committed
                is_new = not optimizer.samples_accumulated
                model(torch.ones(1, 8)).square().mean().backward()
                if num_steps == 1:
                    trace.clear()
                trace.is_on = before >= STEPS_BEFORE
                optimizer.step(batch_size=TARGET // 2 if is_new else 0)
                trace.is_on = trace.is_on and num_steps > 1
                optimizer.zero_grad()
                has_committed = optimizer.statistics.rounds_committed > committed
                if before >= STEPS_BEFORE + num_steps - 1 and has_committed and trace.frames:
                    return trace.figures(), trace.frames
                time.sleep(0.01)
            raise RuntimeError(f"no round was committed within {PATIENCE_S:.0f} s")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        leader.close()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", type=json_path)
    arguments = parser.parse_args()
    figures, frames = measure(1)
    for name in frames:
        print(f"  {name}")
    both, _ = measure(2)
    results = {**figures, "from_step_to_step": {name: both[name] for name in ("files", "functions", "classes")}}
    print(json.dumps(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
