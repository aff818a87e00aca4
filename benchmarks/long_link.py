"""Bulk throughput between two machines, over one connection and over as many as the link is worth.

On one machine:  python benchmarks/long_link.py serve --listen /ip4/0.0.0.0/tcp/31337
On the other:    python benchmarks/long_link.py measure ADDRESS --mb 32 --repeats 3 --json FILE

``serve`` prints its addresses. The two variants take turns; medians are printed. JSON: one object with ``rtt_ms``,
``mb``, ``one_connection_mb_per_s``, ``striped_mb_per_s`` and ``connections``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from manyhands.base.address import Address
from manyhands.base.deadline import while_moving
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import Identity, PeerId
from manyhands.rpc import Endpoint, Method
from manyhands.rpc.striping import num_stripes
from manyhands.transport import Stream, TlsTransport, tcp

KIND = "benchmark"
STALL_S = 20.0


class Nothing(msgspec.Struct):
    """Request and response of a round trip."""


PING: Method[Nothing, Nothing] = Method("benchmark.ping", Nothing, Nothing)

app = App(name="long_link", help=__doc__, version_flags=[])


@app.command
def serve(*, listen: str = "/ip4/0.0.0.0/tcp/0") -> None:
    """Receive until Ctrl-C."""

    async def main() -> None:
        endpoint = Endpoint(TlsTransport(Identity.generate()))

        async def take(remote: PeerId, header: bytes, stream: Stream) -> None:
            memory = memoryview(bytearray(int.from_bytes(header, "big")))
            await while_moving(
                stream.receive_into(memory),
                lambda: stream.bytes_received,
                at_least=1,
                within_s=STALL_S,
                phase="receiving",
            )
            await stream.send(b"ok")
            await stream.close()

        async def answer(remote: PeerId, request: Nothing) -> Nothing:
            return request

        endpoint.accept_bulk(KIND, take)
        endpoint.handle(PING, answer)
        await endpoint.listen([Address.parse(listen)])
        for address in endpoint.addresses:
            print(address, flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await endpoint.close()

    asyncio.run(main())


@app.command
def measure(
    address: str, *, mb: int = 32, repeats: int = 3, json_file: Annotated[Path | None, Parameter("--json")] = None
) -> None:
    """Send to a serving machine."""

    async def main() -> dict[str, float]:
        endpoint = Endpoint(TlsTransport(Identity.generate()), client_mode=True)
        try:
            peer_id = await endpoint.connect(Address.parse(address))
            round_trips = [await seconds_of(endpoint.call(peer_id, PING, Nothing())) for _ in range(10)]
            data = memoryview(bytearray(mb * 1_000_000))
            speeds: dict[str, list[float]] = {"one_connection": [], "striped": []}
            for number in range(repeats):
                for way, size_bytes in (("one_connection", 0), ("striped", len(data))):
                    print(f"{way}, {number + 1} of {repeats}", file=sys.stderr)
                    speeds[way].append(mb / await seconds_of(send(endpoint, peer_id, data, size_bytes)))
            return {
                "rtt_ms": round(1000 * statistics.median(round_trips), 3),
                "mb": mb,
                "one_connection_mb_per_s": round(statistics.median(speeds["one_connection"]), 2),
                "striped_mb_per_s": round(statistics.median(speeds["striped"]), 2),
                "connections": num_stripes(min(round_trips), len(data), has_bbr=tcp.has_bbr()),
            }
        finally:
            await endpoint.close()

    result = asyncio.run(main())
    print(json.dumps(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result) + "\n")


async def send(endpoint: Endpoint, peer_id: PeerId, data: memoryview, size_bytes: int) -> None:
    """Send all data over a new stream, and wait until it has arrived."""
    stream = await endpoint.open_bulk(peer_id, KIND, len(data).to_bytes(8, "big"), 20.0, size_bytes=size_bytes)
    try:
        await while_moving(stream.send(data), lambda: stream.bytes_sent, at_least=1, within_s=STALL_S, phase="sending")
        await while_moving(
            stream.receive_into(memoryview(bytearray(2))),
            lambda: 0,
            at_least=1,
            within_s=10 * STALL_S,
            phase="for the end",
        )
    finally:
        endpoint.release(stream)


async def seconds_of(work: object) -> float:
    began = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - began


if __name__ == "__main__":
    try:
        app()
    except ManyhandsError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
