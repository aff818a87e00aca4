"""The steps behind a state, by their lineages: tells whether a checkpoint is of the same branch of the run. Pure.

An *ancestry* is a string of bytes: the beginnings of the lineages after the first step and after each of the last ones.
"""

from __future__ import annotations

DIGEST_BYTES = 8
"""Bytes that are kept of each lineage: enough to tell the branches of one run apart."""
MAX_STEPS = 4096
MAX_ANCESTRY_BYTES = DIGEST_BYTES * MAX_STEPS


def extended(ancestry: bytes, lineage: bytes) -> bytes:
    """The ancestry one step later."""
    longer = ancestry + lineage[:DIGEST_BYTES]
    if len(longer) <= MAX_ANCESTRY_BYTES:
        return longer
    return longer[:DIGEST_BYTES] + longer[2 * DIGEST_BYTES :]


def root_of(ancestry: bytes) -> bytes:
    """The entry that tells two beginnings of one run apart; empty before the first step, or if unknown."""
    return ancestry[:DIGEST_BYTES]


def descends_from(ancestry: bytes, step: int, earlier: int, root: bytes, lineage: bytes) -> bool:
    """Whether a state goes on from an earlier one of the run.

    If the earlier state is more than ``MAX_STEPS`` steps back, only the beginning of the run is compared.

    Args:
        step: step of the state with this ancestry.
        earlier: step of the earlier state, with its ``root`` and its ``lineage``; these are empty if unknown.
    """
    if root_of(ancestry) != root:
        return False
    start = len(ancestry) - (step - earlier + 1) * DIGEST_BYTES
    is_known = bool(lineage) and start > 0 and earlier <= step  # the root is at 0
    return not is_known or ancestry[start : start + DIGEST_BYTES] == lineage[:DIGEST_BYTES]
