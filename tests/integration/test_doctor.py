"""The doctor at good and at broken set-ups, over real sockets: what it finds, and what it says to do."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.access import Charter, SignedCharter
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.base.address import Address
from manyhands.base.ticket import DIGEST_BYTES
from manyhands.dht import DhtConfig
from manyhands.doctor import Check, Examination, Report
from manyhands.doctor.page import lines_of
from manyhands.optim.manifest import RunManifest, manifest_key
from manyhands.optim.run.run_records import declare_run
from manyhands.peer import Presence
from manyhands.reach import EXAMINE
from manyhands.reach.messages import DIAL_BACK, REACHED
from manyhands.transport import TlsTransport
from tests import tls_contexts
from tests.integration.test_relays import seems_symmetric
from tests.integration.test_transport import answer_http, context_of_another_issuer, hang_up, server_of, silent_port
from tests.network import LOOPBACK, identity_of

CONFIG = DhtConfig(refresh_period_s=1000.0)
SKEW_S = 75.0


@asynccontextmanager
async def coordinators(
    num_peers: int, *, are_islands: bool = False, skews_s: Sequence[float] = ()
) -> AsyncIterator[list[Presence]]:
    """Peers that listen on loopback; each joins at the first one, unless they are islands."""
    async with AsyncExitStack() as stack:
        peers: list[Presence] = []
        for number in range(num_peers):
            skew_s = skews_s[number] if skews_s else 0.0
            peer = Presence(
                TlsTransport(identity_of(number)),
                rng=random.Random(number),
                wall_clock=lambda skew_s=skew_s: time.time() + skew_s,  # type: ignore[misc]
                dht_config=CONFIG,
            )
            stack.push_async_callback(peer.stop)
            await peer.start(peers[0].endpoint.addresses if peers and not are_islands else [], [LOOPBACK])
            peers.append(peer)
        yield peers


def address_of(peer: Presence) -> Address:
    return peer.endpoint.addresses[0]


async def examined(*initial_peers: Address | str, **options: Any) -> Report:
    wall_clock: Callable[[], float] = options.pop("wall_clock", time.time)
    addresses = [Address.parse(str(address)) for address in initial_peers]
    options.setdefault("listen", [LOOPBACK])
    report = await Examination(initial_peers=addresses, **options).run(identity_of(50), wall_clock=wall_clock)
    assert report.ok == (report.can_join and all(check.ok is not False for check in report.checks))
    for check in report.checks:
        assert check.detail.isprintable()
        assert check.ok is not False or check.advice, "a failure comes with what to do about it"
    assert list(lines_of(report))
    return report


def the(report: Report, kind: str, address: Address | str | None = None) -> Check:
    """The one check of a kind, perhaps of one address."""
    (found,) = [c for c in report.checks if c.check == kind and (address is None or c.address == str(address))]
    return found


def failed(report: Report) -> list[str]:
    return [check.check for check in report.checks if check.ok is False]


# good


async def test_doctor_passes_a_healthy_swarm() -> None:
    async with coordinators(3) as peers:
        report = await examined(*map(address_of, peers))
        assert report.ok, list(lines_of(report))
        for peer in peers:
            outcomes = {c.check: c.ok for c in report.checks if c.address == str(address_of(peer))}
            assert outcomes.pop("dns") is None
            assert len(outcomes) == 7
            assert all(outcomes.values())
            assert the(report, "dht", address_of(peer)).peer == peer.peer_id
        assert "the 3 initial peers see each other" in the(report, "coordinators").detail
        assert all(peer.endpoint.counters["protocol_violations"] == 0 for peer in peers)


async def test_doctor_counts_the_peers_and_joins_no_routing_table() -> None:
    async with coordinators(5) as peers:
        report = await examined(address_of(peers[0]))
        assert report.ok
        assert "5 peers can be seen" in the(report, "peers").detail
        known = {contact.peer_id for peer in peers for contact in peer.dht.contacts()}
        assert identity_of(50).peer_id not in known


async def test_an_address_without_a_peer_id_is_followed_and_the_id_is_told() -> None:
    async with coordinators(1) as (peer,):
        report = await examined(f"127.0.0.1:{address_of(peer).port}")
        assert report.ok
        assert the(report, "identity").ok is None
        assert str(address_of(peer)) in the(report, "identity").advice


async def test_doctor_takes_two_addresses_of_one_peer_for_one_swarm() -> None:
    async with coordinators(1) as (peer,):
        report = await examined(address_of(peer), f"localhost:{address_of(peer).port}")
        assert report.ok, list(lines_of(report))
        assert "localhost is" in the(report, "dns", f"/dns/localhost/tcp/{address_of(peer).port}").detail
        assert the(report, "coordinators").ok is None


# one address that does not work


async def test_doctor_reports_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with coordinators(1) as (peer,):
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda h, *a, **k: (no_such_name if h.endswith(".example") else real)(h, *a, **k)
        )
        report = await examined(f"/dns4/nowhere.example/tcp/31337/p2p/{peer.peer_id}", address_of(peer))
    assert failed(report) == ["dns"]
    assert report.can_join, "the other one is enough"
    check = the(report, "dns", f"/dns4/nowhere.example/tcp/31337/p2p/{peer.peer_id}")
    assert "nowhere.example does not resolve (Name or service not known)" in check.detail
    assert "spelt" in check.advice


async def test_doctor_reports_a_port_where_nothing_listens() -> None:
    with silent_port(listens=False) as address:
        report = await examined(address)
    assert failed(report) == ["tcp"]
    assert not report.can_join
    assert f"connection refused: nothing listens on 127.0.0.1 port {address.port}" in the(report, "tcp").detail
    assert "is the peer running" in the(report, "tcp").advice
    assert [c.check for c in report.checks if "TCP comes first" in c.detail] == ["tls", "identity", "protocol", "dht"]


@pytest.mark.parametrize("serve", [answer_http, hang_up])
async def test_doctor_reports_a_server_that_does_not_speak_tls(serve: Callable[..., Any]) -> None:
    async with server_of(serve) as address:
        report = await examined(address)
    assert failed(report) == ["tls"]
    assert "not a manyhands peer" in the(report, "tls").detail
    assert "HTTP" in the(report, "tls").advice


async def test_doctor_reports_a_tls_server_that_is_no_peer(tmp_path: Path) -> None:
    async with server_of(hang_up, context_of_another_issuer(tmp_path, ssl.PROTOCOL_TLS_SERVER)) as address:
        report = await examined(address)
    assert failed(report) == ["tls"]
    assert "the TLS server of another program" in the(report, "tls").detail


async def test_a_port_that_says_nothing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.doctor.probe.STEP_TIMEOUT_S", 0.3)
    with silent_port(listens=True) as address:
        report = await examined(address)
    assert failed(report) == ["tls"]
    assert report.seconds < 4.0
    assert "does not answer the TLS handshake" in the(report, "tls").detail


async def test_doctor_reports_another_protocol_version() -> None:
    context = tls_contexts.server_context(identity_of(7))
    context.set_alpn_protocols(["manyhands/2"])
    async with server_of(hang_up, context) as address:
        report = await examined(address)
    assert failed(report) == ["protocol"]
    assert "not of protocol version manyhands/1" in the(report, "protocol").detail


async def test_doctor_reports_that_another_identity_answers() -> None:
    async with coordinators(1) as (peer,):
        expected = identity_of(8).peer_id
        report = await examined(address_of(peer).with_peer(expected))
    assert failed(report) == ["identity"]
    assert not report.can_join
    check = the(report, "identity")
    assert f"the peer there is {peer.peer_id} and not {expected}" in check.detail
    assert check.peer == peer.peer_id
    assert str(address_of(peer)) in check.advice


async def test_doctor_reports_an_initial_peer_with_the_identity_of_this_machine() -> None:
    async with coordinators(1) as (peer,):
        report = await Examination(initial_peers=[address_of(peer)], listen=[LOOPBACK]).run(identity_of(0))
    assert not failed(report)
    assert not report.ok
    assert "this peer itself" in the(report, "identity").detail


# the swarm


async def test_doctor_reports_two_initial_peers_that_do_not_see_each_other() -> None:
    async with coordinators(2, are_islands=True) as (first, second):
        report = await examined(address_of(first), address_of(second))
        assert failed(report) == ["coordinators"]
        check = the(report, "coordinators")
        labels = [f"127.0.0.1:{address_of(peer).port}" for peer in (first, second)]
        assert f"{labels[0]} and {labels[1]} do not see each other: the swarm may be split" in check.detail
        assert f"{labels[0]} with {address_of(second)}" in check.advice
        assert not first.dht.contacts(), "the doctor did not make them known to each other"


async def test_doctor_names_the_one_of_three_initial_peers_that_is_an_island() -> None:
    async with coordinators(2) as (first, second), coordinators(4, are_islands=True) as islands:
        report = await examined(address_of(first), address_of(second), address_of(islands[3]))
        split = [check for check in report.checks if check.check == "coordinators"]
        assert len(split) == 2
        assert all(f"127.0.0.1:{address_of(islands[3]).port}" in check.detail for check in split)


# clocks


async def test_doctor_reports_a_wrong_clock_of_this_machine() -> None:
    async with coordinators(2) as (first, second):
        report = await examined(address_of(first), address_of(second), wall_clock=lambda: time.time() + SKEW_S)
        assert failed(report) == ["clock", "clock"]
        check = the(report, "clock", address_of(first))
        assert "the clock of this machine is 75 s ahead of this peer's; beyond 60 s records are refused" in check.detail
        assert "do not agree with this machine either: set its clock (NTP)" in check.advice


async def test_doctor_reports_a_wrong_clock_of_one_peer() -> None:
    async with coordinators(3, skews_s=[0.0, SKEW_S, 0.0]) as peers:
        report = await examined(*map(address_of, peers))
        assert failed(report) == ["clock"]
        check = the(report, "clock", address_of(peers[1]))
        assert "75 s behind" in check.detail
        assert "set the clock of that peer" in check.advice


# being dialled


async def test_doctor_reports_a_firewall_before_the_announced_port() -> None:
    """The announced port leads nowhere."""
    async with coordinators(2) as peers:
        with silent_port(listens=False) as closed:
            report = await examined(*map(address_of, peers), announce=[closed])
        assert failed(report) == ["dial_back", "dial_back"]
        assert report.can_join
        check = the(report, "dial_back", address_of(peers[0]))
        assert f"cannot dial this machine ({closed}: connection refused)" in check.detail
        assert "--client-mode" in check.advice
        assert "--announce" in check.advice


async def test_doctor_reports_another_peer_at_the_announced_address() -> None:
    async with coordinators(2) as (first, second):
        report = await examined(address_of(first), announce=[address_of(second)])
        assert failed(report) == ["dial_back"]
        assert "another peer answers" in the(report, "dial_back").detail


async def test_doctor_does_not_have_a_peer_in_client_mode_dialled_back() -> None:
    async with coordinators(1) as (peer,):
        report = await examined(address_of(peer), client_mode=True)
        assert report.ok
        assert the(report, "dial_back").ok is None
        assert not peer.endpoint.counters["dial_backs"]


async def test_a_taken_port_is_named_and_the_rest_is_examined() -> None:
    async with coordinators(1) as (peer,):
        with silent_port(listens=True) as taken:
            report = await examined(address_of(peer), listen=[taken], announce=[taken])
        assert failed(report) == ["listen"]
        assert the(report, "dial_back").ok is None
        assert f"port {taken.port} is taken" in the(report, "listen").detail
        assert the(report, "dht").ok


async def test_doctor_skips_checks_that_an_older_peer_cannot_make() -> None:
    async with coordinators(1) as (peer,):
        for method in (EXAMINE, DIAL_BACK, REACHED):
            peer.endpoint.unhandle(method)
        report = await examined(address_of(peer))
        assert report.ok
        assert "older version" in the(report, "clock").detail
        assert "older version" in the(report, "dial_back").detail


async def test_a_peer_that_hangs_after_the_handshake_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with coordinators(1) as (peer,):

        async def stuck(*args: Any) -> Any:
            await asyncio.sleep(60.0)

        peer.endpoint.unhandle(EXAMINE)
        peer.endpoint.handle(EXAMINE, stuck)
        monkeypatch.setattr("manyhands.doctor.probe.STEP_TIMEOUT_S", 0.3)
        report = await examined(address_of(peer))
        assert the(report, "dht").ok
        assert the(report, "clock").ok is None


# the run


async def begin_run(peer: Presence, run_id: str) -> bytes:
    """Publish what a trainer publishes; returns the fingerprint of its settings."""
    manifest = RunManifest("manyhands/1", run_id, 8, [], [], "SGD", [], "", "none", {})
    declare_run(peer.dht, run_id)
    await peer.dht.store(manifest_key(run_id), zlib.compress(manifest.encoded()), 60.0, subkey=peer.peer_id)
    await publish(peer, run_id)
    return manifest.fingerprint()


async def publish(peer: Presence, run_id: str) -> None:
    """Publish a record of progress."""
    is_client = peer.endpoint.client_mode
    record = PeerRecord(Position(1, b"x"), is_client, [], 60.0, samples=4, samples_per_second=1.0, lineage_samples=8)
    plain = msgspec.to_builtins(record, builtin_types=(bytes,))
    await peer.dht.store(peer_key(run_id, PROGRESS_KIND), plain, 60.0, subkey=peer.peer_id)


async def test_the_settings_of_a_ticket_are_compared_with_those_of_the_run() -> None:
    async with coordinators(2) as peers:
        digest = (await begin_run(peers[1], "r"))[:DIGEST_BYTES]
        report = await examined(address_of(peers[0]), run_id="r", digest=digest)
        assert report.ok, list(lines_of(report))
        assert "run 'r' (1 peer) exists" in the(report, "run").detail

        report = await examined(address_of(peers[0]), run_id="r", digest=bytes(DIGEST_BYTES))
        assert not report.can_join
        assert "its trainers have other settings than the ticket or the charter says" in the(report, "run").detail


async def test_the_settings_of_a_charter_are_compared_also_without_a_ticket() -> None:
    async with coordinators(2) as peers:
        owner = identity_of(60)
        fingerprint = await begin_run(peers[1], "signed")
        await begin_run(peers[1], "other")
        for run_id, manifest in (("signed", fingerprint), ("other", bytes(32))):
            charter = SignedCharter.sign(owner, Charter(run_id, owner.peer_id, manifest=manifest))
            await peers[0].serve_charter(charter)
            report = await examined(address_of(peers[0]), run_id=run_id)
            assert (the(report, "run").ok is False) is (run_id == "other")
            assert ("other settings" in the(report, "run").detail) is (run_id == "other")
            report = await examined(address_of(peers[0]), run_id=run_id, charter=charter.digest)
            assert (the(report, "run").ok is False) is (run_id == "other")


async def test_the_charter_of_a_ticket_must_be_that_of_the_run() -> None:
    async with coordinators(2) as peers:
        owner = identity_of(60)
        charter = SignedCharter.sign(owner, Charter("r", owner.peer_id, "invite"))
        report = await examined(address_of(peers[0]), run_id="r", charter=charter.digest)
        assert "nobody publishes the charter of run 'r'" in the(report, "run").detail

        await peers[0].serve_charter(charter)
        report = await examined(address_of(peers[1]), run_id="r", charter=bytes(32))
        assert "run 'r' has another charter than the ticket says" in the(report, "run").detail
        report = await examined(address_of(peers[1]), run_id="r", charter=charter.digest)
        assert report.can_join
        assert "has the charter that the ticket names" in the(report, "run").detail
        report = await examined(address_of(peers[0]), run_id="r")
        assert not report.can_join
        assert (the(report, "run").detail, the(report, "run").advice) == (
            "run 'r' is by invitation", "ask its owner for a ticket, in place of the address"
        )  # fmt: skip


# the ways to the peers of the run


@asynccontextmanager
async def client_of(relay: Presence, number: int) -> AsyncIterator[Presence]:
    """A trainer in client mode."""
    client = Presence(TlsTransport(identity_of(number)), client_mode=True, dht_config=CONFIG)
    try:
        await client.start([address_of(relay)], [])
        await publish(client, "r")
        yield client
    finally:
        await client.stop()


async def test_doctor_tells_how_each_peer_of_the_run_is_reached() -> None:
    async with coordinators(2) as (relay, trainer), client_of(relay, 30) as near, client_of(relay, 31) as far:
        await begin_run(trainer, "r")
        seems_symmetric(far.endpoint)
        report = await examined(address_of(relay), run_id="r")
        check = the(report, "ways")
        assert check.detail.startswith("3 peers of run 'r': ")
        assert f"1 punched ({near.peer_id})" in check.detail
        assert any(f"1 relayed by {one.peer_id} ({far.peer_id})" in check.detail for one in (relay, trainer))
        assert "1 direct" in check.detail
        assert check.ok is None, "the relay is no volunteer"
        assert "that relay forwards no averages: start it with --relay" in check.advice
        assert "the other machines' routers stood in the way" in check.advice
        assert f"({far.peer_id}: its router takes another port for each connection (symmetric))" in check.advice
        assert report.seconds < 15.0


async def test_doctor_reports_a_run_whose_trainers_it_does_not_reach() -> None:
    async with coordinators(1) as (relay,):
        async with client_of(relay, 30) as gone:
            await begin_run(gone, "r")
        report = await examined(address_of(relay), run_id="r")
        check = the(report, "ways")
        assert check.ok is False
        assert f"1 peer of run 'r': 1 not reached ({gone.peer_id})" in check.detail
        assert "started with --relay" in check.advice
        assert report.can_join
