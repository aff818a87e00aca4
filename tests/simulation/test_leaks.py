"""Invariants after every event, and programs that leave something behind."""

from __future__ import annotations

import asyncio

import pytest

from manyhands.base.address import Address
from manyhands.testing import Deadlock, Host, InvariantBroken, Leaked, World, at
from manyhands.transport import ControlStream


def test_an_invariant_is_checked_after_the_very_event_that_breaks_it() -> None:
    """Two messages arrive at one instant; the first breaks it and the second would mend it."""
    world = World(4)
    balance: list[int] = []

    async def take(stream: ControlStream) -> None:
        while True:
            balance.append(int(await stream.receive()))

    async def serve(host: Host) -> None:
        await world.transport(host).listen(Address.of(host.ip, 1), take)
        await asyncio.sleep(60.0)

    async def send(host: Host) -> None:
        streams = [await world.transport(host).dial(Address.of(world.host("b").ip, 1), 5.0) for _ in range(2)]
        await asyncio.sleep(10.0 - world.loop.time())
        for stream, message in zip(streams, (b"-1", b"1"), strict=True):
            stream.send_now(message)
        await asyncio.sleep(60.0)

    world.start("b", serve)
    world.start("a", send)
    world.invariant("the balance is not negative", lambda: sum(balance) >= 0, lambda: balance)
    with pytest.raises(
        InvariantBroken, match=r"not negative does not hold after “a>b #1 2 bytes .*” \(\[-1\]\), at 10"
    ):
        world.run(50.0)
    assert balance == [-1]


def test_an_invariant_that_a_timer_breaks_names_the_host_of_the_timer() -> None:
    world = World(0)
    broken: list[bool] = []

    async def program(host: Host) -> None:
        await asyncio.sleep(3.25)
        broken.append(True)
        await asyncio.sleep(10.0)

    world.start("a", program)
    world.invariant("all is well", lambda: not broken)
    with pytest.raises(InvariantBroken, match=r"all is well does not hold after a timer of a, at 3\.25"):
        world.run(10.0)


def test_an_invariant_is_not_checked_within_an_event() -> None:
    world = World(0)
    accounts = {"a": 1, "b": 1}

    async def program(host: Host) -> None:
        accounts["a"] -= 1
        await asyncio.sleep(0)
        accounts["b"] += 1
        await asyncio.sleep(1.0)

    world.start("a", program)
    world.invariant("nothing is lost", lambda: sum(accounts.values()) == 2)
    world.run(10.0)


def test_a_world_without_invariants_is_not_interrupted() -> None:
    world = World(0)

    async def program(host: Host) -> None:
        await asyncio.sleep(5.0)
        assert world.loop.on_settled is None
        await asyncio.sleep(5.0)

    world.start("a", program)
    world.run(20.0)


async def sleep_long() -> None:
    await asyncio.sleep(1e6)


def test_a_task_that_a_program_leaves_is_named() -> None:
    world = World(0)

    async def forgetful(host: Host) -> None:
        task = asyncio.ensure_future(sleep_long())
        task.set_name("the heartbeat")
        await asyncio.sleep(2.0)

    world.start("a", forgetful)
    expected = r"program of a has ended and left: task 'the heartbeat' at test_leaks\.py:\d+ in sleep_long, at 2\.0"
    with pytest.raises(Leaked, match=expected):
        world.run(10.0)


def test_a_stream_and_a_port_that_a_program_leaves_are_named() -> None:
    world = World(0)

    async def stay(stream: ControlStream) -> None:
        stream.send_now(b"hello")
        await stream.wait_closed()

    async def serve(host: Host) -> None:
        listener = await world.transport(host).listen(Address.of(host.ip, 7), stay)
        await asyncio.sleep(1.0)
        if host.name == "tidy":
            await listener.close()

    async def dial(host: Host) -> None:
        await asyncio.sleep(0.1)
        await world.transport(host).dial(Address.of(world.host("tidy").ip, 7), 5.0)
        await asyncio.sleep(0.1)

    world.start("tidy", serve)
    world.start("a", dial)
    with pytest.raises(Leaked, match=r"program of a has ended and left: stream #1 a>tidy is open, 5 bytes unread"):
        world.run(10.0)

    world = World(0)
    world.start("b", serve)
    with pytest.raises(Leaked, match=r"program of b has ended and left: port 7 is open"):
        world.run(10.0)


def test_programs_that_tidy_up_may_end_and_may_be_killed_in_any_state() -> None:
    world = World(0)

    async def tidy(host: Host) -> None:
        task = asyncio.ensure_future(sleep_long())
        await asyncio.sleep(2.0)
        task.cancel()

    async def killed(host: Host) -> None:
        asyncio.ensure_future(sleep_long()).set_name("left")
        await asyncio.sleep(10.0)

    world.start("a", tidy)
    world.start("b", killed)
    world.schedule(at(1).kill("b"))
    world.run(20.0)


def test_bytes_that_nobody_reads_are_named_at_the_end() -> None:
    world = World(0)

    async def deaf(stream: ControlStream) -> None:
        await stream.wait_closed()

    async def serve(host: Host) -> None:
        await world.transport(host).listen(Address.of(host.ip, 7), deaf)
        await asyncio.sleep(1e6)

    async def send(host: Host) -> None:
        await asyncio.sleep(0.1)
        stream = await world.transport(host).dial(Address.of(world.host("b").ip, 7), 5.0)
        stream.send_now(bytes(100))
        await asyncio.sleep(1e6)

    world.start("b", serve)
    world.start("a", send)
    with pytest.raises(Leaked, match=r"stream #1 b>a: 100 unread bytes, the last of them received 100 s ago"):
        world.run(100.1)


def test_programs_that_are_told_to_stop_tidy_up() -> None:
    world = World(0)
    stopped: list[float] = []

    async def polite(host: Host) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1.5)
            stopped.append(world.loop.time())

    world.start("a", polite)
    world.start("b", polite)
    world.run(10.0, stop_within_s=5.0)
    assert stopped == [11.5, 11.5]


def test_a_program_that_does_not_stop_when_it_is_told_to_is_named() -> None:
    world = World(0)

    async def stubborn(host: Host) -> None:
        while True:
            try:
                await sleep_long()
            except asyncio.CancelledError:
                continue

    world.start("a", stubborn)
    with pytest.raises(Leaked, match=r"told to stop: program of a; after 5 s: .*program of a at test_leaks\.py:\d+ in"):
        world.run(10.0, stop_within_s=5.0)


def test_a_program_that_leaves_something_when_it_is_told_to_stop_is_named() -> None:
    world = World(0)

    async def forgetful(host: Host) -> None:
        asyncio.ensure_future(sleep_long()).set_name("the heartbeat")
        await asyncio.sleep(1e6)

    world.start("a", forgetful)
    with pytest.raises(Leaked, match=r"program of a has ended and left: task 'the heartbeat'"):
        world.run(10.0, stop_within_s=5.0)


async def wait_for_nothing() -> None:
    await asyncio.Event().wait()


def test_a_program_that_waits_for_nothing_is_named() -> None:
    world = World(0)

    async def stuck(host: Host) -> None:
        await asyncio.sleep(3.0)
        await wait_for_nothing()

    async def done(host: Host) -> None:
        await asyncio.sleep(4.0)

    world.start("a", stuck)
    world.start("b", done)
    with pytest.raises(Deadlock, match=r"program of a at test_leaks\.py:\d+ in wait_for_nothing"):
        world.run(1000.0)


def test_a_program_with_an_open_port_may_wait_for_others() -> None:
    world = World(0)

    async def serve(host: Host) -> None:
        async def nobody(stream: ControlStream) -> None:
            raise AssertionError

        listener = await world.transport(host).listen(Address.of(host.ip, 7), nobody)
        try:
            await asyncio.Event().wait()
        finally:
            await listener.close()

    world.start("a", serve)
    world.run(1000.0, stop_within_s=1.0)
    assert world.loop.time() == 1000.0


def test_an_exception_of_a_program_is_not_hidden_by_programs_that_deadlock() -> None:
    world = World(0)

    async def fail(host: Host) -> None:
        raise ZeroDivisionError

    async def wait(host: Host) -> None:
        await wait_for_nothing()

    world.start("a", wait)
    world.start("b", fail)
    with pytest.raises(ZeroDivisionError):
        world.run(10.0)


def test_a_program_that_never_waits_is_a_deadlock() -> None:
    world = World(0)

    async def spin(host: Host) -> None:
        while True:
            await asyncio.sleep(0)

    world.start("a", spin)
    with pytest.raises(Deadlock, match=r"time stands still at 0\.0+ s: .*program of a at test_leaks\.py:\d+ in .*spin"):
        world.run(10.0)
