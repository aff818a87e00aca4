"""The tunnel of ngrok, with a fake of its package."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, MissingExtra, Unavailable
from manyhands.peer import Presence
from manyhands.transport import TlsTransport
from manyhands.tunnels import NgrokTunnel, TunnelKeeper, keeper
from tests.network import LOOPBACK, identity_of

ADVICE = "Unless one returns, start the others again with: --initial-peers"
FAKES = str(Path(__file__).parents[2] / "fakes")


@pytest.fixture
def ngrok(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.delitem(sys.modules, "ngrok", raising=False)
    monkeypatch.setenv("NGROK_AUTHTOKEN", "good-token")
    import ngrok  # type: ignore[import-not-found,unused-ignore]

    return ngrok


@pytest.fixture
async def presence() -> AsyncIterator[Presence]:
    presence = Presence(TlsTransport(identity_of(1)))
    yield presence
    await presence.stop()


async def test_a_tunnel_is_announced_and_leads_to_the_peer(
    ngrok: ModuleType, presence: Presence, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await presence.start([], [LOOPBACK], before_joining=TunnelKeeper(NgrokTunnel()).start)
    (session,) = ngrok.sessions
    port = session.forwarder.port
    assert f"Ngrok tunnel created: tcp://localhost:{port}" in caplog.messages
    (address,) = presence.endpoint.addresses
    assert str(address) == f"/dns4/localhost/tcp/{port}/p2p/{presence.peer_id}"
    other = Presence(TlsTransport(identity_of(2)), client_mode=True)
    await other.start([address], [])
    assert session.forwarder.num_carried > 0
    await other.stop()
    await presence.stop()
    assert session.is_closed


async def test_a_tunnel_that_drops_is_opened_again_until_that_works(
    ngrok: ModuleType, presence: Presence, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "FIRST_WAIT_S", 0.05)
    caplog.set_level(logging.INFO)
    await presence.start([], [LOOPBACK], before_joining=TunnelKeeper(NgrokTunnel()).start)
    before = presence.endpoint.addresses
    monkeypatch.setattr(ngrok, "is_offline", True)
    ngrok.sessions[0].drop()
    while "trying again" not in caplog.text:
        await asyncio.sleep(0.01)
    assert presence.endpoint.addresses == before
    monkeypatch.setattr(ngrok, "is_offline", False)
    while presence.endpoint.addresses == before:
        await asyncio.sleep(0.01)
    (address,) = presence.endpoint.addresses
    assert address.port == ngrok.sessions[1].forwarder.port
    assert ngrok.sessions[0].is_closed
    assert "has dropped (connect.ngrok-agent.com:443: reconnecting: session closed)" in caplog.text
    await asyncio.sleep(0)
    assert f"No peer is connected now, so none learns the new address. {ADVICE} {address}" in caplog.text


@pytest.mark.parametrize(
    ("token", "wanted"),
    [
        (
            "token-refused",
            r"ERR_NGROK_105: .*proper ngrok tunnel authtoken. .*: \*\*\* .*into NGROK_AUTHTOKEN",
        ),
        (
            "token-limited",
            "ERR_NGROK_108: .*limited to 1 simultaneous.*stop another tunnel of this account.*--announce",
        ),
        ("token-no-card", "ERR_NGROK_8013: .*only for accounts with a payment card.*--announce"),
        ("token-odd", "ERR_NGROK_99999: .*Something new.*https://ngrok.com/docs/errors/err_ngrok_99999"),
    ],
)
async def test_a_refusal_says_in_one_line_what_to_do(
    ngrok: ModuleType, presence: Presence, monkeypatch: pytest.MonkeyPatch, token: str, wanted: str
) -> None:
    monkeypatch.setenv("NGROK_AUTHTOKEN", token)
    with pytest.raises(ConfigError, match=wanted) as caught:
        await presence.start([], [LOOPBACK], before_joining=TunnelKeeper(NgrokTunnel()).start)
    assert "\n" not in str(caught.value)
    assert not presence.dht.num_known_peers


async def test_a_tunnel_service_that_cannot_be_reached_raises_unavailable(
    ngrok: ModuleType, presence: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGROK_AUTHTOKEN", "token-offline")
    with pytest.raises(Unavailable, match=r"ngrok cannot be reached .*failed to establish tcp connection"):
        await presence.start([], [LOOPBACK], before_joining=TunnelKeeper(NgrokTunnel()).start)


def test_the_token_and_the_package_are_checked_before_anything_is_opened(
    ngrok: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGROK_AUTHTOKEN", "  ")
    with pytest.raises(ConfigError, match=r"NGROK_AUTHTOKEN is not set.*your-authtoken into NGROK_AUTHTOKEN"):
        NgrokTunnel()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="ngrok"):
        NgrokTunnel()


async def test_a_tunnel_to_a_peer_that_listens_nowhere_is_refused(ngrok: ModuleType, presence: Presence) -> None:
    with pytest.raises(ConfigError, match="listens on none"):
        await presence.start([], [], before_joining=TunnelKeeper(NgrokTunnel()).start)


class NotedTunnel(NgrokTunnel):
    """Shows where it leads."""

    async def open(self, target: Address) -> Address:
        self.target = target
        return await super().open(target)


@pytest.mark.parametrize(
    ("listen", "target"),
    [
        ("/ip4/0.0.0.0/tcp/5", "/ip4/127.0.0.1/tcp/5"),
        ("/ip6/::/tcp/5", "/ip6/::1/tcp/5"),
        ("127.0.0.1:5", "/ip4/127.0.0.1/tcp/5"),
    ],
)
async def test_a_tunnel_leads_to_loopback_where_the_peer_listens_on_all_interfaces(
    ngrok: ModuleType, listen: str, target: str
) -> None:
    tunnel, bound = NotedTunnel(), [Address.parse(listen)]
    endpoint = SimpleNamespace(bound_addresses=bound, announce=lambda addresses: None, num_connected_peers=0)
    tunnel_keeper = TunnelKeeper(tunnel)
    await tunnel_keeper.start(SimpleNamespace(endpoint=endpoint, on_close=[]))  # type: ignore[arg-type]
    await tunnel_keeper.close()
    assert str(tunnel.target) == target
