"""The health of one peer of a run: whether others can read its records, it sees other peers, and its clock is right."""

from __future__ import annotations

import logging

import msgspec

from manyhands.averaging.timing import RECORD_S, TWO_MINUTES_S

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Consecutive failures to publish that count as a fault; one or two happen on any link."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether others can read a peer's records, it sees other peers, and its clock is right.

    Attributes:
        step: the last global step that it has made or loaded.
        publish_failures: consecutive failures to publish its progress.
        alone_s: seconds since another peer of the run was seen; None if one is there.
        last_said_goodbye: whether the last other peer left on purpose.
        clock_offset_s: how far its clock is ahead of those of some others; None if no peer has answered.
    """

    step: int
    publish_failures: int = 0
    alone_s: float | None = None
    last_said_goodbye: bool = False
    clock_offset_s: float | None = None

    def faults(self) -> dict[str, str]:
        """The faults, each with what to do about it, by the name of the attribute that shows it."""
        faults = {}
        if self.publish_failures >= MAX_FAILURES:
            faults["publish_failures"] = (
                f"this peer's progress could not be published {self.publish_failures} times in a row, so the others do "
                "not count its samples; check its connection, or run manyhands doctor"
            )
        if self.alone_s is not None and self.alone_s >= TWO_MINUTES_S:
            faults["alone_s"] = (
                f"no other peer of the run has been seen for {self.alone_s:.0f} s: this one trains alone; if others "
                "should be there, run manyhands doctor"
            )
        # a warning at half of the difference at which other peers refuse the records
        if self.clock_offset_s is not None and abs(self.clock_offset_s) >= RECORD_S:
            way = "ahead of" if self.clock_offset_s > 0 else "behind"
            faults["clock_offset_s"] = (
                f"the clock of this machine is {abs(self.clock_offset_s):.0f} s {way} those of other peers. They "
                "refuse its records once it is a minute off: set the clock, or switch on its synchronization (NTP)"
            )
        return faults


class HealthLog:
    """Logs each fault once, until it is over."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, health: Health) -> None:
        """Log the faults that are new since the last report."""
        faults = health.faults()
        for field in faults.keys() - self._told:
            is_normal = field == "alone_s" and health.last_said_goodbye
            logger.log(logging.INFO if is_normal else logging.WARNING, "%s", faults[field])
        self._told = set(faults)
