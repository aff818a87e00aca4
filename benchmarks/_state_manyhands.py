"""Handing out a state with manyhands: donors are in a run with `manyhands.Optimizer`, a newcomer downloads it."""

from __future__ import annotations

import torch

import manyhands
from manyhands.averaging.state.content import State
from manyhands.optim.loading import leading_donors
from manyhands.optim.manifest import read_manifest
from manyhands.optim.run.progress import ProgressReader
from manyhands.optim.run.reached_networks import ReachedNetworks
from manyhands.optim.run.run_records import declare_run
from manyhands.optim.state.catching_up import download_state
from manyhands.rpc import RpcConfig

LOOPBACK = "127.0.0.1"
RUN_ID = "state"
TIMEOUT_S = 300.0
NEVER = 10**9


class Donor:
    """A peer of the run; the first one begins it, the others load its state."""

    def __init__(
        self, tensors: list[torch.Tensor], contacts: list[str], host: str = LOOPBACK, upload_mbit_s: float | None = None
    ) -> None:
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        self._peer = manyhands.Peer(
            contacts, listen=[f"/ip4/{host}/tcp/0"], rpc_config=RpcConfig(max_upload_mbit_s=upload_mbit_s)
        )
        self._optimizer = manyhands.Optimizer(
            torch.optim.SGD(parameters, lr=0.1), peer=self._peer, run_id=RUN_ID, target_batch_size=NEVER,
            batch_size_per_step=1, start_new=not contacts,
        )  # fmt: skip

    def contacts(self) -> list[str]:
        return self._peer.addresses

    def close(self) -> None:
        self._peer.close()


class Newcomer:
    """A peer that downloads the state again and again."""

    def __init__(self, tensors: list[torch.Tensor], contacts: list[str], host: str = LOOPBACK) -> None:
        tensors.clear()  # it has no model
        self._peer = manyhands.Peer(contacts, listen=[f"/ip4/{host}/tcp/0"])

    def load(self) -> list[torch.Tensor]:
        async def load() -> State:
            presence = self._peer.presence
            declare_run(presence.dht, RUN_ID)
            run = await read_manifest(presence.dht, RUN_ID)
            reader = ProgressReader(presence.endpoint, presence.dht, RUN_ID)
            await reader.refresh()
            networks = ReachedNetworks(presence.endpoint, presence.dht.initial_peers)
            leading = await leading_donors(reader.records(), networks, presence.rng, presence.dht.initial_peers())
            await networks.close()
            assert run is not None
            assert leading is not None
            position, donors = leading
            return await download_state(presence.endpoint, run.manifest, donors, position)

        return self._peer.run(load(), TIMEOUT_S, "downloading").tensors

    def close(self) -> None:
        self._peer.close()
