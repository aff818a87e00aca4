"""What is said when all who train are behind firewalls, so that none of them can dial another."""

from __future__ import annotations

import logging
import math
import shlex

logger = logging.getLogger(__name__)

PERIOD_S = 60.0
PATIENCE_S = 3.0
"""Peers that start together hear of each other one after the other."""


class StrandedNotice:
    """Says it again every minute, as long as it lasts."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._due_at = math.inf

    def look(self, num_trainers: int, addresses: list[str], now: float) -> None:
        """Say it if it is time to.

        Args:
            num_trainers: all who train, if nobody in the run can be dialled; else 0. One alone misses nobody.
            addresses: of any peer through which another one can join.
            now: seconds of a clock that never goes back.
        """
        if num_trainers < 2:
            self._due_at = math.inf
        elif self._due_at == math.inf:
            self._due_at = now + PATIENCE_S
        elif now >= self._due_at:
            self._due_at = now + PERIOD_S
            logger.warning("%s", describe_stranded(num_trainers, self._run_id, addresses))


def describe_stranded(num_trainers: int, run_id: str, addresses: list[str]) -> str:
    """What is wrong, what it means, and the command that mends it."""
    return (
        f"All {num_trainers} peers that train are in client mode, so nobody can dial them and they make no step "
        "together; their gradients are kept. At least one of them must accept connections, or a machine without data "
        "helps: on the monitor's machine, or any other that accepts connections, run: "
        f"manyhands train --auxiliary --run-id {shlex.quote(run_id)} --initial-peers {' '.join(addresses) or 'ADDRESS'}"
    )
