"""A peer behind a tunnel that drops and comes back at another port, over real sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time

import pytest
import torch

import manyhands
from manyhands.base.address import Address
from manyhands.base.errors import Unavailable
from manyhands.tunnels import TunnelKeeper, keeper
from tests.forwarder import Forwarder
from tests.network import identity_of

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
FOUND_WITHIN_S = 60.0


class Tunnel:
    """A forwarder in the place of a service; it cannot be opened as long as ``is_down``."""

    name = "forwarder"

    def __init__(self) -> None:
        self.is_down = False
        self.num_opened = 0
        self.forwarder: Forwarder | None = None

    async def open(self, target: Address) -> Address:
        if self.is_down:
            raise Unavailable("the forwarder is down")
        self._dropped = asyncio.Event()
        self.forwarder = Forwarder(target.host, target.port)
        self.num_opened += 1
        return Address.parse(f"/dns4/localhost/tcp/{await self.forwarder.open()}")

    async def drop(self) -> None:
        assert self.forwarder is not None
        self.forwarder.cut()
        self._dropped.set()

    async def wait_dropped(self) -> str:
        await self._dropped.wait()
        return "it was cut"

    async def close(self) -> None:
        if self.forwarder is not None:
            self.forwarder.cut()


def averaged(*averagers: manyhands.Averager, timeout_s: float = 10.0) -> bool:
    """Whether all of these end a round together."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda averager: averager.step(timeout_s=timeout_s), averagers))
    return all(result.committed and len(result.group) == len(averagers) for result in results)


@pytest.mark.long
def test_a_client_averages_with_a_peer_behind_a_tunnel_that_comes_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "FIRST_WAIT_S", 0.2)
    caplog.set_level(logging.INFO)
    tunnel = Tunnel()
    with (
        manyhands.Peer(listen=LOOPBACK) as first,
        manyhands.Peer(first.addresses, listen=LOOPBACK, before_joining=TunnelKeeper(tunnel).start) as hidden,
        manyhands.Peer(first.addresses, client_mode=True) as client,
        manyhands.Averager([torch.zeros(1000)], peer=hidden, run_id="tunnels") as one,
        manyhands.Averager([torch.ones(1000)], peer=client, run_id="tunnels") as two,
    ):
        (address,) = hidden.addresses
        assert "/dns4/localhost/tcp/" in address
        client.endpoint.outside.public_ip6 = lambda: ""
        for number in range(8):  # behind such a router it cannot meet the other one by dialling at the same time
            client.endpoint.outside.note(identity_of(number).peer_id, ("30.0.0.1", 5000), ("192.168.1.2", 4000))
        assert averaged(one, two)
        assert tunnel.forwarder is not None
        assert tunnel.forwarder.num_carried, "the client has no other way"
        tunnel.is_down = True
        hidden.run(tunnel.drop(), 5.0, "cutting")
        assert not averaged(one, two, timeout_s=3.0)
        tunnel.is_down = False
        began = time.monotonic()
        while not averaged(one, two):
            assert time.monotonic() < began + FOUND_WITHIN_S
        assert tunnel.num_opened == 2
        assert hidden.addresses != [address]
        assert "Connected peers learn the new address at once." in caplog.text
        with manyhands.Peer(hidden.addresses, client_mode=True) as newcomer:
            assert newcomer.dht.num_known_peers
