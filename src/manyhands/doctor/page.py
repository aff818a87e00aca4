"""A report as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manyhands.doctor.checks import NAMES, Check, Report

_MARKS = {True: "ok", False: "FAIL", None: "-"}
_NAME_WIDTH = max(map(len, NAMES.values()))


def lines_of(report: Report) -> Iterator[str]:
    """The lines to print."""
    for address in dict.fromkeys(check.address for check in report.checks):
        yield address if address is not None else "This machine and the swarm"
        yield from _block([check for check in report.checks if check.address == address])
        yield ""
    yield verdict(report)


def _block(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield f"  {_MARKS[check.ok]:<4}  {NAMES[check.check]:<{_NAME_WIDTH}}  {check.detail}"
        if check.advice:
            yield f"  {'':<4}  {'':<{_NAME_WIDTH}}  -> {check.advice}"


def verdict(report: Report) -> str:
    """The last line: whether a peer can join, and how much is broken."""
    num_failed = sum(check.ok is False for check in report.checks)
    if not num_failed:
        return "All is well: a peer with these options can join." if report.can_join else "A peer cannot join."
    failed = "1 check failed" if num_failed == 1 else f"{num_failed} checks failed"
    if report.can_join:
        return f"{failed}. A peer with these options can join all the same, since one initial peer is enough."
    return f"{failed}. A peer with these options cannot join: no initial peer can be used."
