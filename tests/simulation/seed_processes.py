"""Processes that run one job after the other, each in bounded real time: one that spins is ended, and says where."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Job = tuple[str, int]

START_S = 120.0
GRACE_S = 20.0
"""After its bound a process has written its stack and ended itself; later than that it is killed."""
END_S = 5.0
SHOWN_LINES = 40


class SeedProcesses(Generic[Result]):
    """Runs jobs in processes that last, and gives each job's result as it comes.

    Args:
        run: of a module that can be imported; gets a job's name and seed.
        failed: makes a result for a job that has none, of the reason and the seconds that it took.
        bound_s: real seconds for one job, from when its process has started.
    """

    def __init__(
        self,
        run: Callable[[str, int], Result],
        failed: Callable[[Job, str, float], Result],
        *,
        num_processes: int,
        bound_s: float,
    ) -> None:
        self._run, self._failed, self._bound_s, self._num_processes = run, failed, bound_s, num_processes
        self._folder = tempfile.TemporaryDirectory()
        self._idle: list[_SeedProcess] = []
        self._busy: dict[Connection, _SeedProcess] = {}

    def __enter__(self) -> SeedProcesses[Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in [*self._idle, *self._busy.values()]:
            process.end()
        self._folder.cleanup()

    def results(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Of those jobs that run already and of these, as each ends."""
        waiting = deque(jobs)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._num_processes:
                process = self._idle.pop() if self._idle else self._new()
                process.begin(waiting.popleft())
                self._busy[process.pipe] = process
            deadline = min(process.deadline for process in self._busy.values())
            ready = wait(list(self._busy), timeout=max(deadline - time.monotonic(), 0.0))
            overdue = [pipe for pipe, process in self._busy.items() if process.deadline <= time.monotonic()]
            for pipe in {*ready, *overdue}:
                assert isinstance(pipe, Connection)
                yield self._result(pipe)

    def _new(self) -> _SeedProcess:
        return _SeedProcess(self._run, Path(self._folder.name), self._bound_s)

    def _result(self, pipe: Connection) -> Result:
        process = self._busy.pop(pipe)
        took_s = time.monotonic() - process.began_at
        try:
            result: Result = process.result()
        except (EOFError, OSError):
            process.end()
            return self._failed(process.job, process.reason(took_s), took_s)
        self._idle.append(process)
        return result


class _SeedProcess:
    """One of them, as its parent sees it."""

    def __init__(self, run: Callable[[str, int], Any], folder: Path, bound_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other_end = context.Pipe()
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            self._stacks = Path(file.name)
        self._bound_s = bound_s
        self.job, self.began_at, self.deadline = ("", 0), 0.0, math.inf
        self._process = context.Process(target=_serve, args=(other_end, run, self._stacks, bound_s), daemon=True)
        self._process.start()
        other_end.close()
        assert self.pipe.poll(START_S), "a process did not start"
        self.pipe.recv()

    def begin(self, job: Job) -> None:
        self.job, self.began_at = job, time.monotonic()
        self.deadline = self.began_at + self._bound_s + GRACE_S
        self.pipe.send(job)

    def result(self) -> Any:
        """What it has sent; EOFError if there is nothing."""
        if not self.pipe.poll():
            raise EOFError
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self._process.join(max(min(self.deadline - time.monotonic(), END_S), 0.0))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def reason(self, took_s: float) -> str:
        """Why it has ended, in words; and where it was then, if it has spun."""
        if took_s < self._bound_s:
            return f"its process ended with status {self._process.exitcode}"
        lines = [line for line in self._stacks.read_text().splitlines()[1:] if "<frozen" not in line]  # of imports
        where = "\n    ".join(lines[:SHOWN_LINES]) or "its process was killed, and did not say where it was"
        return f"it ran for more than {self._bound_s:g} s of real time:\n    {where}"


def _serve(pipe: Connection, run: Callable[[str, int], Any], stacks: Path, bound_s: float) -> None:
    """Run the jobs that come, until nobody is there to send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with stacks.open("w") as file:
        pipe.send("ready")
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(bound_s, exit=True, file=file)
            try:
                result = run(*job)
            finally:
                faulthandler.cancel_dump_traceback_later()
            pipe.send(result)
