"""Fuzz targets: what the peers of a run tell each other."""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from typing import Any

import msgspec
import torch

from manyhands.averaging.allreduce.partition import owned_spans
from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.codecs import shares_of
from manyhands.averaging.grid.seats import Layout, Seat, Step
from manyhands.averaging.messages import (
    ASK_IN_ROUND,
    ASK_VERDICT,
    CALL,
    JOIN,
    VOTE,
    CallRequest,
    CallResponse,
    Group,
    InRound,
    InRoundQuery,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
    Received,
    RoundManifest,
    StreamHeader,
    Verdict,
    VerdictQuery,
    Vote,
    digest_of_all,
    readable_addresses,
)
from manyhands.averaging.peer_records import PEER_RECORD, PeerRecord, SeenRecord
from manyhands.averaging.roster import Roster, check_roster, lineage_of, next_place
from manyhands.averaging.round.count import Count
from manyhands.averaging.round.limits import OPEN_LIMITS, limited
from manyhands.averaging.round.round_machine import Exchanged, Finish, Round, Told
from manyhands.averaging.round.round_machine import State as RoundState
from manyhands.averaging.state.content import State, empty_content, sealed
from manyhands.averaging.state.download import check_header, receive_header
from manyhands.averaging.state.server import StateAnswer, StateRequest
from manyhands.base.errors import PeerLost, ProtocolViolation, Refused
from manyhands.base.identity import PeerId
from manyhands.dht.records import decode_value, encode_value
from manyhands.optim.config import ProgressConfig
from manyhands.optim.manifest import RunManifest, differences, manifest_key, read_manifest
from manyhands.optim.metrics import HeldoutRecord, MetricsRecord
from manyhands.optim.run.branches import leading_branch
from manyhands.optim.run.contacts import TELL, HereIAm
from manyhands.optim.run.progress import ProgressLog, View, next_refresh_s
from manyhands.optim.state.catching_up import check_manifest
from manyhands.optim.state.check import check_of
from manyhands.optim.state.state import Capture, hyper_parameters_of, restore, specs_of
from tests.fuzz.target import REMOTE, Target, decoded, finish, stream_of
from tests.network import identity_of
from tests.unit.optim.fake_dht import FakeDht

IDS = [identity_of(number).peer_id for number in range(1, 4)]
AT = Position(7, lineage_of(b"", Roster()))
MEMBERS = [
    Member(
        peer_id,
        [f"/ip4/10.0.0.1/tcp/{rank + 1}/p2p/{peer_id}"],
        rank == 2,
        1.5 * rank,
        10**7 * rank,
        norm=0.5 + 4.0 * rank,
    )
    for rank, peer_id in enumerate(IDS)
]
GROUP = Group(b"g" * 16, IDS[0], AT, MEMBERS)
DIGESTS = [b"0" * 32, b"1" * 32, b""]
"""Of the means of each member's span; the last one is a client."""
MANIFEST = GROUP.manifest(digest_of_all(DIGESTS))
GRID = Step(6, Layout((2, 2)), 1)
OWN_RECORD = PeerRecord(AT, False, [], samples=5, samples_per_second=2.0, lineage_samples=99)
RECORDS = [
    PeerRecord(AT, False, MEMBERS[0].addresses, samples=64, samples_per_second=1.5, lineage_samples=4096),
    PeerRecord(Position(0, b""), True, []),
    PeerRecord(AT, False, [], 20.0, lineage_samples=4096, is_auxiliary=True),
    PeerRecord(AT, False, [], seat=Seat(GRID.layout, 3, 7), sketch=b"1234", sketch_step=7),
    PeerRecord(AT, False, MEMBERS[0].addresses, tensors=b"t" * 32, summary="1 with 3 values", num_steps=2),
]


def _optimizer() -> torch.optim.Optimizer:
    """Small, and with statistics of its own after one step."""
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    bias = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([("weight", weight), ("bias", bias)], lr=0.1)
    (weight.sum() + bias.sum()).backward()
    optimizer.step()
    return optimizer


def _run_manifest(run_id: str = "run") -> RunManifest:
    optimizer = _optimizer()
    return RunManifest(
        protocol="manyhands/1",
        run_id=run_id,
        target_batch_size=64,
        tensors=specs_of(optimizer),
        frozen=["embedding"],
        optimizer="AdamW",
        hyper_parameters=hyper_parameters_of(optimizer.param_groups),
        scheduler="LinearLR(0.1)",
        codec="none",
        extra={"tokenizer": "abc"},
    )


RUN = _run_manifest()


def _state_of(statistics: dict[str, Any]) -> State:
    optimizer = _optimizer()
    optimizer.state[optimizer.param_groups[0]["params"][0]].update(statistics)
    copied = Capture(optimizer, {"last_epoch": 3, "base_lrs": [0.1]}, AT, 99).copy()
    assert copied is not None
    return sealed(copied)


STATE = _state_of({})
ODD_STATE = _state_of({"pair": (torch.ones(2, 2), 1), "by_step": {3: [torch.ones(3, dtype=torch.int8)]}, "n": 1 << 80})


# averaging


def _joined(group: Group) -> None:
    """Use a group as a member does before the round."""
    if group.rank_of(group.leader) is None:  # it is refused
        return
    manifest = group.manifest(b"digest")
    position, roster, _ = next_place(group.position, Roster(), manifest)
    assert position.step == group.position.step + 1
    check_roster(roster)
    group.rank_of(IDS[0])
    for member in group.members:
        readable_addresses(member.addresses)
    bandwidths = group.bandwidths(range(len(group.members)))
    if any(bandwidths) and len(bandwidths) < 10_000:
        spans = owned_spans(1000, bandwidths, 1, group.group_id)
        assert sum(span.stop - span.start for span in spans) == 1000
    assert math.isfinite(sum(member.weight for member in group.members))
    counted = limited(group, OPEN_LIMITS, roster, clips=True)
    for member, given in zip(counted.members, group.members, strict=True):
        assert 0 <= member.weight <= given.weight
        assert 0 <= member.scale <= 1
    shares = shares_of([one.weight for one in counted.members], [one.scale for one in counted.members],
                       [rank for rank, one in enumerate(counted.members) if one.weight > 0])  # fmt: skip
    assert all(0 <= part <= 1 for share in shares.values() for part in share)


def _join_request(data: bytes) -> None:
    request = decoded(data, JoinRequest)
    readable_addresses(request.member.addresses)
    _joined(Group(b"new", request.member.peer_id, request.position, [request.member]))


def _join_response(data: bytes) -> None:
    response = decoded(data, JoinResponse)
    readable_addresses(response.leader_addresses)
    if response.group is not None:
        _joined(response.group)


def _vote(data: bytes) -> None:
    vote = decoded(data, Vote)
    count = Count(GROUP)
    vote.exchange = 0
    count.add(1, vote)
    count.add(0, Vote(GROUP.group_id, 0, DIGESTS))
    count.lose(2, "gone")
    decision = count.decide()
    assert decision is not None
    assert len(count.only_stalled()) <= len(IDS)
    if isinstance(decision, Verdict) and decision.manifest is not None:
        assert decision.manifest.digest in (digest_of_all(DIGESTS), vote.digest)


def _verdict(data: bytes) -> None:
    verdict, one = decoded(data, Verdict), Round(GROUP, 1)
    one.on(Exchanged(Vote(GROUP.group_id, 0, DIGESTS)))
    actions = one.on(Told(one.leader, verdict))
    if not verdict.is_known or one.state is RoundState.IN_DOUBT:
        return
    (finish,) = actions
    assert isinstance(finish, Finish)
    verdict = finish.verdict
    assert verdict.reason.isprintable()
    assert set(verdict.blamed) <= set(IDS)
    if verdict.manifest is not None:
        assert verdict.manifest.members == IDS
        assert next_position(AT, verdict.manifest).step == AT.step + 1


def _round_manifest(data: bytes) -> None:
    manifest = decoded(data, RoundManifest)
    assert len(next_position(AT, manifest).lineage) == 32
    check_manifest(REMOTE, manifest, manifest.position)
    roster = Roster()
    for _ in range(3):
        _, roster, _ = next_place(AT, roster, manifest)
        check_roster(roster)


# records in the DHT: the value was decoded there already


def _peer_record(data: bytes) -> None:
    record = msgspec.convert(decode_value(data), PeerRecord)
    readable_addresses(record.addresses)
    for others in ({PeerId("other"): record}, {PeerId("other"): record, PeerId("third"): RECORDS[0]}):
        for position in (AT, record.position):
            observed = {peer_id: SeenRecord(said, said.ttl_s) for peer_id, said in others.items()}
            progress = View(observed, position).progress(OWN_RECORD, 64, 1.0)
            ProgressLog().tell(position.step, progress, next_refresh_s(progress, ProgressConfig()), 0.0)
        branch = leading_branch(others, PeerId("own"), OWN_RECORD)
        assert branch.holders
    GRID.is_mate("other", record.seat, GRID.first_round)
    after = next_position(record.position, MANIFEST)
    own = msgspec.structs.replace(record, position=after)
    assert PEER_RECORD.decode(msgspec.msgpack.encode(own)) == own, "there is a next round, and it can be told"


def _metrics_record(data: bytes) -> None:
    record = msgspec.convert(decode_value(data), MetricsRecord)
    assert math.isfinite(record.loss / record.mini_steps)


def _heldout_record(data: bytes) -> None:
    record = msgspec.convert(decode_value(data), HeldoutRecord)
    assert math.isfinite(record.loss)
    assert 0 <= record.mlm_accuracy <= 1
    assert 0 <= record.sop_accuracy <= 1


def _run_manifests(data: bytes) -> None:
    dht: Any = FakeDht()
    for number, value in enumerate((decode_value(data), zlib.compress(RUN.encoded()))):
        dht.put(manifest_key("run"), IDS[number], value, sequence=1)
    quiet = logging.getLogger("manyhands.optim.manifest")
    quiet.disabled = True
    try:
        signed = finish(read_manifest(dht, "run"))
        expected = finish(read_manifest(dht, "run", RUN.fingerprint()[:16]))
    finally:
        quiet.disabled = False
    assert signed is not None
    assert expected.manifest == RUN
    lines = differences(RUN, signed.manifest)
    assert sum(map(len, lines)) < 12_000, "what is shown to a person has bounds"
    assert all(line.isprintable() for line in lines)


# the state


def _state(data: bytes) -> None:
    header = finish(receive_header(stream_of(data)))
    check_header(REMOTE, header, AT, check_of(RUN))
    state = State(header, empty_content(header.tensors))
    assert state.content.nbytes < (1 << 25), "what is accepted has bounds"
    with contextlib.suppress(ValueError):  # it does not fit: the documented error
        restore(state, _optimizer())


def _messages(*messages: msgspec.Struct) -> list[bytes]:
    return [msgspec.msgpack.encode(message) for message in messages]


def _values(*records: msgspec.Struct) -> list[bytes]:
    return [encode_value(msgspec.to_builtins(record, builtin_types=(bytes,))) for record in records]


def _decoder(name: str, kind: type[msgspec.Struct], *seeds: msgspec.Struct) -> Target:
    """A message of which nothing but its fields is used."""
    seeds_encoded = _messages(*seeds)
    return Target(name=name, seeds=seeds_encoded, run=lambda data: decoded(data, kind), errors=_VIOLATION, weight=0.3)


_VIOLATION = (ProtocolViolation,)
_VERDICTS = _messages(Verdict(True, MANIFEST), Verdict(True, None, "lost", [IDS[1]]), Verdict(False))
_JOINS = _messages(JoinRequest(b"f" * 32, AT, MEMBERS[1], 15.0), JoinRequest(b"", AT, MEMBERS[0], 0.0))
_JOINED = _messages(JoinResponse(GROUP), JoinResponse(None, IDS[0], ["/ip4/10.0.0.1/tcp/1"]))
_VOTES = _messages(Vote(GROUP.group_id, 0, DIGESTS), Vote(GROUP.group_id, 0, reason="no result"))

TARGETS = [
    Target(name=f"{JOIN.name}.request", seeds=_JOINS, run=_join_request, errors=_VIOLATION),
    Target(name=f"{JOIN.name}.response", seeds=_JOINED, run=_join_response, errors=_VIOLATION),
    _decoder(f"{CALL.name}.request", CallRequest, CallRequest(b"f" * 32, AT)),
    _decoder(f"{CALL.name}.response", CallResponse, CallResponse(), CallResponse(MEMBERS[0].peer_id)),
    Target(name=f"{VOTE.name}.request", seeds=_VOTES, run=_vote, errors=_VIOLATION),
    _decoder(f"{VOTE.name}.response", Received, Received()),
    _decoder(f"{ASK_VERDICT.name}.request", VerdictQuery, VerdictQuery(GROUP.group_id)),
    Target(name=f"{ASK_VERDICT.name}.response", seeds=_VERDICTS, run=_verdict, errors=_VIOLATION),
    _decoder(f"{TELL.name}.request", HereIAm, HereIAm(RECORDS[0])),
    _decoder(f"{TELL.name}.response", HereIAm, HereIAm(RECORDS[0])),
    _decoder(f"{ASK_IN_ROUND.name}.request", InRoundQuery, InRoundQuery(GROUP.group_id, GROUP.leader)),
    _decoder(f"{ASK_IN_ROUND.name}.response", InRound, InRound(True), InRound(False)),
    _decoder("averaging.stream-header", StreamHeader, StreamHeader(GROUP.group_id)),
    Target(name="averaging.round-manifest", seeds=_messages(MANIFEST), run=_round_manifest, errors=_VIOLATION),
    Target(name="run.peer-record", seeds=_values(*RECORDS), run=_peer_record, errors=(ValueError,)),
    Target(
        name="run.metrics-record",
        seeds=_values(MetricsRecord(7, 1.5, 64, 12.25, 4)),
        run=_metrics_record,
        errors=(ValueError,),
    ),
    Target(
        name="run.heldout-record",
        seeds=_values(HeldoutRecord(7, 4.5, 0.25, 0.5, 64)),
        run=_heldout_record,
        errors=(ValueError,),
    ),
    Target(
        name="run.manifest",
        seeds=[encode_value(zlib.compress(RUN.encoded()))],
        run=_run_manifests,
        errors=(ValueError,),
        max_bytes=256 << 20,
        weight=0.5,
    ),
    _decoder("state.stream-header", StateRequest, StateRequest("run")),
    Target(
        name="state.header",
        seeds=_messages(StateAnswer(STATE.header), StateAnswer(ODD_STATE.header), StateAnswer(None, "busy")),
        run=_state,
        errors=(ProtocolViolation, Refused, PeerLost),
        is_framed=True,
        weight=0.4,
    ),
]
