"""Dials a peer that may have several addresses, and sends the hello of the stream."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.base.address import Address
from manyhands.base.deadline import time_limit
from manyhands.base.errors import DialFailed, DialReason, PeerLost, ProtocolViolation, Refused, Timeout, Unavailable
from manyhands.rpc.dial_rules import HeardDials
from manyhands.rpc.frames import CONTROL, Hello, Reject, Welcome, readable, receive_frame, send_frame
from manyhands.rpc.streams import OpenStreams
from manyhands.rpc.ways import DIRECT, Way
from manyhands.runtime.tasks import TaskOwner
from manyhands.transport import tcp
from manyhands.transport.api import Stream, Transport


@dataclass(frozen=True)
class Opened:
    """A stream after its hello and welcome.

    Attributes:
        address: the address at which the peer was reached; None if it was not dialled at one.
        rtt_s: seconds from the hello to the welcome.
        way: how it leads to the peer.
    """

    stream: Stream
    welcome: Welcome
    address: Address | None
    rtt_s: float
    way: Way = DIRECT


OpenOne = Callable[[Hello], Coroutine[Any, Any, Opened]]
"""Opens one connection to a certain peer with a hello."""

Dialled = tuple[Stream, Address]
Dial = asyncio.Task[Dialled | DialFailed]


class Dialler:
    """Opens the streams of one endpoint, and adds each to ``streams``.

    In its methods, ``heard`` contains the addresses that others named, each with the host of the peer if it announced
    the address itself; they are dialled only if the rules allow it.
    """

    def __init__(self, transport: Transport, streams: OpenStreams, rules: HeardDials) -> None:
        self._rules = rules
        self._transport = transport
        self._streams = streams
        self._tasks = TaskOwner("dialler")
        self._is_closed = False

    def check_open(self) -> None:
        """Raise ``Unavailable`` after :meth:`close`."""
        if self._is_closed:
            raise Unavailable("this peer is closed")

    async def close(self) -> None:
        """Stop all running dials; their callers get ``Unavailable``."""
        self._is_closed = True
        await self._tasks.close()

    async def open(
        self,
        addresses: Sequence[Address],
        hello: Hello,
        timeout_s: float,
        heard: Mapping[Address, str] | None = None,
    ) -> Opened:
        """Dial one peer, and say what the stream is for.

        Args:
            addresses: of the peer, the best first; those with IPv6 and IPv4 take turns.
        Raises:
            DialFailed: with the reason, if there is one address.
            Unavailable: with the reasons, if there are several.
            Refused: the peer refuses this stream.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        stream, address = await self._dial_first(addresses, timeout_s, heard, is_bulk=hello.purpose != CONTROL)
        return await self.greet(stream, address, hello, deadline - loop.time())

    async def greet(self, stream: Stream, address: Address | None, hello: Hello, timeout_s: float) -> Opened:
        """Say what a stream is for; it is released unless the other end accepts it.

        Raises:
            as :meth:`open`.
        """
        loop = asyncio.get_running_loop()
        where = str(address or f"peer {stream.remote}")
        try:
            async with time_limit(timeout_s, f"waiting for the welcome of {where}"):
                said_at = loop.time()
                await send_frame(stream, hello)
                answer = await receive_frame(stream)
                rtt_s = loop.time() - said_at
            if isinstance(answer, Reject):
                raise Refused(stream.remote, readable(answer.code), readable(answer.message))
            if not isinstance(answer, Welcome):
                raise ProtocolViolation(stream.remote, f"answered a hello with {type(answer).__name__}")
            self.check_open()
        except BaseException as error:
            self._streams.release(stream)
            if isinstance(error, Timeout):
                raise DialFailed(where, DialReason.TIMED_OUT, str(error)) from error
            if isinstance(error, (PeerLost, ProtocolViolation)):
                raise DialFailed(where, DialReason.REJECTED, str(error)) from error
            raise
        return Opened(stream, answer, address, rtt_s)

    async def probe(
        self, addresses: Sequence[Address], timeout_s: float, heard: Mapping[Address, str]
    ) -> tuple[Address, str]:
        """Return the first address at which the peer is found, and its IP address there.

        The connection is closed at once, without a hello.

        Raises:
            Unavailable: none answers.
        """
        stream, address = await self._dial_first(addresses, timeout_s, heard, is_bulk=False)
        self._streams.release(stream)
        return address, stream.remote_host

    async def _dial_first(
        self, addresses: Sequence[Address], timeout_s: float, heard: Mapping[Address, str] | None, *, is_bulk: bool
    ) -> Dialled:
        """Dial the addresses, and keep the first connection that opens.

        Each has a head start of :data:`manyhands.transport.tcp.HEAD_START_S` before the next is dialled too (RFC 8305,
        section 5). Those that others named are dialled after the rest, in turns of IPv6 and IPv4 (section 4).
        """
        heard = heard or {}
        first_ones = [address for address in addresses if address not in heard]
        addresses = [*first_ones, *in_turns([address for address in addresses if address in heard])]
        self.check_open()
        deadline = asyncio.get_running_loop().time() + timeout_s
        dials: list[Dial] = []
        kept: Dialled | None = None
        try:
            first = await self._race(addresses, deadline, dials, is_bulk, heard)
            self.check_open()
            kept = first
        finally:
            for dial in dials:
                dial.cancel()
                dial.add_done_callback(functools.partial(self._drop_unless, kept))
        if kept is not None:
            return kept
        failures = [failure for dial in dials if isinstance(failure := dial.result(), DialFailed)]
        if len(failures) == 1:
            raise failures[0]
        raise Unavailable("no address answers: " + "; ".join(str(failure) for failure in failures))

    async def _race(
        self,
        addresses: Sequence[Address],
        deadline: float,
        dials: list[Dial],
        is_bulk: bool,
        heard: Mapping[Address, str],
    ) -> Dialled | None:
        """Return the result of the first dial that succeeds, or None; all begun dials are added to ``dials``."""
        loop = asyncio.get_running_loop()
        untried = list(addresses)
        waiting: set[Dial] = set()
        while untried or waiting:
            self.check_open()
            if untried:
                address = untried.pop(0)
                dialling = self._dial(address, deadline - loop.time(), is_bulk, heard.get(address))
                dial = self._tasks.spawn(dialling, name=f"dial {address}")
                dials.append(dial)
                waiting.add(dial)
            head_start_s = tcp.HEAD_START_S if untried else None
            done, waiting = await asyncio.wait(waiting, timeout=head_start_s, return_when=asyncio.FIRST_COMPLETED)
            for dial in dials:
                if dial in done and (answer := _answer_of(dial)) is not None:
                    return answer
        return None

    async def _dial(self, address: Address, timeout_s: float, is_bulk: bool, sayer: str | None) -> Dialled | DialFailed:
        """Return a stream, or the failure as a value, since all callers may have given up.

        Args:
            sayer: as in ``heard``; None if the address is not in it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            place = address if sayer is None else await self._checked(address, timeout_s, sayer)
            dial = self._transport.dial_bulk if is_bulk else self._transport.dial
            stream: Stream = await dial(place, deadline - loop.time())
        except DialFailed as failure:
            return failure
        if sayer is not None:
            self._rules.found(place.host)
        self._streams.add(stream)
        return stream, address

    async def _checked(self, address: Address, timeout_s: float, sayer: str) -> Address:
        """Resolve an address that others named to an IP address that may be dialled.

        Raises:
            DialFailed: there is none.
        """
        hosts = [address.host]
        refusal = ""
        if not address.protocol.startswith("ip"):
            hosts = [str(place[4][0]) for place in await tcp.look_up(address, timeout_s)]
        for host in hosts:
            refusal = self._rules.refusal(host, address.port, sayer, asyncio.get_running_loop().time())
            if not refusal:
                return Address.of(host, address.port, address.peer_id)
        raise DialFailed(str(address), DialReason.HELD_BACK, refusal)

    def _drop_unless(self, kept: Dialled | None, dial: Dial) -> None:
        answer = _answer_of(dial)
        if answer is not None and answer is not kept:
            self._streams.release(answer[0])


def in_turns(addresses: Sequence[Address]) -> list[Address]:
    """Return addresses in turns of IPv6 and the others, IPv6 first; those of each keep their order."""
    ip6 = [address for address in addresses if address.protocol == "ip6"]
    others = [address for address in addresses if address.protocol != "ip6"]
    pairs = itertools.zip_longest(ip6, others)
    return [address for pair in pairs for address in pair if address is not None]


def _answer_of(dial: Dial) -> Dialled | None:
    if not dial.done() or dial.cancelled() or dial.exception() is not None:
        return None
    outcome = dial.result()
    return None if isinstance(outcome, DialFailed) else outcome
