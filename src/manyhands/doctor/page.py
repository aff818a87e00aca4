"""Formats a report for people."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from manyhands.base.text import counted
from manyhands.doctor.checks import NAMES, NEEDED, Check, Report

_MARKS = {True: "ok", False: "FAIL", None: "-"}
_NAME_WIDTH = max(map(len, NAMES.values()))


def lines_of(report: Report) -> Iterator[str]:
    """Yield the lines to print."""
    for address in dict.fromkeys(check.address for check in report.checks):
        yield address if address is not None else "This machine and the swarm"
        yield from _block([check for check in report.checks if check.address == address])
        yield ""
    yield verdict(report)


def _block(checks: Sequence[Check]) -> Iterator[str]:
    for (ok, detail, advice), group in itertools.groupby(checks, lambda check: (check.ok, check.detail, check.advice)):
        names = ", ".join(NAMES[check.check] for check in group)  # one line for checks that were skipped together
        yield f"  {_MARKS[ok]:<4}  {names:<{_NAME_WIDTH}}  {detail}"
        if advice:
            yield f"  {'':<4}  {'':<{_NAME_WIDTH}}  -> {advice}"


def verdict(report: Report) -> str:
    """Return the last line: whether a peer can join, and how many checks failed."""
    if report.ok:
        return "All is well: a peer with these options can join."
    num_failed = sum(check.ok is False for check in report.checks)
    failed = f"{counted(num_failed, 'check')} failed. " if num_failed else ""
    if report.can_join:
        return f"{failed}A peer with these options can join all the same, since one initial peer is enough."
    obstacles = [check.check for check in report.checks if check.ok is False and check.check in (*NEEDED, "clock")]
    missing = [NAMES[kind] for kind in dict.fromkeys(obstacles)]
    why = f"see {' and '.join(missing)} above" if missing else "no initial peer can be used"
    return f"{failed}A peer with these options cannot join: {why}."
