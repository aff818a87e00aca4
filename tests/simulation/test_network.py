"""The simulated network does what its documentation says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, PeerLost
from manyhands.testing import Host, World, at, between, every
from manyhands.testing.links import TURN_BYTES
from manyhands.testing.network import HANDSHAKE_TRIPS
from manyhands.transport import ControlStream

LATENCY_S = 0.05
MIB = 1 << 20

OnStream = Callable[[ControlStream], Awaitable[None]]


def pair_world(seed: int = 0) -> World:
    world = World(seed)
    world.network.default_link.latency_s = LATENCY_S
    for name in ("a", "b", "c"):
        world.host(name)
    return world


async def connected(world: World, name: str, to: str, on_stream: OnStream) -> ControlStream:
    """A stream from one host to another, which serves it by ``on_stream``."""
    host, target = world.host(name), world.host(to)

    async def listen() -> Address:
        return (await world.transport(target).listen(Address.of(target.ip, 0), on_stream)).addresses[0]

    address = await target.spawn(listen())
    return await host.spawn(world.transport(host).dial(address, 5.0))


class Sink:
    """Takes what comes, and notes when."""

    def __init__(self, world: World) -> None:
        self.arrivals: list[tuple[float, bytes]] = []
        self.num_bytes = 0
        self.ended_s = 0.0
        self._world = world

    async def __call__(self, stream: ControlStream) -> None:
        try:
            while True:
                chunk = await stream.receive()
                self.num_bytes += len(chunk)
                self.arrivals.append((self._world.loop.time(), chunk[:8]))
        except PeerLost:
            self.ended_s = self._world.loop.time()
            raise


def test_a_message_takes_the_latency_and_a_handshake_three_times_that() -> None:
    world = pair_world()
    sink = Sink(world)

    async def story() -> None:
        stream = await connected(world, "a", "b", sink)
        assert world.loop.time() == pytest.approx(HANDSHAKE_TRIPS * LATENCY_S)
        stream.send_now(b"hello")
        await asyncio.sleep(1.0)
        assert sink.arrivals == [(pytest.approx((HANDSHAKE_TRIPS + 1) * LATENCY_S), b"hello")]

    world.story(story())


def test_two_streams_share_a_bandwidth_equally_however_much_one_has_queued() -> None:
    world = pair_world()
    world.network.set_bandwidth("a", up_mbit_s=80, down_mbit_s=80)  # 10 MB/s
    greedy, modest = Sink(world), Sink(world)

    async def story() -> None:
        first = await connected(world, "a", "b", greedy)
        second = await connected(world, "a", "c", modest)
        started = world.loop.time()
        sending = [
            world.host("a").spawn(first.send(bytes(16 * MIB))),
            world.host("a").spawn(repeat(second, 64 * 1024, 16)),
        ]
        await asyncio.sleep(1.0)
        assert modest.num_bytes == MIB
        took_s = modest.arrivals[-1][0] - started - LATENCY_S
        assert took_s == pytest.approx(2 * MIB / 10e6, rel=0.15), "half of the bandwidth"
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)

    async def repeat(stream: ControlStream, num_bytes: int, times: int) -> None:
        for _ in range(times):
            await stream.send(bytes(num_bytes))

    world.story(story())


@pytest.mark.parametrize("limited", ["a", "b"])
def test_a_small_message_does_not_wait_for_a_large_transfer(limited: str) -> None:
    world = pair_world()
    world.network.set_bandwidth(limited, up_mbit_s=8, down_mbit_s=8)  # 1 MB/s: 64 KiB take 66 ms
    bulk, control = Sink(world), Sink(world)

    async def story() -> None:
        large = await connected(world, "a", "b", bulk)
        small = await connected(world, "a", "b", control)
        sending = world.host("a").spawn(large.send(bytes(8 * MIB)))
        await asyncio.sleep(1.0)
        sent = world.loop.time()
        small.send_now(b"beat")
        await asyncio.sleep(1.0)
        assert control.arrivals[0][0] - sent < LATENCY_S + 2 * TURN_BYTES / 1e6
        sending.cancel()
        await asyncio.wait([sending])

    world.story(story())


def test_bytes_arrive_in_order_whatever_jitter_and_loss_do() -> None:
    world = pair_world(seed=3)
    link = world.network.default_link
    link.jitter_s, link.loss = 0.05, 0.2
    sink = Sink(world)

    async def story() -> None:
        stream = await connected(world, "a", "b", sink)
        world.schedule(at(1.0).cut("a", "b"), between(2.0, 4.0).cut("a", "b"), at(4.5).call(open_again))
        for number in range(500):
            stream.send_now(number.to_bytes(8, "big"))
            await asyncio.sleep(0.01)
        await asyncio.sleep(5.0)

    def open_again() -> None:
        world.unblock([("a", "b")])

    world.story(story())
    assert [number for _, number in sink.arrivals] == [number.to_bytes(8, "big") for number in range(500)]
    assert not [time for time, _ in sink.arrivals if 1.5 < time < 4.5], "two blocks: the first to end opens nothing"


def test_blocking_one_direction_leaves_the_other_open() -> None:
    world = pair_world()
    there, back = Sink(world), Sink(world)

    async def both_ways(stream: ControlStream) -> None:
        stream.send_now(b"back")
        await there(stream)

    async def story() -> None:
        stream = await connected(world, "a", "b", both_ways)
        world.block([("a", "b")])
        stream.send_now(b"there")
        await asyncio.sleep(2.0)
        assert await stream.receive() == b"back"
        assert there.arrivals == []

    world.story(story())
    assert back.arrivals == []


async def lost_after(world: World, stream: ControlStream, seconds: float) -> float:
    """When a stream was lost for its reader, or 0 after some time."""
    done, waiting = await asyncio.wait([asyncio.ensure_future(stream.receive())], timeout=seconds)
    for task in waiting:
        task.cancel()
    return world.loop.time() if done and isinstance(done.pop().exception(), PeerLost) else 0.0


@pytest.mark.parametrize(
    ("fault", "is_told"),
    [("kill", True), ("reset", True), ("crash", False), ("half_open", False), ("freeze", False)],
)
def test_kills_and_resets_end_a_stream_at_once_and_silent_faults_do_not(fault: str, is_told: bool) -> None:
    world = pair_world()
    happens = {
        "kill": at(1).kill("b"),
        "reset": at(1).reset("a", "b"),
        "crash": at(1).crash("b"),
        "half_open": at(1).half_open("a", "b"),
        "freeze": at(1).freeze("b"),
    }[fault]
    world.schedule(happens)

    async def story() -> float:
        stream = await connected(world, "a", "b", Sink(world))
        return await lost_after(world, stream, 30.0)

    lost_s = world.story(story())
    assert lost_s == pytest.approx(1.0 + (LATENCY_S if fault == "kill" else 0.0)) if is_told else lost_s == 0.0


def test_a_frozen_program_reads_what_came_meanwhile_when_it_thaws() -> None:
    world = pair_world()
    sink = Sink(world)
    world.schedule(between(1, 5).freeze("b"))

    async def story() -> None:
        stream = await connected(world, "a", "b", sink)
        await asyncio.sleep(1.0)
        stream.send_now(b"one")
        await asyncio.sleep(1.0)
        stream.send_now(b"two")
        await asyncio.sleep(5.0)

    world.story(story())
    assert b"".join(chunk for _, chunk in sink.arrivals) == b"onetwo"
    assert {time for time, _ in sink.arrivals} == {5.0}


def test_a_sender_waits_for_a_reader_that_does_not_read() -> None:
    world = pair_world()

    async def stay(stream: ControlStream) -> None:
        await stream.wait_closed()

    async def story() -> None:
        stream = await connected(world, "a", "b", stay)
        sending = world.host("a").spawn(stream.send(bytes(64 * MIB)))
        await asyncio.sleep(60.0)
        assert not sending.done()
        assert stream.bytes_sent <= 3 * MIB
        stream.abort()
        with pytest.raises(PeerLost):
            await sending

    world.story(story())


def test_a_dial_that_is_given_up_leaves_no_stream() -> None:
    world = pair_world()

    async def story() -> None:
        listener = await world.host("b").spawn(world.transport(world.host("b")).listen(
            Address.of(world.host("b").ip, 0), Sink(world)))  # fmt: skip
        for given_up_s in (0.01, 0.11, 0.1499, 0.15):
            dial = world.transport(world.host("a")).dial(listener.addresses[0], 5.0)
            dialling = world.host("a").spawn(dial)
            await asyncio.sleep(given_up_s)
            dialling.cancel()
            await asyncio.wait([dialling])
            await asyncio.sleep(1.0)
            assert not world.network.streams, given_up_s

    world.story(story())


def test_dials_fail_for_the_reason_that_there_is() -> None:
    world = pair_world()
    world.schedule(at(1).freeze("b"), at(2).kill("c"))

    async def story() -> None:
        a, b = world.host("a"), world.host("b")
        listener = await b.spawn(world.transport(b).listen(Address.of(b.ip, 0), Sink(world)))
        await asyncio.sleep(3.0)
        for address, reason in (
            (listener.addresses[0], DialReason.TIMED_OUT),
            (Address.of(world.host("c").ip, 1), DialReason.REFUSED),
            (Address.of("10.9.9.9", 1), DialReason.UNREACHABLE),
        ):
            with pytest.raises(DialFailed) as caught:
                await a.spawn(world.transport(a).dial(address, 2.0))
            assert caught.value.reason is reason

    world.story(story())


def clock_differences(world: World, *times: float) -> list[float]:
    seen: list[float] = []

    async def live(host: Host) -> None:
        await asyncio.sleep(1e3)

    for name in ("a", "b"):
        world.start(name, live)
    for time in times:
        world.schedule(at(time).call(lambda: seen.append(world.host("a").wall_clock() - world.host("b").wall_clock())))
    world.run(100.0)
    return seen


def test_clocks_jump_forward_and_backward_and_stay() -> None:
    world = pair_world()
    world.schedule(at(5).clock("a", 60), at(10).clock("a", -90), between(20, 30).clock("a", 7), every(40).clock("b", 1))
    assert clock_differences(world, 1, 6, 11, 25, 35, 50) == [0.0, 60.0, -30.0, -23.0, -30.0, -31.0]


def test_several_senders_that_wait_for_room_all_go_on() -> None:
    world = pair_world()
    sink = Sink(world)

    async def late(stream: ControlStream) -> None:
        await asyncio.sleep(5.0)
        await sink(stream)

    async def story() -> None:
        stream = await connected(world, "a", "b", late)
        a = world.host("a")
        sending = [a.spawn(stream.send(bytes(3 * MIB))), a.spawn(stream.send(bytes(MIB)))]
        await asyncio.sleep(1.0)
        sending += [a.spawn(stream.send_message(bytes(10))) for _ in range(3)]
        await asyncio.wait([asyncio.gather(*sending)], timeout=60.0)
        await asyncio.sleep(1.0)
        assert all(task.done() for task in sending)
        assert sink.num_bytes == 4 * MIB + 30

    world.story(story())
