"""An auxiliary peer of an ALBERT run: lends bandwidth without computing, so it needs no text, GPU or batches."""

from __future__ import annotations

import logging

from manyhands.base.run_id import checked_run_id
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunToJoin
from manyhands.recipes.albert.model import build_model
from manyhands.recipes.albert.optimizer import join_run
from manyhands.recipes.albert.packages import torch
from manyhands.recipes.albert.settings import TrainingSettings
from manyhands.recipes.albert.tokenizer_exchange import FETCH_TIMEOUT_S, fetch_tokenizer, serve_tokenizer
from manyhands.training.report import AccountPublisher

logger = logging.getLogger(__name__)


class AlbertAuxiliary:
    """A peer that averages with the trainers of the recipe's model, and makes their steps with them.

    It also serves the run's tokenizer, since newcomers cannot dial trainers in client mode.

    Raises:
        ManifestMismatch: the run has changed meanwhile.
        Unavailable: the run's state could not be loaded.
    """

    def __init__(self, peer: Peer, run_id: str, run: RunToJoin, settings: TrainingSettings) -> None:
        self._peer = peer
        self._run_id = checked_run_id(run_id)
        self._run = run
        self._settings = settings
        self._has_tokenizer = False
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        model = build_model(run.recipe.recipe, run.recipe.vocab_size)
        self._optimizer = join_run(model, run.recipe, peer, self._run_id, settings.tuning, auxiliary=True)
        self._account = AccountPublisher(self._optimizer, settings.name or "", ttl_s=settings.tuning.metrics_ttl_s)

    def run(self) -> None:
        """Help until the settings say to stop."""
        try:
            self._help()
        except KeyboardInterrupt:
            self._optimizer.wait_for_downloads(self._settings.linger_s)
            raise

    def _help(self) -> None:
        optimizer = self._optimizer
        logger.info("Helping run %s to average, from global step %d on", self._run_id, optimizer.global_step)
        self._pass_tokenizer_on()
        step = optimizer.global_step
        while (stop_step := self._settings.stop_step()) is None or optimizer.global_step < stop_step:
            optimizer.step()
            if optimizer.global_step != step:
                step = optimizer.global_step
                logger.info("Step %d", step)
                self._account.step_made()
                if not self._has_tokenizer:  # by now, trainers in client mode have connected to this peer
                    self._pass_tokenizer_on()
        logger.info("Stopping at global step %d; waiting for peers that are behind", optimizer.global_step)
        optimizer.wait_for_others(self._settings.linger_s)

    def _pass_tokenizer_on(self) -> None:
        endpoint = self._peer.endpoint
        fetching = fetch_tokenizer(endpoint, self._run.peers, self._run.recipe.tokenizer)
        tokenizer = self._peer.run(fetching, FETCH_TIMEOUT_S, "asking for the tokenizer")
        if tokenizer is not None:
            self._has_tokenizer = True
            self._peer.run(serve_tokenizer(endpoint, tokenizer), FETCH_TIMEOUT_S, "handing out the tokenizer")
