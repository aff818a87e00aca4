"""Strangers that say that a run is elsewhere, and hand out a state of their own, in virtual time."""

from __future__ import annotations

import msgspec

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.roster import Roster, lineage_of
from manyhands.averaging.state.content import State, StateHeader, state_of
from manyhands.averaging.state.server import StateServer
from manyhands.optim.run.drift import sketch_of
from manyhands.optim.run.progress import ProgressReader
from manyhands.peer import Presence
from tests.simulation.charted import ChartedRun
from tests.unit.access.world import RUN

HONEST = ("a", "b", "c")
AHEAD = 50
SEAL = b"elsewhere"
SPOILT = 1000.0
"""A parameter of the strangers' model."""


class Stranger:
    """Says at first that it is where the others are; later, that it is ahead, and hands out a state of its own.

    If it is ahead by no step, it says that the state at the others' position is its own.

    Args:
        jump_s: when it says so.
        claimed: addresses at which it says that it is, in place of its own.
    """

    def __init__(
        self, run: ChartedRun, presence: Presence, jump_s: float, claimed: list[str] | None = None, ahead: int = AHEAD
    ) -> None:
        self._run = run
        self._presence = presence
        self._jump_s = jump_s
        self._ahead = ahead
        self._claimed_addresses = claimed
        self._reader = ProgressReader(presence.endpoint, presence.dht, RUN)
        self._honest = [run.presences[name].peer_id for name in HONEST]
        self._claimed = Position(0, b"")
        StateServer(presence.endpoint, RUN, self._state, lambda: self._claimed)

    def _state(self) -> State:
        honest = self._run.optimizers["a"].replica.capture()
        header, tensors = honest.header, [tensor.clone() for tensor in honest.tensors]
        tensors[0].fill_(SPOILT)
        place = (self._claimed, Roster(), SEAL) if self._is_elsewhere else (header.position, header.roster, header.seal)
        position, roster, seal = place
        samples = 32 * position.step
        sent = StateHeader(position, samples, header.tensors, header.scalars, b"", roster=roster, seal=seal)
        return state_of(sent, tensors)

    @property
    def _is_elsewhere(self) -> bool:
        return self._claimed.lineage == lineage_of(SEAL, Roster())

    async def publish(self, now: float) -> None:
        await self._reader.refresh()
        records = [record for peer_id, record in self._reader.records().items() if peer_id in self._honest]
        position = max((record.position for record in records), key=lambda position: position.step)
        sketch = b""
        if now >= self._jump_s and self._ahead:
            position = Position(position.step + self._ahead, lineage_of(SEAL, Roster()))
        elif now >= self._jump_s:
            sketch = sketch_of(self._state().tensors[:2], position.step).sums
        self._claimed = position
        addresses = self._claimed_addresses or list(map(str, self._presence.endpoint.addresses))
        record = PeerRecord(
            position, False, addresses, samples_per_second=1.0, lineage_samples=32 * position.step,
            sketch=sketch, sketch_step=position.step,
        )  # fmt: skip
        value = msgspec.to_builtins(record, builtin_types=(bytes,))
        await self._presence.dht.store(peer_key(RUN, PROGRESS_KIND), value, 30.0, subkey=self._presence.peer_id)
