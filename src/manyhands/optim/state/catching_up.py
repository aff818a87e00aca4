"""How a peer gets to the position of the run: by the committed steps from its own position, or by the state.

The way of a newcomer, until its samples count:

1. It reads the records of the others, and chooses the leading branch among those that it believes
   (``Collaboration.choose_branch``, ``run/branches.py``).
2. It downloads the state of that branch from several peers at once (``Collaboration.download``), and checks it
   (``state/check.py``).
3. It replays the steps that the others have made meanwhile (``BlockingRunClient.missed_steps``).
4. It publishes its record (``Collaboration.has_joined``). From then on it comes to rounds, as a guest.
5. Its samples count in the first round that it joins, like those of a member.
6. After ``QUALIFYING`` complete rounds it becomes a member (``averaging/roster.py``). From then on it votes, and all
   wait for it.

A peer that lacks a step fetches it from a peer that has kept it, and downloads the state if none has: a newcomer, a
member that missed a round, and a member whose round committed but which lacks the means. A peer keeps a step, which is
the round's manifest and its means as they were sent, while a newcomer downloads the state from it. It also keeps the
last step if another member may lack the means, because one was lost or left out in the round.

=======================  ==============================================================================================
function                 called by
=======================  ==============================================================================================
``download_state``       ``Collaboration.download``, for the training thread: when it joins (``BlockingRunClient.join``)
                         and on the decisions ``LOAD_STATE`` and ``RELOAD`` (``Optimizer._load_state``). Also
                         ``load_state_from_peers`` and the evaluator of the ALBERT recipe, which do not train
``step_towards``         ``Collaboration.missed_step``, for the training thread: before a state is downloaded
                         (``Optimizer._replay``) and after it; ``StepRounds.average``, for a member whose round
                         committed but which lacks the means
``StepKeeper.add``       ``StepRounds.average``, after each committed round of one group
=======================  ==============================================================================================

A peer asks for the step from its position with a :class:`ReplayRequest` on a bulk stream. The other peer answers with a
:class:`ReplayAnswer`, a :class:`KeptStep` and the means. The receiver can check all of it: the digest in the manifest
covers the means, and the lineage of a position covers all manifests on the way there (docs/explanation/state.md).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import torch

from manyhands.access.gate import RunGate
from manyhands.averaging.allreduce.means import MAX_PIECES, Means, digest_of
from manyhands.averaging.codecs import NONE, BadEncoding, Plan
from manyhands.averaging.memory import bytes_of, empty_vector
from manyhands.averaging.messages import MAX_SUM_WEIGHT, Count, Position, RoundManifest, digest_of_all, read_header
from manyhands.averaging.roster import Roster, next_place
from manyhands.averaging.state.content import MAX_CONTRIBUTORS, State, StateHeader
from manyhands.averaging.state.download import Download
from manyhands.averaging.state.server import (
    MAX_DOWNLOADS,
    MIN_BYTES_PER_S,
    MIN_STALL_BYTES,
    StateRequest,
    StateServer,
    framed,
    receive_framed,
    send_moving,
)
from manyhands.averaging.timing import ANSWER_S, STALL_S, TWO_DIALS_S
from manyhands.base.deadline import time_limit, while_moving
from manyhands.base.errors import PeerError, ProtocolViolation, Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.structs import make_ready
from manyhands.optim.manifest import RunManifest
from manyhands.optim.state.check import check_of
from manyhands.rpc import Endpoint
from manyhands.rpc.frames import readable
from manyhands.runtime.executor import run_to_end
from manyhands.transport.api import Stream

logger = logging.getLogger(__name__)

STREAM_KIND = "replay/1"
MAX_HEADER_BYTES = 1 << 20  # of a ReplayAnswer or a KeptStep
MAX_CHUNKS = 1 << 15  # of one vector
MAX_HOLDERS = 4  # peers that are asked for one step


# the state


async def download_state(
    endpoint: Endpoint,
    manifest: RunManifest,
    donors: Sequence[PeerId],
    wanted: Position,
    *,
    is_onlooker: bool = False,
    held: State | None = None,
    num_tensors: int | None = None,
    on_violation: Callable[[PeerId, str], None] = lambda donor, what: None,
    on_header: Callable[[PeerId, StateHeader], None] = lambda donor, header: None,
) -> State:
    """Download the state of a run, which must fit its manifest.

    The arguments are those of :class:`manyhands.averaging.state.server.StateRequest` and
    :class:`manyhands.averaging.state.download.Download`.

    Raises:
        Unavailable: no donor could send the state, or all donors of the chosen state failed; names each with its
            reason.
    """
    return await Download(
        endpoint, StateRequest(manifest.run_id, is_onlooker), donors, wanted, check_of(manifest),
        least_bytes=sum(4 * math.prod(spec.shape) for spec in manifest.tensors),  # the statistics come on top
        held=held, num_tensors=num_tensors, on_violation=on_violation, on_header=on_header,
    ).run()  # fmt: skip


# a step: the messages


class ReplayRequest(msgspec.Struct):
    """Opens the stream, and asks for the step from a position."""

    run_id: str
    position: Position


class ReplayAnswer(msgspec.Struct):
    """The first message of the answer; like each header, it is preceded by its length."""

    has_step: bool  # if so, a KeptStep follows


class KeptStep(msgspec.Struct):
    """A step as its group has committed it. The means follow it, in one piece for each reducer."""

    manifest: RoundManifest
    codec: Annotated[int, msgspec.Meta(ge=0, le=255)]  # code of the encoding of the means
    stops: Annotated[
        list[Annotated[list[Count], msgspec.Meta(max_length=MAX_CHUNKS)]], msgspec.Meta(max_length=MAX_PIECES)
    ]  # for each piece, the end of each of its chunks in the vector, in elements


make_ready(ReplayRequest, ReplayAnswer, KeptStep)


# a step: the peer that has kept it


class Kept(NamedTuple):
    """A step in this peer's memory, with its means."""

    step: KeptStep
    pieces: Sequence[torch.Tensor]  # uint8, by reducer


@dataclass(eq=False)
class StepKeeper:
    """Keeps this peer's last steps for peers that may lack them, and sends them on request.

    Args:
        server: knows which peers download the state, and its size. Kept steps together take no more memory than the
            state, unless there is only one. If the steps made during a download take more, the newcomer could never
            catch up.
        is_of_use: whether another peer can make a step from its means alone; see ``Replica.can_replay``.
    """

    endpoint: Endpoint
    run_id: str
    server: StateServer
    is_of_use: bool = True
    _steps: deque[Kept] = field(default_factory=deque, init=False)
    _serving: set[PeerId] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.endpoint.accept_bulk(STREAM_KIND, self._on_stream, RunGate(self.endpoint, self.run_id).check)

    def close(self) -> None:
        """Answer no more requests, and forget all steps."""
        self.endpoint.refuse_bulk(STREAM_KIND)
        self._steps.clear()

    async def add(self, manifest: RoundManifest, means: Means, may_be_lacking: bool) -> None:
        """Keep a step that this peer's round has committed, if another peer may need it; drop steps that none needs.

        While a newcomer downloads the state, and for ``TWO_DIALS_S`` after that, all steps are kept, with no more bytes
        than the state has. Otherwise only the last step is, if a member may lack its means.

        Args:
            may_be_lacking: whether a member of the round may lack the means.
        """
        if not self.server.followers(TWO_DIALS_S):
            self._steps.clear()
            if not may_be_lacking:
                return
        if not self.is_of_use or not means.chunks:  # without chunks, the reducers passed the sparse values on
            return
        try:
            lasting = await run_to_end(means.lasting)
        except MemoryError:  # without the step the newcomer downloads the state again; this peer's round has committed
            self._steps.clear()
            return
        stops = [[chunk.stop for chunk in chunks] for chunks in means.chunks]
        self._steps.append(Kept(KeptStep(manifest, means.codec, stops), lasting.pieces))
        while len(self._steps) > 1 and self._num_bytes() > self.server.state_bytes:
            self._steps.popleft()

    def _num_bytes(self) -> int:
        return sum(piece.numel() for kept in self._steps for piece in kept.pieces)

    async def _on_stream(self, remote: PeerId, header: bytes, stream: Stream) -> None:
        request = read_header(remote, header, ReplayRequest)
        if request.run_id != self.run_id:
            return
        if remote in self._serving or len(self._serving) >= MAX_DOWNLOADS:
            await send_moving(stream, framed(ReplayAnswer(has_step=False)))
            return
        frames = list[bytes | memoryview]()
        kept = next((kept for kept in self._steps if kept.step.manifest.position == request.position), None)
        if kept is not None:
            frames = [framed(kept.step), *(bytes_of(piece) for piece in kept.pieces if piece.numel())]
        answer = ReplayAnswer(has_step=kept is not None)
        limit_s = STALL_S + sum(map(len, frames)) / MIN_BYTES_PER_S
        self._serving.add(remote)
        is_member = kept is not None and remote in kept.step.manifest.members
        with nullcontext() if is_member else self.server.following(remote):  # a newcomer may need the next step, too
            async with time_limit(limit_s, f"sending a step to peer {remote}"):
                try:
                    await send_moving(stream, framed(answer), *frames)
                finally:
                    self._serving.discard(remote)  # it may ask again before this stream is closed
                await stream.wait_closed()


# a step: the peer that lacks it


class MissedStep(NamedTuple):
    """A committed step of the run that this peer has not made."""

    manifest: RoundManifest
    mean_N: torch.Tensor  # the averaged vector: float32, on the host, shape [N]


async def step_towards(
    endpoint: Endpoint,
    run_id: str,
    here: Position,
    roster: Roster,
    goal: Position,
    holders: Sequence[PeerId],
    plan_of_code: Callable[[int], Plan],
    *,
    timeout_s: float,
    on_violation: Callable[[PeerId, str], None],
) -> MissedStep | None:
    """Fetch the committed step from a position, from a peer that has kept it; None if none of these has.

    Args:
        roster: at the position.
        goal: the position of the run. A step that leads to another position with the same number of steps is of
            another branch, and is not used.
        holders: the peers to ask, the best ones first. At most ``MAX_HOLDERS`` are asked.
        plan_of_code: see :func:`fetch_step`.
        timeout_s: for all of them together.
        on_violation: called with a peer that breaks the protocol, and how.
    """
    try:
        async with time_limit(timeout_s, "taking a step that this peer lacks"):
            for holder in holders[:MAX_HOLDERS]:
                try:
                    step = await fetch_step(endpoint, run_id, holder, here, plan_of_code)
                except (PeerError, Unavailable) as error:
                    logger.info("Peer %s did not send the step after step %d, which this peer lacks: %s",
                                holder, here.step, error)  # fmt: skip
                    if isinstance(error, ProtocolViolation):
                        on_violation(holder, str(error))
                    continue
                if step is not None:
                    end, _, _ = next_place(here, roster, step.manifest)
                    if end == goal or end.step < goal.step:
                        return step
    except Timeout as error:
        logger.info("%s", error)
    return None


async def fetch_step(
    endpoint: Endpoint, run_id: str, donor: PeerId, position: Position, plan_of_code: Callable[[int], Plan]
) -> MissedStep | None:
    """Fetch the committed step from a position; None if the donor has not kept it.

    Args:
        plan_of_code: returns the encoding of the step's vector with the codec that has this code on the wire.
    Raises:
        ProtocolViolation: the donor sent a step from another position, or means that were not committed.
        PeerError, Unavailable: the donor did not send a step.
    """
    request = msgspec.msgpack.encode(ReplayRequest(run_id, position))
    stream = await RunGate(endpoint, run_id).through(
        donor, ANSWER_S, lambda left_s: endpoint.open_bulk(donor, STREAM_KIND, request, left_s)
    )
    receive_into = functools.partial(_receive_into, stream)
    try:
        async with time_limit(ANSWER_S, f"asking peer {donor} for the step since {position.step}"):
            answer = await receive_framed(receive_into, donor, ReplayAnswer, MAX_HEADER_BYTES, "its steps")
        if not answer.has_step:
            return None
        # twice the time for float32 values at the slowest speed: the donor chooses how the pieces are cut
        limit_s = STALL_S + 2 * 4 * plan_of_code(NONE.code).numel / MIN_BYTES_PER_S
        async with time_limit(limit_s, f"the step that peer {donor} keeps"):
            kept = await receive_framed(receive_into, donor, KeptStep, MAX_HEADER_BYTES, "a step")
            check_manifest(donor, kept.manifest, position)
            try:
                mean_N = await _receive_mean(stream, kept, plan_of_code(kept.codec))
            except BadEncoding as error:
                raise ProtocolViolation(donor, f"sent an invalid step: {readable(str(error))}") from error
        return MissedStep(kept.manifest, mean_N)
    except Unavailable:
        endpoint.fell_short(stream)
        raise
    finally:
        endpoint.release(stream)


def check_manifest(donor: PeerId, manifest: RoundManifest, position: Position) -> None:
    """Check that a step begins at a position, and that its manifest has sound weights and ranks.

    Raises:
        ProtocolViolation: it does not. Samples and the roster could not be computed from it.
    """
    if manifest.position != position:
        raise ProtocolViolation(donor, f"sent a step from {manifest.position}, in place of {position}")
    num_members, weights = len(manifest.members), manifest.weights
    are_sound = all(0 <= weight <= MAX_SUM_WEIGHT for weight in weights)
    ranks = [manifest.leader, *(rank for part in manifest.parts for rank in (part.reducer, *part.absent))]
    are_sound = are_sound and all(rank < num_members for rank in ranks)
    if not (are_sound and len(weights) == len(manifest.marks) == num_members <= MAX_CONTRIBUTORS):
        told = ", ".join(f"{weight:g}" for weight in weights[:8])
        raise ProtocolViolation(donor, f"sent a step of {num_members} members with the weights {told}")


async def _receive_mean(stream: Stream, kept: KeptStep, plan: Plan) -> torch.Tensor:
    mean_N = empty_vector(plan.numel, plan.dtype)
    chunks = _chunks_of(kept.stops, plan.numel)
    sizes = [[plan.num_bytes(chunk.start, chunk.stop) for chunk in of_piece] for of_piece in chunks]
    pieces = [empty_vector(sum(of), torch.uint8) for of in sizes]
    for piece in pieces:
        if piece.numel():
            await _receive_into(stream, bytes_of(piece))

    def decode() -> None:
        if digest_of_all(list(map(digest_of, pieces))) != kept.manifest.digest:
            raise ProtocolViolation(stream.remote, "sent means that differ from what was committed")
        for piece, of_piece, chunks_of_piece in zip(pieces, sizes, chunks, strict=True):
            for encoded, chunk in zip(torch.split(piece, of_piece), chunks_of_piece, strict=True):
                plan.decode(encoded, chunk.start, mean_N[chunk])

    await run_to_end(decode)
    return mean_N


def _chunks_of(stops: Sequence[Sequence[int]], numel: int) -> list[list[slice]]:
    """The chunks of each piece of a vector, from the ends of the chunks.

    Raises:
        BadEncoding: they do not cover a whole vector in order.
    """
    bounds = [0, *itertools.chain.from_iterable(stops)]
    if bounds[-1] != numel or len(bounds) > MAX_CHUNKS or any(a > b for a, b in itertools.pairwise(bounds)):
        raise BadEncoding(f"{len(bounds) - 1} chunks up to {bounds[-1]}, in a vector of {numel}")
    parts = (slice(*bound) for bound in itertools.pairwise(bounds))
    return [list(itertools.islice(parts, len(of_piece))) for of_piece in stops]


async def _receive_into(stream: Stream, view: memoryview) -> None:
    await while_moving(
        stream.receive_into(view),
        lambda: stream.bytes_received,
        at_least=MIN_STALL_BYTES,
        within_s=STALL_S,
        phase=f"for the next {MIN_STALL_BYTES} bytes of a step that peer {stream.remote} keeps",
    )
