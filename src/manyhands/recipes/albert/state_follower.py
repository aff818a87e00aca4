"""Downloads the state of a run without taking part in it, for evaluators and monitors that keep checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import PeerRecord
from manyhands.averaging.state.content import State
from manyhands.averaging.timing import DAY_S
from manyhands.base.errors import Timeout, Unavailable
from manyhands.base.identity import PeerId
from manyhands.optim.loading import MAX_POSITIONS, askable, leading_donors
from manyhands.optim.local_steps import LocalReplica
from manyhands.optim.run.progress import ProgressReader
from manyhands.optim.run.reached_networks import ReachedNetworks
from manyhands.optim.run.run_records import declare_run
from manyhands.optim.state.catching_up import download_state
from manyhands.optim.wrapper import PLACE
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe
from manyhands.recipes.albert.compute import Compute
from manyhands.recipes.albert.model import build_model
from manyhands.recipes.albert.optimizer import build_optimizer, build_replica
from manyhands.recipes.albert.packages import transformers
from manyhands.recipes.albert.tokenizer_exchange import FETCH_TIMEOUT_S, fetch_tokenizer
from manyhands.rpc.frames import readable

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 15.0
LOOK_PERIOD_S = 1.0
RETRY_PERIOD_S = 10.0
"""Pause in seconds after an attempt in which no peer could send the state or the tokenizer."""
TELL_PERIOD_S = 60.0
"""Shortest time in seconds between two log lines about waiting."""


class StateFollower:
    """Loads the state of a run at intervals from one of its peers.

    It publishes no records, so no peer waits for it or counts it.

    Args:
        compute: device for the model.
    Attributes:
        model: with the parameters of the last loaded state.
        tokenizer: of the run.
        manifest: its settings.
    Raises:
        ConfigError: the model does not fit on the device.
    """

    def __init__(self, peer: Peer, run_id: str, run: RunRecipe, compute: Compute) -> None:
        self._peer = peer
        self._run_id = run_id
        self.run = run
        self.model = compute.on_device(build_model(run.recipe, run.vocab_size))
        self._optimizer = build_optimizer(self.model, run.recipe)
        self._replica, facts = build_replica(self._optimizer, run)
        self.manifest = self._replica.manifest(run_id, run.recipe.target_batch_size, AveragingConfig(), facts)
        self._step: int | None = None  # of the last loaded state
        self._tell_at = peer.time() + TELL_PERIOD_S
        self._run_coroutine(self._start(), "beginning to watch the run")
        self.tokenizer = self._fetch_tokenizer()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and the position in the run, as a trainer saves it."""
        return {**self._optimizer.state_dict(), PLACE: self._replica.place()}

    def next_state(self, every: int) -> int:
        """Wait until the run has made ``every`` more global steps, and load its state; returns its global step.

        It does not wait the first time, or after the run has gone back.
        """
        while True:
            if (step := self._load_if_due(every)) is not None:
                return step
            self._peer.sleep(LOOK_PERIOD_S)

    async def _start(self) -> None:
        declare_run(self._peer.dht, self._run_id)
        presence = self._peer.presence
        self._reader = ProgressReader(presence.endpoint, presence.dht, self._run_id)
        self._networks = ReachedNetworks(presence.endpoint, presence.dht.initial_peers)
        presence.on_close.append(self._networks.close)

    def _fetch_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        while True:
            records = self._look()
            donors = sorted(records, key=lambda peer_id: records[peer_id].is_client)
            fetching = fetch_tokenizer(self._peer.endpoint, donors, self.run.tokenizer)
            tokenizer = self._run_coroutine(fetching, "asking for the tokenizer", FETCH_TIMEOUT_S) if donors else None
            if tokenizer is not None:
                return tokenizer
            self._tell("Waiting for a peer of run %s that sends its tokenizer")
            self._peer.sleep(RETRY_PERIOD_S if donors else LOOK_PERIOD_S)

    def _load_if_due(self, every: int) -> int | None:
        records = self._look()
        here = self._step
        has_failed = False
        for _ in range(MAX_POSITIONS):
            if (leading := self._leading(records)) is None:
                self._tell("Waiting for a peer of run %s from which the state can be downloaded")
                break
            position, donors = leading
            if here is not None and here <= position.step < here + every:
                break
            try:
                state = self._download(donors, position)
                if isinstance(self._replica, LocalReplica):
                    self._replica.forget_inner()  # this peer has no local steps to keep: it takes all of the state
                self._replica.restore(state)
            except (Unavailable, ValueError) as error:
                logger.warning("%s", readable(str(error)))
            else:
                self._step = self._replica.position.step
                return self._step
            has_failed = True  # no peer there sent a valid state: decide again without these peers
            records = {peer_id: record for peer_id, record in records.items() if peer_id not in donors}
        if has_failed:
            self._peer.sleep(RETRY_PERIOD_S)
        return None

    def _look(self) -> dict[PeerId, PeerRecord]:
        """The progress records of the peers that can send the state."""

        async def look() -> dict[PeerId, PeerRecord]:
            self._peer.presence.check_own(self._run_id)
            await self._reader.refresh()
            return askable(self._reader.records(), self._peer.endpoint)

        try:
            return self._run_coroutine(look(), "looking at the run")
        except Unavailable as error:
            logger.warning("Cannot read the records of the run: %s; trying again", error)
            return {}

    def _leading(self, records: Mapping[PeerId, PeerRecord]) -> tuple[Position, list[PeerId]] | None:
        presence = self._peer.presence
        roster = self._replica.roster
        members = roster.voters.union(roster.former)  # at the last state
        trusted = presence.dht.initial_peers() if members.isdisjoint(records) else members
        leading = leading_donors(records, self._networks, presence.rng, trusted)
        try:
            return self._run_coroutine(leading, "asking where the peers were reached")
        except Timeout:  # the question goes on in the background
            return None

    def _download(self, donors: list[PeerId], leading: Position) -> State:
        downloading = download_state(self._peer.endpoint, self.manifest, donors, leading, is_onlooker=True)
        return self._run_coroutine(downloading, "downloading the state", DAY_S)

    def _tell(self, words: str) -> None:
        """Log what this peer waits for, at most once a minute."""
        if self._peer.time() >= self._tell_at:
            self._tell_at = self._peer.time() + TELL_PERIOD_S
            logger.info(words, self._run_id)

    def _run_coroutine(self, coro: Coroutine[Any, Any, T], phase: str, timeout_s: float = LOOK_TIMEOUT_S) -> T:
        return self._peer.run(coro, timeout_s, phase)
