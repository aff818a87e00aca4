"""Numbers of things, as people write them."""

from __future__ import annotations

import shlex

import pytest

from manyhands.base.text import amount_of, counted, rough, shell_option


def test_counts_have_the_singular_and_the_plural() -> None:
    assert [counted(number, "peer") for number in (0, 1, 2)] == ["0 peers", "1 peer", "2 peers"]


def test_durations_are_as_exact_as_people_need_them() -> None:
    assert [rough(seconds) for seconds in (0.2, 99.4, 100.0, 720.0, 20_000.0, 3e5)] == [
        "0 s", "99 s", "2 min", "12 min", "5.6 h", "3 days",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1, "1 byte"), (1200, "1.2 kB"), (99_000, "99.0 kB"), (3 * 10**9, "3.0 GB")]
)
def test_an_amount_of_data_is_never_rounded_to_nothing(num_bytes: int, text: str) -> None:
    assert amount_of(num_bytes) == text


@pytest.mark.parametrize("value", ["albert", "-lead", "--", "two words", "it's", "-$HOME"])
def test_an_option_can_be_pasted_into_a_shell(value: str) -> None:
    words = shlex.split(shell_option("--run-id", value))
    assert words == (["--run-id", value] if not value.startswith("-") else [f"--run-id={value}"])
