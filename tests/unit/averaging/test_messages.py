from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.messages import (
    Group,
    JoinRequest,
    JoinResponse,
    Late,
    Member,
    Position,
    RoundManifest,
    StreamHeader,
    Verdict,
    VerdictQuery,
    Vote,
    readable_addresses,
)
from manyhands.averaging.round.exchange import stream_id
from manyhands.base.identity import PeerId
from tests.unit.averaging.groups import AT, group_of, peer


def test_the_fingerprint_of_a_manifest_never_changes() -> None:
    """It is part of every lineage: a new value splits a run between old and new peers."""
    manifest = RoundManifest(b"id", Position(7, b"lineage"), 0, [peer(0), peer(1)], [4.0, 2.5], [0, 1], b"digest")
    assert manifest.fingerprint().hex() == "afccd802e8c7107b3d78d6fa1f887835b4e92cd7d7c36741e935f09ff97f270d"
    after = next_position(Position(7, b"lineage"), manifest)
    assert after.step == 8
    assert after.lineage.hex() == "0bcf996b241943fecbb4ec66558885b7e8ffd54a76705adf0fc0e1c2ccec92ca"


def test_a_manifest_names_everybody_by_rank() -> None:
    group = msgspec.structs.replace(group_of(3, weights=[1.0, 0.0, 2.5], clients=[0, 2]), late=Late.GUESTS)
    manifest = group.manifest(b"digest", members=[0, 1])
    ids, weights, marks = [peer(0), peer(1), peer(2)], [1.0, 0.0, 2.5], [1, 2, 1 + 4]
    assert manifest == RoundManifest(group.group_id, AT, 1, ids, weights, marks, b"digest", late=1)
    assert manifest.left_out == {2}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=RoundManifest) == manifest


@pytest.mark.parametrize("change", ["group_id", "position", "leader", "members", "weights", "marks", "digest", "late"])
def test_lineages_part_at_any_difference(change: str) -> None:
    manifest = group_of(2).manifest(b"digest")
    other = {
        "group_id": b"another",
        "position": Position(3, b"another"),
        "members": [peer(1), peer(0)],
        "leader": 1,
        "weights": [1.0, 1.5],
        "marks": [0, 4],
        "late": 2,
        "digest": b"another",
    }
    changed = msgspec.structs.replace(manifest, **{change: other[change]})
    assert next_position(AT, changed) != next_position(AT, manifest)


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": b"another"},
        {"leader": peer(1)},
        {"position": Position(4, b"lineage")},
        {"late": Late.MEMBERS},
        {"codec": 1},
        {"members": [Member(peer(rank), [], False, 1.0 + rank) for rank in range(3)]},
        {"members": [Member(peer(rank), ["/ip4/10.0.0.1/tcp/1"], False, 1.0) for rank in range(3)]},
    ],
    ids=str,
)
def test_groups_that_differ_in_any_field_have_different_ids(changes: dict[str, Any]) -> None:
    group = group_of(3)
    other = msgspec.structs.replace(group, **changes)
    assert other.group_id != group.group_id == group_of(3).group_id
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=Group).group_id == other.group_id
    assert stream_id(other, 1, (0, 1)) != stream_id(group, 1, (0, 1)) != stream_id(group, 1, (0, 2))


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf, 1e300, "1"])
def test_a_weight_that_would_spoil_the_mean_is_not_even_decoded(weight: object) -> None:
    member = {"peer_id": peer(0), "addresses": [], "is_client": False, "weight": weight}
    position = {"step": 0, "lineage": b""}
    join = {"run_fingerprint": b"", "position": position, "member": member}
    group = {"nonce": b"", "leader": peer(0), "position": position, "members": [member]}
    for message, kind in ((join, JoinRequest), ({"group": group}, JoinResponse)):
        with pytest.raises(msgspec.ValidationError, match="weight"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def test_a_bandwidth_is_0_for_clients_and_the_usual_one_where_it_is_unknown() -> None:
    group = group_of(6, clients=[5], bandwidths=[40, 0, 10, 0, 20, 10**12])
    assert group.bandwidths(range(6)) == [40, 20, 10, 20, 20, 0]
    assert group.bandwidths([0, 1, 5]) == [40, 20, 0, 0, 0, 0], "of those that take part"
    assert group_of(4, clients=[2]).bandwidths(range(4)) == [1, 1, 0, 1], "all alike as long as nobody knows anything"


def test_a_huge_claimed_bandwidth_does_not_change_unknown_ones() -> None:
    assert group_of(4, bandwidths=[10**12, 10, 10, 0]).bandwidths(range(4)) == [10**12, 10, 10, 10]


@pytest.mark.parametrize(
    ("blamed", "told", "ranks", "counts"),
    [
        ([0], [0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 1]),
        ([0], [0, 0, 10**6, 0], [0, 1, 2, 3], [0, 10**6, 10**6, 10**6]),
        ([0, 1, 2], [0, 20, 0, 10], [0, 1, 2, 3], [0, 0, 0, 10]),
        ([0, 1], [0, 20, 10, 0], [0, 1], [10, 20, 0, 0]),
    ],
)
def test_a_blamed_member_reduces_only_if_nobody_else_can(
    blamed: list[int], told: list[int], ranks: list[int], counts: list[int]
) -> None:
    assert group_of(4, bandwidths=told, not_reducing=blamed).bandwidths(ranks) == counts


def test_a_member_of_an_older_version_has_an_unknown_bandwidth() -> None:
    member = {"peer_id": peer(0), "addresses": [], "is_client": False, "weight": 1.0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(member), type=Member).bandwidth == 0


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        *((Member(peer(0), [], False, 1.0, bandwidth), Member) for bandwidth in (-1, 10**12 + 1, 2**63)),
        *((Member(peer(0), [], False, 1.0, bandwidth), Member) for bandwidth in (math.nan, math.inf, 0.5, "1")),
        (Member(peer(0), ["x"] * 9, False, 1.0), Member),
        (Member(peer(0), ["x" * 401], False, 1.0), Member),
        (Vote(b"group", 0, reason="x" * 501), Vote),
        (Member(PeerId("x" * 65), [], False, 1.0), Member),
        (JoinResponse(None, PeerId("x" * 65)), JoinResponse),
        (JoinResponse(None, peer(0), ["x" * 401]), JoinResponse),
        (Verdict(True, None, "", [PeerId("x" * 65)]), Verdict),
        (VerdictQuery(b"x" * 65), VerdictQuery),
        (StreamHeader(b"x" * 65), StreamHeader),
        (Position(0, b"x" * 65), Position),
        (Position(-1, b""), Position),
        (Position(2**60, b""), Position),
        (msgspec.structs.replace(group_of(2), late=3), Group),
        (msgspec.structs.replace(group_of(2).manifest(b""), late=-1), RoundManifest),
        (msgspec.structs.replace(group_of(2).manifest(b""), marks=[0, 16]), RoundManifest),
        (msgspec.structs.replace(group_of(2).manifest(b""), leader=2**16), RoundManifest),
    ],
)
def test_messages_that_are_passed_on_to_all_members_have_bounds(
    message: msgspec.Struct, kind: type[msgspec.Struct]
) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def test_addresses_that_cannot_be_read_are_skipped() -> None:
    texts = ["/ip4/203.0.113.7/tcp/31337", "/carrier-pigeon/3", "", "/ip4/203.0.113.8/tcp/31337"]
    assert [str(address) for address in readable_addresses(texts)] == [texts[0], texts[3]]
    assert len(readable_addresses(texts[:1] * 100)) == 8
