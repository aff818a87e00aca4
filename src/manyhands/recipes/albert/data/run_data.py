"""The data that a run trains on, as a fact of the run, and the data that a newcomer takes. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from manyhands.base.errors import ConfigError
from manyhands.base.urls import has_secret, parts_of
from manyhands.recipes.albert.data.given import found, is_named, or_found_here
from manyhands.rpc.frames import readable

logger = logging.getLogger(__name__)

PYTHON_DOCS = "python-docs"
"""Stands in place of a digest for the text that comes with Python, which differs a little between its versions."""

PUBLIC_SCHEMES = ("http", "https", "ftp", "s3")
"""Schemes of addresses in a run manifest. All newcomers open them, so an address must not name a file of theirs."""

SHOWN_DIGITS = 12
"""Number of digits of a digest that are shown."""


class RunData(NamedTuple):
    """The data of a run.

    Attributes:
        digest: equal for a folder, an archive and shards of the same samples; or :data:`PYTHON_DOCS`.
        urls: addresses of the data; several are mirrors.
    """

    digest: str = PYTHON_DOCS
    urls: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.digest == PYTHON_DOCS:
            return "the documentation that comes with Python"
        return f"data with digest {readable(self.digest[:SHOWN_DIGITS])}"


OF_PYTHON = RunData()
"""The data of a run whose first user named none."""


def data_of(given: Mapping[str, Any]) -> RunData:
    """The data in the settings of a peer, by the names of :class:`AlbertRecipe`.

    Raises:
        ConfigError: it cannot be read.
    """
    urls = tuple(filter(is_public, given.get("dataset_url") or ()))
    if given.get("dataset_path") is not None:
        from manyhands.recipes.albert.data.dataset import open_prepared

        return RunData(open_prepared(given["dataset_path"], given.get("tokenizer")).content_digest(), urls)
    if given.get("dataset_url"):
        from manyhands.recipes.albert.data.shard_stream import fetch_index

        return RunData(fetch_index(tuple(given["dataset_url"])).about.content_digest(), urls)
    if given.get("text"):
        from manyhands.recipes.albert.data.corpus import text_digest

        return RunData(text_digest(tuple(given["text"])))
    return OF_PYTHON


def is_public(url: str) -> bool:
    """Whether an address may be in a run manifest: it is the address of a server, without password or signature."""
    try:
        return parts_of(url).scheme in PUBLIC_SCHEMES and not has_secret(url) and len(url.split()) == 1
    except ConfigError:
        return False


def data_for_run(
    run_id: str,
    wanted: RunData,
    given: Mapping[str, Any],
    *,
    any_text: bool,
    begin_log: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The settings of a peer that joins a run, with the data of the run: from this machine, or from its address.

    If the user named data, that is taken, with a warning if it is not the data of the run.

    Args:
        given: settings that the user named.
        any_text: use the data on this machine, whatever the run trains on.
        begin_log: called before the first log line.
    Raises:
        ConfigError: the data of the run is not on this machine and cannot be fetched.
    """
    if not is_named(given) and not any_text and wanted.digest == PYTHON_DOCS:
        return dict(given)
    is_chosen = is_named(given) or any_text
    here = or_found_here(given)
    try:
        own = data_of(here)
    except ConfigError as error:
        if is_chosen:
            raise
        begin_log()
        logger.warning("The data on this machine cannot be used: %s", error)
        here = dict(given)
        own = OF_PYTHON
    if own.digest == wanted.digest:
        return here
    if is_chosen:
        begin_log()
        logger.warning("Run %r trains on %s. As asked, this peer trains on other data: %s", run_id, wanted, own)
        return here
    urls = tuple(filter(is_public, wanted.urls))
    if not urls:
        raise ConfigError(
            f"run {run_id!r} trains on {wanted}, which is not on this machine, and names no address for it: ask the "
            "person who began the run for it, and name it with --text FILE, --dataset-path FOLDER or --dataset-url "
            f"ADDRESS; or train on other text ({own}) with --any-text"
        )
    begin_log()
    places = readable(" ".join(urls))
    logger.info("Run %r trains on %s, which is not on this machine: fetching it from %s", run_id, wanted, places)
    fetched = found({**given, "dataset_url": urls})
    if (other := data_of(fetched)).digest != wanted.digest:
        raise ConfigError(
            f"run {run_id!r} trains on {wanted}, and its address {places} has other data now ({other}): ask the person "
            "who began the run; or train on other text with --any-text"
        )
    return fetched
