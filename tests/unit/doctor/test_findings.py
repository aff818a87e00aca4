"""What the doctor says: every failure comes with what to do about it."""

from __future__ import annotations

import pytest

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, JoinFailed, PeerError, PeerLost, Refused, Timeout
from manyhands.doctor import findings
from manyhands.doctor.checks import Finding
from manyhands.doctor.findings import Met
from manyhands.reach.messages import NOT_ALLOWED, DialOutcome, ExamineResponse
from manyhands.rpc.outside import Router
from manyhands.rpc.ways import DIRECT, PUNCHED, relayed_by
from tests.network import identity_of

PEER, OTHER = identity_of(1).peer_id, identity_of(2).peer_id
PLACE = Address.parse(f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}")
PLACE_6 = Address.parse("/ip6/2001:db8::7/tcp/31337")
NAME = Address.parse("/dns4/home.example/tcp/31337")
UNKNOWN_METHOD = Refused(PEER, "unknown_method", "no method here")
WAYS = DIRECT, PUNCHED, relayed_by(PEER)
SILENT = Timeout("waiting for dht.ping", 3.0)


def failure(reason: DialReason, detail: str = "") -> DialFailed:
    return DialFailed(str(PLACE), reason, detail)


def dialled(code: str, *, announced: bool = False, chosen: bool = True, address: Address = PLACE_6) -> Finding:
    outcomes = [(address, DialOutcome(str(address), code))]
    return findings.dialled_back(outcomes, are_announced=announced, port_was_chosen=chosen)


@pytest.mark.parametrize(
    ("finding", "detail", "advice"),
    [
        (findings.name_not_found(NAME, failure(DialReason.NAME_NOT_FOUND)), "home.example does not resolve", "spelt"),
        (findings.not_connected(PLACE, failure(DialReason.REFUSED)), "203.0.113.7 port 31337", "is that its port?"),
        (findings.not_connected(PLACE, failure(DialReason.TIMED_OUT)), "no answer", "let TCP port 31337 in"),
        (findings.not_connected(PLACE, failure(DialReason.UNREACHABLE, "No route to host")), "No route", "online"),
        (findings.not_connected(PLACE_6, failure(DialReason.UNREACHABLE)), "2001:db8::7", "no IPv6"),
        (findings.tls_failed(PLACE, failure(DialReason.TIMED_OUT)), "does not answer the TLS handshake", "tunnel"),
        (findings.tls_failed(PLACE, failure(DialReason.NOT_MANYHANDS, "x")), "not a manyhands peer (x)", "web server"),
        (findings.other_version(), "not of protocol version manyhands/1", "install the same version"),
        (findings.identified(PLACE, OTHER), f"is {OTHER} and not {PEER}", f"use {PLACE.with_peer(OTHER)}"),
        (
            findings.not_welcomed(Refused(PEER, "full", "1024 connections")),
            "1024 connections (full)",
            "another initial",
        ),
        (findings.not_welcomed(PeerLost(PEER, "reset")), "reset", "its log"),
        (findings.does_not_answer(UNKNOWN_METHOD), "client mode", "not in client mode"),
        (findings.does_not_answer(SILENT), "does not answer a ping", "its log"),
        (findings.clock(75.2, 0.01, 60.0, None), "75 s ahead", "compare both"),
        (findings.clock(-75.2, 0.01, 60.0, False), "75 s behind", "set its clock (NTP)"),
        (findings.clock(75.2, 0.01, 60.0, True), "75 s ahead", "set the clock of that peer"),
        (dialled("timed_out"), "/tcp/31337: no answer", "let TCP port 31337 in at this machine's firewall"),
        (dialled("refused"), "connection refused", "forward TCP port 31337 to this machine"),
        (dialled("not_manyhands"), "something else answers", "forward TCP port 31337"),
        (dialled("refused", announced=True), "connection refused", "check that --announce"),
        (dialled("timed_out", chosen=False), "no answer", "that is open, --listen PORT"),
        (
            findings.dialled_back(
                [(PLACE_6, DialOutcome(str(PLACE_6), "refused"))],
                are_announced=False,
                port_was_chosen=False,
                listens_with={"ip4"},
            ),
            "connection refused",
            "it sees this machine at an IPv6 address, with which this machine does not listen: --listen PORT listens",
        ),
        (dialled("from_the_future"), "from_the_future", "let TCP port"),
        (findings.nothing_to_dial([Address.parse("127.0.0.1:7")]), "loopback", "--listen 7 listens"),
        (findings.no_dial_back(SILENT), "did not report the outcome", "its log"),
        (findings.cannot_listen(Timeout("x", 1.0)), "timed out", "from another machine"),
        (findings.no_peers_seen(SILENT), "joining the swarm failed", "their logs"),
        (
            findings.do_not_see(PLACE, PLACE_6, first_sees=False, second_sees=False),
            "203.0.113.7:31337 and [2001:db8::7]:31337 do not see each other: the swarm may be split",
            "--initial-peers",
        ),
        (
            findings.do_not_see(PLACE, PLACE_6, first_sees=False, second_sees=True),
            "[2001:db8::7]:31337 sees 203.0.113.7:31337, but not the other way round",
            "the machine of 203.0.113.7:31337 can dial /ip6",
        ),
    ],
)
def test_a_failure_says_what_to_do(finding: Finding, detail: str, advice: str) -> None:
    assert finding.ok is False
    assert detail in finding.detail
    assert advice in finding.advice


@pytest.mark.parametrize("finding", [findings.no_runs_seen(SILENT), findings.not_welcomed(SILENT)])
def test_an_error_is_explained_in_the_documentation(finding: Finding) -> None:
    assert finding.advice.endswith("see docs/reference/errors.md#timeout")


@pytest.mark.parametrize(
    ("finding", "detail"),
    [
        (findings.name_found(PLACE, ["203.0.113.7"]), "no name to look up"),
        (findings.identified(PLACE_6, PEER), PEER),
        (findings.itself(), "this peer itself"),
        (findings.no_clock(UNKNOWN_METHOD), "older version"),
        (findings.no_clock(SILENT), "timed out"),
        (findings.no_clock(None), "nobody answered"),
        (findings.no_dial_back(UNKNOWN_METHOD), "older version"),
        (findings.no_dial_back(Refused(PEER, "busy", "ask again in 7 s")), "ask again in 7 s"),
        (findings.no_dial_back(PeerError(PEER, "odd")), "odd"),
        (findings.nothing_to_dial([]), "does not listen"),
        (findings.dialled_back([], are_announced=False, port_was_chosen=True), "did not report"),
    ],
)
def test_checks_that_were_not_made_are_no_failures(finding: Finding, detail: str) -> None:
    assert finding.ok is None
    assert detail in finding.detail


def test_of_a_large_swarm_only_a_part_is_counted() -> None:
    assert findings.peers_seen(7, 2, is_part=False).detail == "7 peers can be seen"
    assert findings.peers_seen(31, 2, is_part=True).detail == "at least 31 peers can be seen"
    assert findings.peers_seen(2, 2, is_part=False).detail == "the 2 initial peers can be seen, and no other peer yet"


def test_within_its_limit_and_the_error_of_measurement_a_clock_is_right() -> None:
    assert findings.clock(59.0, 0.0, 60.0, None).ok
    assert findings.clock(-60.5, 0.6, 60.0, None).ok
    assert not findings.clock(-60.5, 0.4, 60.0, None).ok


def test_one_address_that_works_is_enough_unless_it_was_announced() -> None:
    outcomes = [(PLACE, DialOutcome("", NOT_ALLOWED, "private")), (PLACE_6, DialOutcome(""))]
    assert findings.dialled_back(outcomes, are_announced=False, port_was_chosen=True).ok
    finding = findings.dialled_back(outcomes, are_announced=True, port_was_chosen=True)
    assert finding.ok is False
    assert f"at {PLACE_6}, but not at all addresses ({PLACE}: not tried: private)" in finding.detail


def test_text_of_other_peers_is_made_printable_in_findings() -> None:
    evil = "\x1b[2J\nok"
    assert findings.answers(ExamineResponse(0.0, "", 3, evil)).detail.isprintable()
    finding = findings.dialled_back([(PLACE, DialOutcome(evil, evil, evil))], are_announced=True, port_was_chosen=True)
    assert finding.detail.isprintable()
    assert findings.ip_address(evil) == ""
    assert findings.no_peers_seen(JoinFailed([failure(DialReason.REFUSED)])).detail.isprintable()


def test_every_reason_of_a_failed_dial_back_has_its_words() -> None:
    after_the_handshake = {DialReason.REJECTED}
    for code in {reason.name.lower() for reason in set(DialReason) - after_the_handshake}:
        outcomes = [(PLACE, DialOutcome(str(PLACE), code, ""))]
        detail = findings.dialled_back(outcomes, are_announced=True, port_was_chosen=True).detail
        assert f"{PLACE}: {code}" not in detail, "the code alone says it to nobody"


@pytest.mark.parametrize(
    ("kind", "has_ip6", "ok", "words"),
    [
        ("none", False, True, "the others see this machine at its own address, 203.0.113.7"),
        ("port-preserving", False, True, "can connect directly"),
        ("symmetric", False, None, "are reached through a relay"),
        ("symmetric", True, None, "directly if they have IPv6, as this machine has, or else through a relay"),
        ("unknown", False, None, "not tried"),
    ],
)
def test_the_kind_of_router_is_explained(kind: Router, has_ip6: bool, ok: bool | None, words: str) -> None:
    finding = findings.router(kind, [] if kind == "unknown" else ["203.0.113.7"], has_ip6=has_ip6)
    assert finding.ok is ok
    assert words in finding.detail


def test_a_router_with_several_addresses_is_named() -> None:
    finding = findings.router("port-preserving", ["203.0.113.7"], ["203.0.113.7", "203.0.113.9"], has_ip6=False)
    assert finding.ok is None
    assert "it uses several addresses, 203.0.113.7, 203.0.113.9" in finding.detail
    both_families = ["2001:db8::7", "203.0.113.7"]
    assert findings.router("port-preserving", both_families, both_families, has_ip6=True).ok


def test_the_ways_to_the_peers_of_a_run_are_counted_and_what_would_help_is_told() -> None:
    direct, punched, relayed = (Met(identity_of(number).peer_id, way) for number, way in enumerate(WAYS, 10))
    found = findings.ways("r", [direct, punched], 2, is_place_known=True)
    assert (found.ok, found.advice) == (True, "")
    assert found.detail == f"2 peers of run 'r': 1 direct, 1 punched ({punched.peer_id})"
    found = findings.ways("r", [direct, relayed], 40, is_place_known=False)
    assert found.ok
    assert found.detail == f"2 of 40 peers of run 'r': 1 direct, 1 relayed by {PEER} ({relayed.peer_id})"
    assert found.advice.startswith("this machine's router stood in the way of a direct connection: an open port")
    found = findings.ways("r", [direct, Met(OTHER, None)], 2, is_place_known=True)
    assert found.ok is None
    assert (
        found.advice == "those that were not reached have left, or need a peer that both can dial, started with --relay"
    )
    found = findings.ways("r", [relayed._replace(carries_bulk=False)], 1, is_place_known=True)
    assert found.ok is None
    assert "that relay forwards no averages: start it with --relay" in found.advice
    found = findings.ways("r", [relayed._replace(is_client=False)], 1, is_place_known=True)
    assert "lets connections to some ports out of this network only, or addresses" in found.advice
    assert "router" not in found.advice
    found = findings.ways("r", [Met(OTHER, None)], 1, is_place_known=True)
    assert found.ok is False
    assert found.detail == f"1 peer of run 'r': 1 not reached ({OTHER})"
    assert findings.ways("r", [], 0, is_place_known=True).ok is None
