"""Background tasks: held, logged when they fail, and ended with their owner."""

import asyncio
import logging

import pytest

from manyhands.base.deadline import time_limit
from manyhands.runtime import TaskOwner


async def never() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("broken")


async def test_a_failure_is_logged_and_told() -> None:
    told: list[BaseException] = []
    owner = TaskOwner("kitchen", told.append)
    task = owner.spawn(fail(), name="soup")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(error) for error in told] == ["broken"]
    assert len(owner) == 0


async def test_the_log_names_the_part_and_the_task(caplog: pytest.LogCaptureFixture) -> None:
    owner = TaskOwner("kitchen")
    await asyncio.wait([owner.spawn(fail(), name="soup")])
    await asyncio.sleep(0)
    (record,) = [record for record in caplog.records if record.name == "manyhands.runtime.tasks"]
    assert record.getMessage() == "Background task 'kitchen: soup' failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ValueError


async def test_success_and_cancellation_are_no_failures(caplog: pytest.LogCaptureFixture) -> None:
    owner = TaskOwner("kitchen")
    done, cancelled = owner.spawn(asyncio.sleep(0, "soup"), name="soup"), owner.spawn(never(), name="stew")
    cancelled.cancel()
    await asyncio.wait([done, cancelled])
    await asyncio.sleep(0)
    assert done.result() == "soup"
    assert len(owner) == 0
    assert not caplog.records


async def test_close_ends_all_tasks_and_takes_no_more() -> None:
    owner = TaskOwner("kitchen")
    tasks = [owner.spawn(never(), name=str(number)) for number in range(3)]
    await owner.close()
    assert all(task.cancelled() for task in tasks)
    with pytest.raises(RuntimeError, match="kitchen is closed; it cannot start 'more'"):
        owner.spawn(never(), name="more")
    await owner.close()


async def test_close_from_one_of_its_own_tasks_does_not_wait_for_itself() -> None:
    owner = TaskOwner("kitchen")
    other = owner.spawn(never(), name="other")
    async with time_limit(1.0, "for the owner to close"):
        await owner.spawn(owner.close(), name="closing")
    assert other.cancelled()


async def test_close_names_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    released = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                logging.getLogger(__name__).info("no")

    owner = TaskOwner("kitchen")
    task = owner.spawn(stubborn(), name="oven")
    await asyncio.sleep(0)
    await owner.close(timeout_s=0.01)
    assert "Background task 'kitchen: oven' did not end within 0.01 s of its cancellation" in caplog.text
    released.set()
    await task


async def test_a_task_beside_a_block_ends_with_it_and_its_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    owner = TaskOwner("kitchen")
    async with owner.beside(never(), name="soup"):
        assert len(owner) == 1
    assert len(owner) == 0
    assert not caplog.records
    async with owner.beside(fail(), name="salad"):
        await asyncio.sleep(0.01)
        assert [record.getMessage() for record in caplog.records] == ["Background task 'kitchen: salad' failed"]
    with pytest.raises(ValueError, match="broken"):
        async with owner.beside(never(), name="soup"):
            await fail()
    assert len(owner) == 0
