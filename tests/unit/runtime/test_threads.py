"""Threads for jobs that block."""

from __future__ import annotations

import asyncio
import threading

import pytest

from manyhands.runtime import BlockingThreads, threads


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "manyhands test"]


async def test_jobs_run_at_the_same_time_and_their_threads_are_used_again() -> None:
    pool = BlockingThreads("manyhands test")
    barrier = threading.Barrier(4, timeout=20.0)
    await asyncio.gather(*(pool.start(barrier.wait) for _ in range(4)))
    for _ in range(20):
        assert await pool.start(lambda: 7) == 7
    assert len(our_threads()) == 4
    pool.close()
    for thread in our_threads():
        thread.join(20.0)
    assert our_threads() == []


async def test_an_exception_of_a_job_is_raised() -> None:
    pool = BlockingThreads("manyhands test")

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await pool.start(fail)
    assert await pool.start(lambda: "next") == "next"
    pool.close()


async def test_threads_that_have_nothing_to_do_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.05)
    pool = BlockingThreads("manyhands test")
    await pool.start(lambda: None)
    for thread in our_threads():
        thread.join(20.0)
    assert our_threads() == []
    assert await pool.start(lambda: 7) == 7
    pool.close()


async def test_a_job_that_ends_after_its_waiter_left_does_no_harm() -> None:
    pool = BlockingThreads("manyhands test")
    go_on, is_done = threading.Event(), threading.Event()

    def job() -> None:
        go_on.wait(20.0)
        is_done.set()

    waiting = pool.start(job)
    waiting.cancel()
    go_on.set()
    await asyncio.get_running_loop().run_in_executor(None, is_done.wait, 5.0)
    pool.close()
