"""Runs an object in a child process and calls its methods from this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 8.0


class Subject(Protocol):
    """The object in the child process; any of its methods can be called."""

    def close(self) -> None:
        """Stop everything; the process exits afterwards."""


class Worker:
    """Starts a process, makes ``factory(*arguments)`` in it, and calls its methods, one at a time.

    Several may be started at once: the first call waits until the object exists. The process ends with :meth:`close`,
    and also when this one dies in any way.

    Args:
        has_children: it starts processes of its own; these share its process group, and all are killed in the end.
    """

    def __init__(self, factory: Callable[..., Subject], *arguments: Any, has_children: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._name = f"{factory.__name__}{arguments[:2]}"
        self._has_children = has_children
        self._process = context.Process(
            target=_serve, args=(theirs, factory, arguments, has_children), daemon=not has_children
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with that process
        self._is_made = False

    @property
    def pid(self) -> int:
        """Of the process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """Call one method and return its result.

        Raises:
            RuntimeError: it failed there, or took too long; with the traceback of the other process.
        """
        if not self._is_made:
            self._answer(max(START_TIMEOUT_S, timeout_s))  # longer if many processes load torch at once
            self._is_made = True
        self._pipe.send((method, arguments))
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"{self._name} did not answer within {timeout_s:.3g} s")
        try:
            is_result, value = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self._name} has ended") from error
        if not is_result:
            raise RuntimeError(f"{self._name} failed:\n{value}")
        return value

    def close(self) -> None:
        """Stop the process, by force if necessary. May be called twice."""
        self._pipe.close()
        self._process.join(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process.is_alive():
            if self._has_children:
                with contextlib.suppress(ProcessLookupError):  # it is just starting
                    os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:  # also on Ctrl-C: the other process may be in a long call
            self.kill()
        self.close()


def _serve(pipe: Connection, factory: Callable[..., Subject], arguments: tuple[Any, ...], has_children: bool) -> None:
    if has_children:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent handles it
    subject: Subject | None = None
    try:
        subject = factory(*arguments)
        pipe.send((True, None))
        while True:
            method, given = pipe.recv()
            try:
                answer = (True, getattr(subject, method)(*given))
            except Exception:  # noqa: BLE001 (it is raised again where the call came from)
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    except (EOFError, OSError):
        pass  # the caller is gone
    except Exception:  # noqa: BLE001 (likewise)
        pipe.send((False, traceback.format_exc()))
    finally:
        if subject is not None:
            subject.close()
        if has_children:
            os.killpg(0, signal.SIGKILL)  # the rest of the group, and this process
