"""The measured constants of the plan: ``measured.json``, which ``benchmarks/plan_constants.py --record`` writes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

PATH = Path(__file__).with_name("measured.json")


class Measured(msgspec.Struct, frozen=True):
    """One constant, and where it comes from.

    Attributes:
        name: of the field of :class:`Constants`; followed by a dot and a codec where each codec has its own value.
        script: prints the value.
        machine: where the script ran.
        date: of that, as in 2026-11-28.
    """

    name: str
    value: float
    unit: str
    script: str
    machine: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the plan takes from measurements.

    Attributes:
        bits_per_value: on the wire, by codec.
        round_ns_per_value: CPU time of a peer for one value in a round, by codec: encoding, encryption, sending,
            receiving, reduction and decoding. Of ``sparse`` only the encoding.
        contribution_ns_per_value: CPU time of a peer to decode a contribution of ``sparse`` and add it up.
        update_ns_per_value: CPU time of a peer for one parameter in a global step, besides the round and the batches:
            copies, checks and the update by AdamW.
        line_share: share of its line that a round uses, once the values are on their way.
        round_trips: round trips between the peers for which a round takes longer, whatever its size.
        fixed_s: seconds of a step on a line without delay, with a vector of no size.
    """

    bits_per_value: Mapping[str, float]
    round_ns_per_value: Mapping[str, float]
    contribution_ns_per_value: float
    update_ns_per_value: float
    line_share: float
    round_trips: float
    fixed_s: float


@functools.cache
def measured_constants() -> Constants:
    """The constants that come with this version."""
    return constants_of(msgspec.json.decode(PATH.read_bytes(), type=list[Measured]))


def constants_of(measurements: Iterable[Measured]) -> Constants:
    """Put the constants of a file together."""
    fields: dict[str, float | dict[str, float]] = {}
    for measured in measurements:
        name, _, codec = measured.name.partition(".")
        if codec:
            by_codec = fields.setdefault(name, {})
            assert isinstance(by_codec, dict), "a constant has either one value or one for each codec"
            by_codec[codec] = measured.value
        else:
            fields[name] = measured.value
    return msgspec.convert(fields, Constants)
