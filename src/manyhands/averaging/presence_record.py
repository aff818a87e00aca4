"""What each peer that averages without an optimizer publishes of itself, and the order of where they are."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from manyhands.averaging.grid.seats import NO_SEAT, Seat
from manyhands.averaging.messages import MAX_ADDRESSES, AddressText, Count, Digest, Position, RoundManifest
from manyhands.averaging.sketch import MAX_SKETCH_BYTES
from manyhands.dht import Schema

LAST_ROUND = 2**48
"""Round numbers go up to here: 8,900 years of a thousand rounds a second."""
MAX_TTL_S = 3600.0
GOODBYE = "goodbye"


class PresenceRecord(msgspec.Struct, frozen=True):
    """What one peer says of itself; published under its own signature.

    Attributes:
        position: where it is; ``step`` is the round number.
        tensors: fingerprint of its list.
        summary: the list in words.
        num_steps: how many steps it has begun.
        is_client: it cannot be dialled.
        addresses: where it can be.
        seat: its place among the groups of a swarm that is too large for one, as of its position.
        sketch: some of the values that it held after its last step in a grid, as float32.
        sketch_round: the round number that the step ended with; 0 without one.
    """

    position: Position
    tensors: Digest
    summary: Annotated[str, msgspec.Meta(max_length=400)]
    num_steps: Count
    is_client: bool
    addresses: Annotated[list[AddressText], msgspec.Meta(max_length=MAX_ADDRESSES)]
    seat: Seat = NO_SEAT
    sketch: Annotated[bytes, msgspec.Meta(max_length=MAX_SKETCH_BYTES)] = b""
    sketch_round: Count = 0

    def __post_init__(self) -> None:
        if self.position.step > LAST_ROUND:
            raise ValueError(f"round numbers go up to {LAST_ROUND}")


PRESENCE = Schema(PresenceRecord | Literal["goodbye"], is_owned=True, max_ttl_s=MAX_TTL_S)


def presence_key(run_id: str) -> str:
    """The DHT key of the records."""
    return f"{run_id}.averaging"


def first_position(run_id: str) -> Position:
    """Where everybody begins."""
    return Position(0, hashlib.sha256(f"averaging {run_id}".encode()).digest())


def next_position(position: Position, manifest: RoundManifest) -> Position:
    """Where a committed round leads; after the last round number comes 0."""
    after = position.after(manifest)
    return after if after.step <= LAST_ROUND else Position(0, after.lineage)


def grid_lineage(run_id: str) -> bytes:
    """The lineage of all who stand in a grid."""
    return hashlib.sha256(f"averaging {run_id} in a grid".encode()).digest()


def rank_of(position: Position) -> tuple[int, bytes]:
    """Orders positions: the higher one leads."""
    return (position.step, position.lineage)
