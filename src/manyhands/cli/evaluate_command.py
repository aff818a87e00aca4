"""``manyhands evaluate``: measure a run on held-out text."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from manyhands.base.errors import ConfigError
from manyhands.base.run_id import checked_run_id
from manyhands.cli.charter_options import run_id_of
from manyhands.cli.options import Count, NetworkOptions, OutputOptions
from manyhands.cli.output.logs import name_in_logs
from manyhands.cli.run_to_follow import wait_for_run
from manyhands.cli.taking_part import found_data, require_albert
from manyhands.recipes.albert.config import OWN_SETTINGS, AlbertRecipe
from manyhands.recipes.albert.data.corpus import check_text
from manyhands.recipes.albert.data.run_data import data_for_run
from manyhands.recipes.albert.settings import check_device

logger = logging.getLogger(__name__)


@Parameter(name="*", group="Evaluation")
@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The data, the times and the device of the measurements."""

    text: tuple[Path, ...] = ()
    """UTF-8 text files: those of the trainers, who hold a part out. Needed if the run trains on text files."""

    dataset_path: Path | None = None
    """Folder with samples of manyhands data prepare; by default data/albert_tokenized_wikitext, if it
    exists and the run trains on it."""

    dataset_url: tuple[str, ...] = ()
    """Addresses of an index.json of shards, or of an archive; several are mirrors."""

    cache_dir: Path | None = None
    """Cache folder for downloaded data; by default ~/.cache/manyhands/data."""

    cache_mb: int = AlbertRecipe.cache_mb
    """Largest size of the cache in megabytes."""

    tokenizer: Path | None = None
    """Folder with the tokenizer that the samples were made with; by default the folder tokenizer beside them."""

    any_text: bool = False
    """Measure on the text of this machine, even if the run trains on other text."""

    every: Count = 5
    """Global steps from one measurement to the next; each downloads the state from a peer of the run."""

    max_evaluations: Count | None = None
    """Stop after this many measurements; without it, stay until Ctrl-C."""

    until_step: Count | None = None
    """Stop after a measurement at this global step or a later one."""

    device: str = "auto"
    """Device in torch's notation: cpu, cuda, cuda:1, mps. auto is an NVIDIA GPU if there is one, else the CPU."""

    threads: Count | None = None
    """CPU threads that torch may use; by default torch decides."""

    def __post_init__(self) -> None:
        check_device(self.device)


def evaluate(
    *,
    run_id: Annotated[str | None, Parameter(help="Name of the run, if several are there.")] = None,
    evaluation: EvaluationOptions = EvaluationOptions(),
    network: NetworkOptions = NetworkOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure a run on held-out text: loss, and accuracy of both tasks.

    An evaluator downloads the state every few global steps. It is not part of any
    averaging round, so trainers never wait for it. Monitors draw its measurements.
    For example:

        manyhands evaluate --initial-peers 203.0.113.7:31337

    Runs until Ctrl-C, --max-evaluations or --until-step.
    """
    if run_id is not None:
        checked_run_id(run_id)
    if not network.initial_peers:
        raise ConfigError("name a peer of the run that is to be evaluated: --initial-peers HOST:PORT or a multiaddr")
    run_id = run_id_of(network, run_id)
    require_albert()
    own = {name: getattr(evaluation, name) for name in OWN_SETTINGS if hasattr(evaluation, name)}
    given = found_data(own | {"batch_size": 1}, output)
    if evaluation.text:
        check_text(evaluation.text)
    elif given.get("dataset_url"):
        from manyhands.recipes.albert.data.shard_stream import fetch_index

        fetch_index(given["dataset_url"])
    emit = output.begin()
    with network.connect() as peer:
        name_in_logs(peer=str(peer.peer_id))
        logger.info("Evaluating as peer %s, which trains nothing", peer.peer_id)
        run = wait_for_run(peer, run_id, given, may_be_mistyped=True)
        name_in_logs(run=run.run_id)
        chosen = data_for_run(run.run_id, run.recipe.data, given, any_text=evaluation.any_text)
        logger.info("Loading PyTorch and transformers")
        from manyhands.recipes.albert.evaluator import AlbertEvaluator

        evaluator = AlbertEvaluator(
            peer, run.run_id, run.recipe.with_own(chosen), emit, device=evaluation.device, threads=evaluation.threads
        )
        evaluator.run(evaluation.every, evaluation.max_evaluations, evaluation.until_step)
