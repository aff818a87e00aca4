"""The attacks of ``make test-hostile`` can be loaded: the tests of every day do not run them."""

from __future__ import annotations

from tests.hostile import __main__ as hostile
from tests.hostile.attacks import ATTACKS, UNSIGNED


def test_every_unsigned_attack_is_in_the_table_of_attacks() -> None:
    assert set(ATTACKS) >= UNSIGNED
    assert hostile.ATTACKS is ATTACKS
