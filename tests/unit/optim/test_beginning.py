"""Of several peers that start a run, one makes its settings, and the others wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.averaging.timing import RECORD_S
from manyhands.base.identity import PeerId
from manyhands.dht import Reason
from manyhands.optim.run.run_records import BEGINNING, Beginning, beginning_key, peers_beginning
from tests.unit.dht.examples import open_record, owned_record
from tests.unit.optim.fake_dht import FakeDht

KEY = beginning_key("run")


def of(dht: Any, name: str) -> Beginning:
    return Beginning(dht, PeerId(name), "run")


async def test_the_first_peer_begins_the_run_and_the_next_one_only_after_it_has_left() -> None:
    dht: Any = FakeDht()
    first, second = of(dht, "z"), of(dht, "a")
    assert await first.announce()
    assert not await second.announce()
    assert await peers_beginning(dht, "run") == ["z"]
    await first.close()
    assert await peers_beginning(dht, "run") == []
    assert await second.announce()
    await second.close()


@pytest.mark.parametrize(("name", "begins"), [("a", True), ("c", False)])
async def test_of_two_that_announce_it_at_once_the_lowest_peer_id_begins(name: str, begins: bool) -> None:
    dht: Any = FakeDht()
    beginning = of(dht, name)
    store = dht.store

    async def store_at_the_same_time(*args: Any, **options: Any) -> int:
        dht.put(KEY, "b", True, sequence=1)
        return await store(*args, **options)

    dht.store = store_at_the_same_time
    assert await beginning.announce() is begins
    assert (name in await peers_beginning(dht, "run")) is begins
    await beginning.close()


async def test_records_that_strangers_write_in_the_name_of_others_do_not_count() -> None:
    dht: Any = FakeDht()
    dht.put(KEY, "a", True, sequence=1, owner="")
    assert await peers_beginning(dht, "run") == []
    assert BEGINNING.fault_of(owned_record(True, key=KEY, ttl_s=RECORD_S)) is None
    for record in (
        open_record(True, key=KEY, ttl_s=RECORD_S),
        owned_record("yes", key=KEY, ttl_s=RECORD_S),
        owned_record(True, key=KEY, ttl_s=RECORD_S + 1),
    ):
        assert BEGINNING.fault_of(record) is Reason.OTHER_SCHEMA
