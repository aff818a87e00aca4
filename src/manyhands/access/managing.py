"""Remote calls of a run's owner to its coordinators: ban peers, list members."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.access.charter import SignedCharter
from manyhands.access.charters import read_charters
from manyhands.access.members import readable
from manyhands.access.messages import ManageRequest, MemberEntry, RunMethods
from manyhands.base.errors import PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.dht import DhtNode
from manyhands.rpc import Endpoint

TIMEOUT_S = 5.0


async def manage(
    endpoint: Endpoint, dht: DhtNode, charter: SignedCharter, ban: Sequence[PeerId] = ()
) -> list[MemberEntry]:
    """Ask all coordinators of a run; this peer must be the owner, or one of them.

    Returns:
        The members known to the coordinators that answer.
    Raises:
        Refused: this peer is not allowed to ask.
        Unavailable: none of them answers.
    """
    for entry in await read_charters(dht, charter.run_id, publishers=charter.coordinators):
        endpoint.learn(entry.peer_id, readable(entry.record.addresses))
    method = RunMethods(charter.run_id).manage
    request = ManageRequest(charter.digest, list(ban))
    members: dict[str, MemberEntry] = {}
    failures = []
    num_answers = 0
    for coordinator in charter.coordinators:
        if coordinator == endpoint.peer_id:
            continue
        try:
            answer = await endpoint.call(coordinator, method, request, TIMEOUT_S)
        except Refused:
            raise
        except (Unavailable, PeerError) as error:
            failures.append(f"{coordinator}: {error}")
            continue
        num_answers += 1
        for member in answer.members:
            known = members.get(member.peer_id)
            if known is None or member.expires_at >= known.expires_at:
                members[member.peer_id] = member
    if not num_answers:
        raise Unavailable(
            f"no coordinator of run {charter.run_id!r} answers: {'; '.join(failures) or 'this peer is the only one'}"
        )
    return sorted(members.values(), key=lambda member: member.peer_id)
