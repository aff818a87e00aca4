"""Which codec a round takes."""

from __future__ import annotations

import math

import msgspec
import pytest

from manyhands.averaging.codecs import CODECS, INT4, INT8, NONE, NONE_FLOAT64
from manyhands.averaging.config import AUTO, CODEC_NAMES, AveragingConfig
from manyhands.averaging.matchmaking.admission import chosen_codec, fault_of
from manyhands.base.errors import ConfigError
from tests.unit.averaging.groups import group_of


@pytest.mark.parametrize(
    ("bandwidths", "rtts_s", "name"),
    [
        ([], [], "none"),
        ([0, 0], [math.inf], "none"),  # nothing is known yet
        ([10**9, 10**9], [0.0002], "none"),
        ([10**9, 0], [0.0002], "none"),
        ([10**9, 12_500_000], [0.0002], "int8"),  # 100 Mbit/s
        ([10**9, 10**9], [0.0002, 0.03], "int8"),
    ],
)
def test_values_travel_in_8_bits_where_links_are_slow_or_long(
    bandwidths: list[int], rtts_s: list[float], name: str
) -> None:
    assert chosen_codec(AUTO, bandwidths, rtts_s).name == name


def fault_of_choice(setting: str, code: int) -> str | None:
    """What a member with this setting says of a group whose leader chose the codec of a code."""
    group = msgspec.structs.replace(group_of(2), codec=code)
    return fault_of(group, group.leader, group.members[1], group.position, setting)


@pytest.mark.parametrize("name", list(CODECS))
def test_the_codec_that_the_user_chose_is_used(name: str) -> None:
    assert chosen_codec(name, [1], [10.0]) is CODECS[name]
    assert fault_of_choice(name, CODECS[name].code) is None
    assert AveragingConfig(codec=name).codec == name


def test_a_leader_may_not_choose_another_codec_than_the_run_has() -> None:
    assert fault_of_choice(AUTO, INT8.code) is None
    assert fault_of_choice(NONE.name, INT4.code) == "the leader chose codec 'int4', but this peer's is 'none'"
    assert "no codec has code 200" in (fault_of_choice(AUTO, 200) or "")
    fault = fault_of_choice(AUTO, NONE_FLOAT64.code)  # it would decode vectors of float32 to other sizes
    assert "no codec has code 1" in (fault or "")


def test_an_unknown_codec_is_named() -> None:
    assert tuple(CODECS) == CODEC_NAMES
    with pytest.raises(ConfigError, match=r"codec 'int7' is unknown; one of auto, none, .* for example 'auto'"):
        AveragingConfig(codec="int7")
