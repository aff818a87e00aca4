"""All-reduce of manyhands: one `manyhands.Peer` with an averager, in a predefined group."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from _roster import Everybody

from manyhands import Peer
from manyhands.averaging.averager_presence import next_position
from manyhands.averaging.codecs import prepare_kernels
from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.round.limits import MemberLimits
from manyhands.averaging.rounds import RoundMeter, RoundRunner
from manyhands.base.address import Address
from manyhands.base.identity import PeerId

TIMEOUT_S = 300.0


class System:
    """One peer for each codec, since a peer averages in one run; see `allreduce.py`."""

    def __init__(
        self, rank: int, num_peers: int, numel: int, codecs: Sequence[str], folder: str, *, host: str = "127.0.0.1"
    ) -> None:
        prepare_kernels(numel, "auto")
        self._vector_N = torch.zeros(numel)
        self._again: Callable[[], torch.Tensor] = self._vector_N.clone
        self._result_N: torch.Tensor | None = None
        self._peers = {codec: Peer(listen=[f"/ip4/{host}/tcp/0"]) for codec in codecs}
        self._rosters: dict[str, Everybody] = {}
        self._rounds: dict[str, RoundRunner] = {}

    def contact(self) -> list[str]:
        return [str(peer.endpoint.addresses[0]) for peer in self._peers.values()]

    def join(self, contacts: list[list[str]]) -> None:
        for number, (codec, peer) in enumerate(self._peers.items()):
            starting = self._start(codec, peer, [contact[number] for contact in contacts])
            peer.run(starting, 10.0, "starting an averager")

    async def _start(self, codec: str, peer: Peer, contacts: list[str]) -> None:
        endpoint = peer.endpoint
        others: dict[PeerId, bool] = {}
        for address in map(Address.parse, contacts):
            assert address.peer_id is not None
            if address.peer_id != endpoint.peer_id:
                others[address.peer_id] = False
                endpoint.learn(address.peer_id, [address])
        roster = self._rosters[codec] = Everybody(endpoint, others, may_leave=True)
        config = AveragingConfig(averaging_timeout_s=TIMEOUT_S, codec=codec)
        limits = MemberLimits()  # as in runs of an Optimizer
        rounds = RoundRunner(endpoint, "benchmark", b"", roster, config, random.Random(), limits)
        self._rounds[codec] = rounds
        peer.presence.on_close.append(rounds.close)

    def fill(self, codec: str, base_N: torch.Tensor, factor: float) -> None:
        self._result_N = None
        torch.mul(base_N, factor, out=self._vector_N)
        self._again = lambda: base_N * factor

    def form(self, codec: str) -> float:
        return 0.0  # part of the round

    def reduce(self, codec: str) -> tuple[float, float]:
        shapes = [(1, self._vector_N.numel())]  # one large matrix: all of it is encoded
        meter = RoundMeter()
        averaging = self._rounds[codec].average(self._vector_N, 1.0, shapes=shapes, meter=meter, refill=self._again)
        result = self._peers[codec].run(averaging, TIMEOUT_S + 10.0, "averaging")
        self._rosters[codec].at = next_position(result.manifest.position, result.manifest)
        self._result_N = result.averaged_N
        return result.averaging_s, meter.matchmaking_s

    def result(self, codec: str) -> torch.Tensor:
        assert self._result_N is not None, "the others committed without this one"
        return self._result_N

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
