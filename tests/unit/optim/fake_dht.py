"""A DHT whose records and times the test decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from manyhands.base.identity import PeerId
from manyhands.dht import Part, StoredValue
from manyhands.dht.records import encode_value


@dataclass
class FakeDht:
    """Holds values by key and subkey; a test writes as anybody, the code under test as itself.

    Attributes:
        stored: each value that was stored, in order.
        gate: while it is cleared, readers wait.
        other_holders: while it is cleared, readers from more than one holder wait.
        first_holder: while it is cleared, readers from one holder wait.
        part_holder: while it is cleared, readers of a part wait.
        inflated: the factor by which a read of a part overstates the number of records.
    """

    records: dict[str, dict[str, StoredValue]] = field(default_factory=dict)
    stored: list[Any] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    other_holders: asyncio.Event = field(default_factory=asyncio.Event)
    first_holder: asyncio.Event = field(default_factory=asyncio.Event)
    part_holder: asyncio.Event = field(default_factory=asyncio.Event)
    num_reads: int = 0
    num_parts: int = 0
    inflated: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    met: dict[str, Callable[[PeerId], bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()
        self.other_holders.set()
        self.first_holder.set()
        self.part_holder.set()

    def put(
        self, key: str, subkey: str, value: Any, *, sequence: int, remaining_s: float = 30.0, owner: str | None = None
    ) -> None:
        owner = subkey if owner is None else owner
        self.records.setdefault(key, {})[subkey] = StoredValue(encode_value(value), sequence, remaining_s, owner)

    async def store(self, key: str, value: Any, ttl_s: float, subkey: str | None = None) -> int:
        self.stored.append(value)
        if value is None:
            self.records.get(key, {}).pop(subkey or "", None)
        else:
            self.put(key, subkey or "", value, sequence=len(self.stored), remaining_s=ttl_s)
        return 1

    async def get(
        self, key: str, *, quickly: bool = False, owners: Iterable[str] | None = None
    ) -> dict[str, StoredValue]:
        self.num_reads += owners is None
        await self.gate.wait()
        await (self.first_holder if quickly else self.other_holders).wait()
        records = self.records.get(key, {})
        return {subkey: stored for subkey, stored in records.items() if owners is None or subkey in set(owners)}

    async def get_part(self, key: str, most: int) -> Part:
        """The records of random subkeys; each read says how many there are."""
        self.num_parts += 1
        await self.gate.wait()
        await self.part_holder.wait()
        records = self.records.get(key, {})
        shown = self.rng.sample(sorted(records), min(most, len(records)))
        return Part({subkey: records[subkey] for subkey in shown}, len(shown), self.inflated * len(records))
