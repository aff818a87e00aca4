"""Whether samples that a step was made without may count in the next one. Pure.

A peer that missed a step loads the state of the others. Its gradients were computed on the parameters before that step,
so in the next one they are one step stale, as with ``delay``. They must be in neither step twice: if the peer has been
in the group of a round that led on from its position, that round may have committed with them, whatever the peer itself
has heard of it. Then the state that it loads must say whose samples it has.
"""

from __future__ import annotations

from manyhands.averaging.messages import Position
from manyhands.base.identity import PeerId
from manyhands.optim.state.state import Origin

MAX_STEPS_LATE = 1


def reason_to_drop(
    own_id: PeerId, since_step: int, *, was_in_group: bool, before: Position, after: Position, origin: Origin | None
) -> str:
    """Why the gradients of a peer that has gone to another state cannot count there; empty if they can.

    Args:
        since_step: of the parameters that the oldest of them was computed on.
        was_in_group: a group whose round led on from ``before`` may have got some of them.
        before, after: where the peer was, and is.
        origin: the step that led to ``after``.
    """
    if origin is None or origin.parent != before:
        return "they were computed on other parameters"
    if after.step - since_step > MAX_STEPS_LATE:
        return f"they would be {after.step - since_step} steps late"
    if was_in_group and (origin.contributors is None or own_id in origin.contributors):
        return "the others may have made the step with them"
    return ""
