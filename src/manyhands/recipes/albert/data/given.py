"""The data that a user named, in one of four ways: text, a prepared folder, hosted data, or a tokenizer alone.

Imports no torch, and imports each reader only when it is needed: the command line checks these settings first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.config import AlbertRecipe


def is_named(given: Mapping[str, Any]) -> bool:
    """Whether the user named data. A tokenizer alone is no data."""
    return any(given.get(name) for name in ("text", "dataset_path", "dataset_url"))


def or_found_here(given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with the prepared data in the current folder if there is any and the user named none."""
    from manyhands.recipes.albert.data.dataset import found_here

    return found_here(given)


def found(given: Mapping[str, Any], before_fetching: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """The given settings, with the tokenizer that lies beside prepared data. An archive is fetched.

    Args:
        before_fetching: called before an archive is fetched, which may take minutes.
    Raises:
        ConfigError: several sources were named, or the archive cannot be used.
    """
    named = [f"--{name}" for name in ("text", "dataset-path", "dataset-url") if given.get(name.replace("-", "_"))]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are given together; give one of them")
    if not named:
        return dict(given)
    if given.get("dataset_url"):
        from manyhands.recipes.albert.data.archive import with_unpacked

        before_fetching()
        given = with_unpacked(given)
    return or_found_here(given)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a new run that follow from its tokenizer and data.

    Raises:
        ConfigError: a setting was given with another value.
    """
    settings: dict[str, Any] = {}
    if given.get("dataset_path") is not None:
        from manyhands.recipes.albert.data.dataset import open_prepared

        settings = open_prepared(given["dataset_path"], given.get("tokenizer")).settings()
    elif given.get("dataset_url"):
        from manyhands.recipes.albert.data.shard_stream import fetch_index

        about = fetch_index(given["dataset_url"]).about
        settings = {"vocab_size": about.vocab_size, "seq_length": about.seq_length}
    elif given.get("tokenizer") is not None:
        from manyhands.recipes.albert.data.tokenizer_file import read_tokenizer, vocabulary_of

        settings = {"vocab_size": vocabulary_of(read_tokenizer(given["tokenizer"])).size}
    for name, value in settings.items():
        if given.get(name, value) != value:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} is {given[name]}, and the data on this machine needs {value}; leave out {option}, or make "
                "other data with: manyhands data prepare"
            )
    return settings


def check_given_data(run_id: str, given: Mapping[str, Any], recipe: AlbertRecipe, tokenizer: str) -> None:
    """Check that the data on this machine fits a run.

    Args:
        recipe: of the run.
        tokenizer: digest of the run's tokenizer.
    Raises:
        ConfigError: it does not. The message names the file that differs.
    """
    if given.get("dataset_path") is not None:
        from manyhands.recipes.albert.data.dataset import open_prepared

        open_prepared(given["dataset_path"], given.get("tokenizer")).check_run(run_id, recipe, tokenizer)
    elif given.get("dataset_url"):
        from manyhands.recipes.albert.data.shard_stream import check_index, fetch_index

        check_index(fetch_index(given["dataset_url"]), run_id, recipe, tokenizer)
    elif given.get("tokenizer") is not None:
        from manyhands.recipes.albert.data import tokenizer_file

        tokenizer_file.check_tokenizer(given["tokenizer"], run_id, tokenizer)
