"""What ``manyhands train`` and ``manyhands join`` do once it is known which run is meant."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from manyhands.averaging.messages import readable_addresses
from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.folder_lock import FolderInUse
from manyhands.cli.invitation import print_ticket
from manyhands.cli.options import NetworkOptions, OutputOptions
from manyhands.cli.run_look_up import look_up
from manyhands.cli.training_view import run_in_view
from manyhands.optim.run_records import declare_run
from manyhands.optim.runs import Run
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe, adopted
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.corpus import load_documents
from manyhands.recipes.albert.memory import check_memory
from manyhands.recipes.albert.settings import TrainingSettings
from manyhands.state_dir import StateDir

logger = logging.getLogger(__name__)

MAX_FOLDERS = 64
NOTE_TIMEOUT_S = 5.0


def check_before(training: TrainingSettings, given: Mapping[str, Any]) -> None:
    """Make sure of all that can be told without a network.

    Raises:
        MissingExtra: the packages of ``manyhands[albert]`` are not installed.
        ConfigError: the text cannot be used.
    """
    require_albert()
    if text := given.get("text"):  # Python's own can be read
        load_documents(text)


def require_albert() -> None:
    """Say at once what is missing, without importing it.

    Raises:
        MissingExtra: the packages of ``manyhands[albert]`` are not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "tokenizers", "psutil")):
        raise MissingExtra("the ALBERT recipe", "albert")


class OwnFolders(NamedTuple):
    """What this peer keeps; both belong to this process until they are closed."""

    state_dir: StateDir | None
    checkpoint_dir: CheckpointDir | None

    def close(self) -> None:
        for folder in self:
            if folder is not None:
                folder.close()


def take_part(
    run_id: str,
    network: NetworkOptions,
    training: TrainingSettings,
    given: Mapping[str, Any],
    output: OutputOptions,
    *,
    run: Run | None,
) -> None:
    """Train in a run until it is time to stop.

    Args:
        given: settings of the recipe that the user named.
        run: as it was seen; None for one that this peer begins.
    Raises:
        ConfigError: this peer does not fit, or has too little memory.
    """
    if run is not None and run.manifest is not None:
        _check_fit(run_id, adopted(run_id, run.manifest.extra, given))
    with ExitStack() as cleanup:
        folders = open_folders(run_id, network, training)
        cleanup.callback(folders.close)
        if training.device != "auto":
            logger.info("Loading PyTorch")
            from manyhands.recipes.albert.compute import Compute

            Compute(training.device, training.precision)
        emit = output.begin()
        peer = cleanup.enter_context(network.connect(own_dir=folders.state_dir))
        logger.info("Joining run %s as peer %s", run_id, peer.peer_id)
        if peer.addresses:
            logger.info("Others can join through this peer: --initial-peers %s", " ".join(peer.addresses))
        _declare(peer, run_id)  # loading torch takes seconds, and others may look for the run meanwhile
        if peer.dht.num_known_peers:  # also those of an earlier start
            run = look_up(peer, run_id)
        recipe, found = _recipe_for(run_id, run, given, folders.checkpoint_dir)
        logger.info("Loading PyTorch and transformers")
        from manyhands.recipes.albert.training import AlbertTrainer, RunToJoin

        to_join = None
        if found is not None and run is not None:
            _learn_addresses(peer, run)
            to_join = RunToJoin(found, run.signers)
        trainer = AlbertTrainer(
            peer, run_id, recipe, training, emit,
            run=to_join, is_batch_size_chosen="batch_size" in given, checkpoint_dir=folders.checkpoint_dir,
        )  # fmt: skip
        if peer.addresses and (manifest := look_up(peer, run_id).manifest) is not None:
            logger.info("Others can join this run with one word:")
            print_ticket(run_id, peer.addresses, manifest.fingerprint())
        run_in_view(trainer)


def open_folders(run_id: str, network: NetworkOptions, training: TrainingSettings) -> OwnFolders:
    """The folders that were named; else ``./manyhands-RUN_ID``, or the first of ``-2``, ``-3`` ... that is not in use.

    Raises:
        ConfigError: one cannot be used.
    """
    if training.no_checkpoints:
        return OwnFolders(None, None)  # a state dir that was named is opened by the peer
    if training.checkpoint_dir is not None:
        return _open_folder(training.checkpoint_dir, run_id, network)
    for number in itertools.count(1):
        name = f"manyhands-{run_id}" if number == 1 else f"manyhands-{run_id}-{number}"
        try:
            return _open_folder(Path(name), run_id, network)
        except FolderInUse:  # by another trainer that was started here
            if number == MAX_FOLDERS:
                raise
    raise AssertionError("unreachable")


def _open_folder(path: Path, run_id: str, network: NetworkOptions) -> OwnFolders:
    checkpoint_dir = CheckpointDir(path, run_id)
    try:
        return OwnFolders(StateDir(path) if network.state_dir is None else None, checkpoint_dir)
    except ConfigError:
        checkpoint_dir.close()
        raise


def _recipe_for(
    run_id: str, run: Run | None, given: Mapping[str, Any], checkpoints: CheckpointDir | None
) -> tuple[AlbertRecipe, RunRecipe | None]:
    """What to train, and the recipe of the run if somebody trains in it already.

    The run decides; where nobody is, the newest checkpoint of this peer; else what was given.
    """
    if run is not None and run.manifest is not None:
        found = adopted(run_id, run.manifest.extra, given)
        _check_fit(run_id, found)
        return found.recipe, found
    if checkpoints is not None and (facts := checkpoints.newest_facts()):
        saved = adopted(run_id, facts, given)
        _check_fit(run_id, saved)
        return saved.recipe, None
    recipe = AlbertRecipe(**given)
    check_memory(run_id, recipe, recipe.vocab_size)
    return recipe, None


def _check_fit(run_id: str, found: RunRecipe) -> None:
    check_memory(run_id, found.recipe, found.vocab_size)


def _declare(peer: Peer, run_id: str) -> None:
    async def declare() -> None:
        declare_run(peer.dht, run_id)

    peer.run(declare(), NOTE_TIMEOUT_S, "declaring the run")


def _learn_addresses(peer: Peer, run: Run) -> None:
    """Where the peers of the run can be dialled, to ask them for the tokenizer."""

    async def learn() -> None:
        for peer_id, record in run.peers.items():
            peer.endpoint.learn(peer_id, readable_addresses(record.addresses))

    peer.run(learn(), NOTE_TIMEOUT_S, "noting the addresses of the run's peers")
