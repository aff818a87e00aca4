"""The training data of a peer: the tokenizer of the run, and samples made with it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from manyhands.base.errors import ConfigError, Unavailable
from manyhands.base.text import counted
from manyhands.base.urls import without_secrets
from manyhands.checkpoints.checkpoint_dir import CheckpointDir
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunToJoin
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.data.corpus import load_documents
from manyhands.recipes.albert.data.samples import Sample, Samples, make_samples
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, tokenizer_from_json, train_tokenizer, wrapped
from manyhands.recipes.albert.data.tokenizer_file import check_tokenizer, digest_of_json, read_tokenizer, vocabulary_of
from manyhands.recipes.albert.packages import transformers
from manyhands.recipes.albert.tokenizer_exchange import FETCH_TIMEOUT_S, fetch_tokenizer, serve_tokenizer

if TYPE_CHECKING:
    from manyhands.recipes.albert.data.shard_stream import HostedData, ShardStream

logger = logging.getLogger(__name__)


class DataSource(NamedTuple):
    """The tokenizer, which newcomers can fetch from this peer already, and the samples."""

    tokenizer: transformers.PreTrainedTokenizerFast
    samples: Samples


def open_source(
    peer: Peer, run_id: str, recipe: AlbertRecipe, run: RunToJoin | None, checkpoint_dir: CheckpointDir | None
) -> DataSource:
    """Open the data that the recipe names, or read its text.

    Raises:
        ConfigError: the data or the text cannot be used in this run.
        Unavailable: the tokenizer of the run could not be loaded.
    """
    is_text = recipe.dataset_path is None and not recipe.dataset_url
    documents = load_documents(recipe.text) if is_text else []
    stream = open_stream(recipe, str(peer.peer_id), position_in(peer.state_path)) if recipe.shards_url else None
    tokenizer = _get_tokenizer(peer, run_id, recipe, run, checkpoint_dir, documents, stream)
    peer.run(serve_tokenizer(peer.endpoint, tokenizer), FETCH_TIMEOUT_S, "handing out the tokenizer")
    if stream is not None:
        samples = streamed_samples(run_id, recipe, tokenizer, stream)
    else:
        samples = samples_for(run_id, recipe, tokenizer, documents=documents)
    num_samples = counted(len(samples.training), "sample")
    logger.info("Training on %s %s; %d others are held out", num_samples, place_of(recipe), len(samples.heldout))
    return DataSource(tokenizer, samples)


def place_of(recipe: AlbertRecipe) -> str:
    """The source of a peer's samples, as it follows their number in a log line."""
    if recipe.dataset_path is not None:
        return f"in {recipe.dataset_path}"
    if recipe.dataset_url:
        return f"in the shards of {without_secrets(recipe.dataset_url[0])}"
    if recipe.text:
        return f"of {', '.join(map(str, recipe.text))}"
    return f"of the documentation that comes with Python {platform.python_version()}"


def position_in(state_path: Path | None, rank: int = 0) -> Path | None:
    """The file in a peer's folder with the number of shards that one of its ranks has begun."""
    if state_path is None:
        return None
    return state_path / (f"stream-rank-{rank}.json" if rank else "stream.json")


def samples_for(
    run_id: str,
    recipe: AlbertRecipe,
    tokenizer: transformers.PreTrainedTokenizerFast,
    order: str = "",
    position: Path | None = None,
    documents: Sequence[Sequence[str]] | None = None,
) -> Samples:
    """The samples of the recipe's data or text.

    Args:
        order: seeds the order of fetched shards.
        position: file that keeps the position in that order.
        documents: of the text, if it has been read already.
    Raises:
        ConfigError: they cannot be used in this run.
    """
    if recipe.shards_url:
        return streamed_samples(run_id, recipe, tokenizer, open_stream(recipe, order, position))
    if recipe.dataset_path is not None:
        return _prepared_samples(run_id, recipe, tokenizer)
    return make_samples(load_documents(recipe.text) if documents is None else documents, tokenizer, recipe)


def heldout_samples(run_id: str, recipe: AlbertRecipe, tokenizer: transformers.PreTrainedTokenizerFast) -> Samples:
    """The held-out samples, for peers that do not train. Of hosted data only the validation shards are fetched.

    Raises:
        ConfigError: they cannot be used in this run.
    """
    if not recipe.shards_url:
        return samples_for(run_id, recipe, tokenizer)
    data = _open_hosted(recipe)
    try:
        return _samples_of(run_id, recipe, tokenizer, data, [])
    finally:
        data.close()


def open_stream(recipe: AlbertRecipe, order: str, position: Path | None) -> ShardStream:
    """Open the shards that the recipe names, and wait for the first one.

    Args:
        order: seeds the order of the shards, together with the recipe's seed.
        position: file that keeps the position in that order.
    Raises:
        ConfigError: no shard can be fetched.
    """
    from manyhands.recipes.albert.data.shard_stream import ShardStream

    return ShardStream(_open_hosted(recipe), f"{recipe.seed} {order}", position)


def streamed_samples(
    run_id: str, recipe: AlbertRecipe, tokenizer: transformers.PreTrainedTokenizerFast, stream: ShardStream
) -> Samples:
    """The samples of a stream, checked against the run.

    Raises:
        ConfigError: they were made with another tokenizer, or for samples of another length.
    """
    try:
        return _samples_of(run_id, recipe, tokenizer, stream.data, stream)
    except ConfigError:
        stream.close()
        raise


def _open_hosted(recipe: AlbertRecipe) -> HostedData:
    from manyhands.recipes.albert.data.shard_stream import HostedData, default_cache_dir

    cache_dir = recipe.cache_dir or default_cache_dir()
    logger.info("Fetching data from %s into %s", " ".join(map(without_secrets, recipe.dataset_url)), cache_dir)
    return HostedData(recipe.dataset_url, cache_dir, recipe.cache_mb * 1_000_000)


def _samples_of(
    run_id: str,
    recipe: AlbertRecipe,
    tokenizer: transformers.PreTrainedTokenizerFast,
    data: HostedData,
    training: Sequence[Sample] | ShardStream,
) -> Samples:
    from manyhands.recipes.albert.data.shard_stream import check_index

    check_index(data.index, run_id, recipe, tokenizer_digest(tokenizer))
    vocabulary = vocabulary_of(tokenizer.backend_tokenizer)
    return Samples(training=training, heldout=data.heldout(recipe.num_heldout), vocabulary=vocabulary)


def _prepared_samples(run_id: str, recipe: AlbertRecipe, tokenizer: transformers.PreTrainedTokenizerFast) -> Samples:
    from manyhands.recipes.albert.data.dataset import check_samples, open_prepared

    assert recipe.dataset_path is not None
    prepared = open_prepared(recipe.dataset_path, recipe.tokenizer)
    vocabulary = vocabulary_of(tokenizer.backend_tokenizer)
    prepared.check_run(run_id, recipe, tokenizer_digest(tokenizer))
    check_samples(prepared, vocabulary)
    heldout = prepared.heldout(recipe.num_heldout)
    return Samples(training=prepared.training, heldout=heldout, vocabulary=vocabulary)


def _get_tokenizer(
    peer: Peer,
    run_id: str,
    recipe: AlbertRecipe,
    run: RunToJoin | None,
    checkpoint_dir: CheckpointDir | None,
    documents: Sequence[Sequence[str]],
    stream: ShardStream | None,
) -> transformers.PreTrainedTokenizerFast:
    """Get the tokenizer: from the named folder, this peer's checkpoint or a peer of the run, or by training one."""
    if recipe.tokenizer is not None:
        if run is not None:
            check_tokenizer(recipe.tokenizer, run_id, run.recipe.tokenizer)
        return wrapped(read_tokenizer(recipe.tokenizer))
    file = checkpoint_dir.newest_file("tokenizer.json") if checkpoint_dir is not None else None
    saved = file.decode() if file is not None else None
    if saved is not None and (run is None or digest_of_json(saved) == run.recipe.tokenizer):
        return tokenizer_from_json(saved)
    if run is not None:
        fetching = fetch_tokenizer(peer.endpoint, run.peers, run.recipe.tokenizer)
        fetched = peer.run(fetching, FETCH_TIMEOUT_S, "asking for the tokenizer")
        if fetched is not None:
            return fetched
    if stream is not None:
        return tokenizer_from_json(stream.data.tokenizer)
    if recipe.dataset_path is not None:
        raise ConfigError(
            f"the tokenizer of the samples in {recipe.dataset_path} is missing; give the one that they were made with: "
            "--tokenizer FOLDER"
        )
    logger.info("Training the tokenizer on %s", counted(len(documents), "document"))
    tokenizer = train_tokenizer(documents, recipe.vocab_size)
    if run is not None and tokenizer_digest(tokenizer) != run.recipe.tokenizer:
        raise Unavailable(
            f"cannot get the tokenizer of run {run_id!r}: none of the peers that were asked sent it, and the text here "
            "gives another one. Try again, or give the same --text as the others (without it, use the same version "
            "of Python)"
        )
    return tokenizer
