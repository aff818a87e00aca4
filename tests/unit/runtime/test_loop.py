"""The network thread: results, time limits, Ctrl-C and its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from manyhands.base.errors import ManyhandsError, Timeout
from manyhands.runtime import LoopThread
from manyhands.runtime.loop import CLOSED


@pytest.fixture
def runtime() -> Iterator[LoopThread]:
    thread = LoopThread("manyhands test")
    yield thread
    thread.close()


class Job:
    """A coroutine that never returns, and shows how far it came."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


def test_a_coroutine_runs_on_the_other_thread_and_returns_its_result(runtime: LoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert runtime.run(name(), 5.0, "asking for a name") == "manyhands test"


def test_an_exception_arrives_as_it_is(runtime: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("soup")

    with pytest.raises(KeyError, match="soup"):
        runtime.run(fail(), 5.0, "cooking")


def test_a_timeout_names_the_phase_and_cancels(runtime: LoopThread) -> None:
    job = Job()
    with pytest.raises(Timeout, match=r"timed out after 0\.05 s waiting for godot"):
        runtime.run(job(), 0.05, "waiting for godot")
    assert job.cancelled.wait(20.0)


def test_a_timeout_error_of_the_coroutine_itself_is_not_ours(runtime: LoopThread) -> None:
    theirs = asyncio.TimeoutError("theirs")

    async def fail() -> None:
        raise theirs

    with pytest.raises(asyncio.TimeoutError) as caught:
        runtime.run(fail(), 5.0, "cooking")
    assert not isinstance(caught.value, Timeout)


def test_a_result_that_comes_at_the_last_moment_counts(runtime: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The future was done when the wait ended: what it holds is the outcome."""
    future: concurrent.futures.Future[str] = concurrent.futures.Future()
    waited_before: list[float | None] = []

    def result(timeout_s: float | None = None) -> str:
        if not waited_before:
            waited_before.append(timeout_s)
            future.set_result("soup")
            raise concurrent.futures.TimeoutError
        return concurrent.futures.Future.result(future, timeout_s)

    async def cook() -> str:
        return "soup"

    coro = cook()
    monkeypatch.setattr(future, "result", result)
    monkeypatch.setattr(runtime, "submit", lambda coro: future)
    assert runtime.run(coro, 5.0, "cooking") == "soup"
    coro.close()


def test_ctrl_c_cancels_what_is_waited_for(runtime: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    job, submit = Job(), runtime.submit

    def submit_and_press(coro: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        future = submit(coro)
        monkeypatch.setattr(future, "result", lambda timeout_s: press_ctrl_c())
        return future

    def press_ctrl_c() -> None:
        assert job.started.wait(20.0)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runtime, "submit", submit_and_press)
    with pytest.raises(KeyboardInterrupt):
        runtime.run(job(), 30.0, "waiting for godot")
    assert job.cancelled.wait(20.0)


def test_ctrl_c_just_after_a_coroutine_was_handed_over_does_not_end_it_on_this_thread(
    runtime: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does at its end needs its event loop."""
    job, submit = Job(), runtime.submit

    def handed_over(coro: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        submit(coro)
        assert job.started.wait(20.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "submit", handed_over)
    with pytest.raises(KeyboardInterrupt):
        runtime.run(job(), 30.0, "waiting")
    assert not job.cancelled.is_set()
    runtime.close()
    assert job.cancelled.is_set()


def test_ctrl_c_before_a_coroutine_was_handed_over_leaves_no_warning(
    runtime: LoopThread, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def interrupted(coro: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.run(Job()(), 1.0, "waiting")
    gc.collect()
    assert not list(recwarn), "nobody has awaited the coroutine, and nobody need know"


def test_a_call_from_the_loop_itself_is_refused(runtime: LoopThread) -> None:
    async def call() -> None:
        with pytest.raises(RuntimeError, match="await the coroutine"):
            runtime.run(asyncio.sleep(0), 5.0, "waiting for itself")

    runtime.run(call(), 5.0, "calling")


def test_close_ends_callers_that_wait() -> None:
    runtime, job = LoopThread("manyhands test"), Job()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(runtime.run, job(), 30.0, "waiting for godot")
        assert job.started.wait(20.0)
        runtime.close()
        with pytest.raises(ManyhandsError, match="the peer is closed"):
            waiting.result(20.0)
    assert job.cancelled.is_set()


def test_every_call_after_close_raises_that_the_peer_is_closed() -> None:
    runtime = LoopThread("manyhands test")
    runtime.close()
    runtime.close()
    with pytest.raises(ManyhandsError, match="the peer is closed"):
        runtime.run(asyncio.sleep(0), 5.0, "sleeping")


def test_calls_and_close_at_the_same_time_all_end() -> None:
    """Whatever is submitted just before the end is run or refused; nobody waits for ever."""
    for _ in range(20):
        runtime = LoopThread("manyhands test")
        go = threading.Barrier(3)

        def call(runtime: LoopThread = runtime, go: threading.Barrier = go) -> str:
            go.wait()
            try:
                for _ in range(100):
                    runtime.run(asyncio.sleep(0), 5.0, "sleeping")
            except ManyhandsError as error:
                return str(error)
            return "all done"

        def close(runtime: LoopThread = runtime, go: threading.Barrier = go) -> None:
            go.wait()
            runtime.close()

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(call), pool.submit(call)]
            pool.submit(close).result(20.0)
            assert {future.result(20.0) for future in calls} <= {"all done", CLOSED}


def test_close_does_not_wait_for_a_blocking_call() -> None:
    """A name lookup can hang for half a minute, and nothing can interrupt it."""
    runtime, hanging, over = LoopThread("manyhands test"), threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        over.wait(30.0)

    async def look_up() -> None:
        await asyncio.get_running_loop().run_in_executor(None, hang)

    runtime.submit(look_up())
    assert hanging.wait(20.0)
    started = time.monotonic()
    runtime.close()
    took_s = time.monotonic() - started
    over.set()
    assert took_s < 15.0


def test_close_does_not_wait_for_a_task_that_swallows_its_cancellation(caplog: pytest.LogCaptureFixture) -> None:
    """A task that swallows its cancellation keeps the thread for a second, not for ever."""
    runtime, started = LoopThread("manyhands test"), threading.Event()

    async def stubborn() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("a stubborn task")
        while True:
            try:
                started.set()
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                logging.getLogger(__name__).info("no")

    runtime.submit(stubborn())
    assert started.wait(20.0)
    began = time.monotonic()
    runtime.close()
    assert time.monotonic() - began < 15.0
    assert "Task 'a stubborn task' did not end within 1 s of its cancellation" in caplog.text
    gc.collect()  # so that asyncio complains of the task here, not in the next test
