"""``manyhands train``"""

from __future__ import annotations

import importlib.util
import logging
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.errors import ConfigError, MissingExtra
from manyhands.base.run_id import checked_run_id
from manyhands.cli.options import NetworkOptions, OutputOptions
from manyhands.recipes.albert.checkpoint_dir import CheckpointDir
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.corpus import load_documents
from manyhands.recipes.albert.settings import TrainingSettings

logger = logging.getLogger(__name__)


def train(
    *,
    run_id: Annotated[str, Parameter(help="Name of the run: 1 to 64 characters, without '.'.")],
    network: NetworkOptions | None = None,
    training: Annotated[TrainingSettings | None, Parameter(name="*", group="Training")] = None,
    recipe: Annotated[AlbertRecipe | None, Parameter(name="*", group="Recipe (the same for all peers)")] = None,
    output: OutputOptions | None = None,
) -> None:
    """Join a run and train its ALBERT with this machine.

    Without --initial-peers it begins a run of its own, which others can join. Stays until Ctrl-C or --max-steps.
    """
    network, output = network or NetworkOptions(), output or OutputOptions()
    training, recipe = training or TrainingSettings(), recipe or AlbertRecipe()
    checked_run_id(run_id)
    if training.auxiliary and network.client_mode:
        raise ConfigError(
            "--auxiliary helps those whom nobody can dial, so others must dial it: leave out --client-mode"
        )
    require_albert()
    if not training.auxiliary:
        load_documents(recipe.text)  # what cannot be used is told before anything is started
    if training.checkpoint_dir is not None:
        CheckpointDir(training.checkpoint_dir, run_id).close()
    if training.device != "auto":
        logger.info("Loading PyTorch")
        from manyhands.recipes.albert.compute import Compute

        Compute(training.device, training.precision)
    emit = output.begin()
    with network.connect() as peer:
        logger.info("Joining run %s as peer %s", run_id, peer.peer_id)
        if peer.addresses:
            logger.info("Others can join through this peer: --initial-peers %s", " ".join(peer.addresses))
        logger.info("Loading PyTorch and transformers")
        if training.auxiliary:
            from manyhands.recipes.albert.auxiliary import AlbertAuxiliary

            AlbertAuxiliary(peer, run_id, recipe, training).run()
            return
        from manyhands.recipes.albert.training import AlbertTrainer

        AlbertTrainer(peer, run_id, recipe, training, emit).run()


def require_albert() -> None:
    """Say at once what is missing, without importing it.

    Raises:
        MissingExtra: the packages of ``manyhands[albert]`` are not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "tokenizers")):
        raise MissingExtra("the ALBERT recipe", "albert")
