"""The report as people read it."""

from __future__ import annotations

import pytest

from manyhands.doctor.checks import Check, Kind, report_of
from manyhands.doctor.page import lines_of, verdict

A, B = "/ip4/203.0.113.7/tcp/1", "/ip4/203.0.113.8/tcp/1"


def check(kind: Kind, ok: bool | None, address: str | None = A, detail: str = "detail", advice: str = "") -> Check:
    return Check(kind, ok, detail, advice, address)


def steps(address: str) -> list[Check]:
    return [check(kind, True, address) for kind in ("dns", "tcp", "tls", "identity", "protocol", "dht")]


def test_a_report_without_failures_says_that_all_is_well() -> None:
    report = report_of([*steps(A), check("peers", True, None)], "me", 0.5)
    assert report.ok
    assert report.can_join
    assert verdict(report).startswith("All is well")


def test_one_initial_peer_is_enough_to_join() -> None:
    report = report_of([check("tcp", False, A), *steps(B)], "me", 0.5)
    assert not report.ok
    assert report.can_join
    assert verdict(report).startswith("1 check failed. A peer with these options can join all the same")


@pytest.mark.parametrize(("kind", "name"), [("run", "run"), ("listen", "listening")])
def test_without_the_run_or_the_port_no_peer_can_join(kind: Kind, name: str) -> None:
    report = report_of([*steps(A), check(kind, False, None)], "me", 0.5)
    assert not report.can_join
    assert verdict(report) == f"1 check failed. A peer with these options cannot join: see {name} above."
    assert report_of([*steps(A), check(kind, None, None)], "me", 0.5).can_join


def test_a_peer_joins_only_where_its_clock_agrees() -> None:
    report = report_of([*steps(A), check("clock", False, A)], "me", 0.5)
    assert not report.can_join
    assert verdict(report) == "1 check failed. A peer with these options cannot join: see clock above."
    report = report_of([*steps(A), check("clock", False, A), *steps(B), check("clock", True, B)], "me", 0.5)
    assert report.can_join, "the other one agrees with this machine"


def test_a_peer_with_another_identity_is_not_the_one_to_join() -> None:
    checks = [check(c.check, c.check != "identity") for c in steps(A)]
    assert not report_of(checks, "me", 0.5).can_join


def test_without_any_initial_peer_all_is_not_well_though_nothing_failed() -> None:
    report = report_of([check("identity", None)], "me", 0.5)
    assert not report.ok
    assert verdict(report) == "A peer with these options cannot join: no initial peer can be used."


def test_lines_of_a_report_are_grouped_by_address_and_end_with_the_verdict() -> None:
    checks = [
        check("peers", None, None, "not tried"),
        check("clock", True, B),
        check("dns", None, A, "an IP address"),
        check("tcp", False, A, "refused", "start it"),
        check("dht", None, A, "not tried: TCP comes first"),
        check("tls", None, A, "not tried: TCP comes first"),
    ]
    assert list(lines_of(report_of(checks, "me", 0.5))) == [
        B,
        "  ok    clock          detail",
        "",
        A,
        "  -     DNS            an IP address",
        "  FAIL  TCP            refused",
        "                       -> start it",
        "  -     TLS, DHT       not tried: TCP comes first",
        "",
        "This machine and the swarm",
        "  -     peers          not tried",
        "",
        "1 check failed. A peer with these options cannot join: no initial peer can be used.",
    ]
