"""Groups for the tests of a round's pure parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.codecs import Codec, Plan, Segment, Unsent
from manyhands.averaging.memory import Memory
from manyhands.averaging.messages import Group, Member, Position
from manyhands.base.identity import PeerId
from tests.smaller import smaller

AT = Position(3, b"lineage")


def peer(number: int) -> PeerId:
    return PeerId(f"peer{number:02}")


def group_of(
    num_members: int,
    *,
    weights: Sequence[float] = (),
    clients: Sequence[int] = (),
    bandwidths: Sequence[int] = (),
    not_reducing: Sequence[int] = (),
) -> Group:
    members = [
        Member(
            peer(rank),
            [],
            rank in clients,
            weights[rank] if weights else 1.0,
            bandwidths[rank] if bandwidths else 0,
            rank not in not_reducing,
        )
        for rank in range(num_members)
    ]
    leader = next(member.peer_id for member in members if not member.is_client) if members else peer(0)
    return Group(b"group", leader, AT, members)


def plan_in(codec: Codec, numel: int) -> Plan:
    """All values in one codec, however few they are."""
    return Plan([Segment(0, numel, codec)])


def butterfly_of(group: Group, rank: int, flat_N: torch.Tensor, plan: Plan, span_numel: int = 1) -> Butterfly:
    """A member's part in an all-reduce of all members; no span is smaller than ``span_numel``."""
    with smaller(span_numel=span_numel):
        return Butterfly(
            group, rank, flat_N, plan,
            members=range(len(group.members)), averaged_N=torch.empty_like(flat_N),
            memory=Memory(), unsent=None, is_measured=False,
        )  # fmt: skip


def sent(unsent: Unsent, values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """What others decode of values that a member sends with a sparse codec."""
    encoded = torch.empty(unsent.plan.num_bytes(start, start + values.numel()), dtype=torch.uint8)
    unsent.encode(values, start, encoded)
    decoded = torch.empty_like(values)
    unsent.plan.decode(encoded, start, decoded)
    return decoded
