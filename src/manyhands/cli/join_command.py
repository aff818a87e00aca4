"""``manyhands join``: train in an existing run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import shell_option
from manyhands.base.ticket import Ticket
from manyhands.cli.charter_options import with_charter
from manyhands.cli.loading import begin_loading
from manyhands.cli.options import NetworkOptions, OutputOptions
from manyhands.cli.run_look_up import Scout
from manyhands.cli.taking_part import check_before, is_further_rank, take_part, with_data
from manyhands.optim.run.run_records import Run
from manyhands.recipes.albert.settings import TrainingSettings


def join(
    address: Annotated[
        str, Parameter(help="Multiaddr or HOST:PORT of any peer of the run, or a ticket, which begins with mh1.")
    ],
    /,
    *,
    run_id: Annotated[str | None, Parameter(help="Name of the run, if several are there.")] = None,
    text: Annotated[
        tuple[Path, ...],
        Parameter(
            help="UTF-8 text files to train on; by default the data of the run, from this machine or from its address."
        ),
    ] = (),
    dataset_path: Annotated[
        Path | None,
        Parameter(
            help="Folder with prepared samples instead; by default data/albert_tokenized_wikitext, if it exists and "
            "the run trains on it."
        ),
    ] = None,
    dataset_url: Annotated[
        tuple[str, ...], Parameter(help="Addresses of an index.json of shards, or of an archive; several are mirrors.")
    ] = (),
    cache_dir: Annotated[
        Path | None, Parameter(help="Cache folder for downloaded data; by default ~/.cache/manyhands/data.")
    ] = None,
    cache_mb: Annotated[int | None, Parameter(help="Largest size of the cache in megabytes; by default 4000.")] = None,
    tokenizer: Annotated[
        Path | None, Parameter(help="Folder with the tokenizer of the run; by default a peer of the run sends it.")
    ] = None,
    batch_size: Annotated[
        int | None, Parameter(help="Samples in one local step; by default as many as take 0.2 to 1 s.")
    ] = None,
    network: NetworkOptions = NetworkOptions(),
    training: Annotated[TrainingSettings, Parameter(name="*", group="Training")] = TrainingSettings(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Join a run with one word, and train its model with this machine.

    The model, its tokenizer, the optimizer and all other settings that peers must
    share come from the run. This machine chooses device, precision and batch size.
    For example:

        manyhands join 203.0.113.7:31337

    Runs until Ctrl-C or --max-steps.
    """
    given: dict[str, Any] = {"text": text} if text else {}
    given |= {name: path for name, path in (("dataset_path", dataset_path), ("tokenizer", tokenizer)) if path}
    streamed = {"dataset_url": dataset_url, "cache_dir": cache_dir, "cache_mb": cache_mb}
    given |= {name: value for name, value in streamed.items() if value}
    if batch_size is not None:
        given |= {"batch_size": batch_size}
    if run_id is not None:
        checked_run_id(run_id)
    ticket = Ticket.parse(address) if Ticket.is_one(address) else Ticket("", [Address.parse(address)])
    if run_id is not None and ticket.run_id and run_id != ticket.run_id:
        raise ConfigError(f"the ticket is for run {ticket.run_id!r}, and --run-id is {run_id!r}; leave --run-id out")
    named = (address,) if ticket.is_charted else tuple(map(str, ticket.addresses))
    initial_peers = (*named, *(network.initial_peers or ()))
    network = dataclasses.replace(network, initial_peers=initial_peers)
    given = with_data(training, given, output)
    check_before(network, training, given)
    if is_further_rank(training):
        return
    begin_loading()
    run, charter = _chosen(network, run_id or ticket.run_id or None, ticket)
    if not ticket.is_charted:
        network = with_charter(network, run.run_id, charter)
    take_part(run.run_id, network, training, given, output, run=run, start_new=False)


def _chosen(network: NetworkOptions, run_id: str | None, ticket: Ticket) -> tuple[Run, bytes]:
    """The run to join, and the digest of its charter if it has one."""
    assert network.initial_peers
    with Scout(network.initial_peers) as scout:
        try:
            run = scout.choose(run_id, is_trained=True, expected=ticket.digest)
        except RunNotFound as error:
            raise _not_begun(ticket.run_id) if ticket.is_charted else error from None
        charter = scout.find_charter(run.run_id)
    peers = " ".join(network.initial_peers)
    named = shell_option("--run-id", run.run_id)
    if run.manifest is None and ticket.digest and run.has_trainers:
        raise ConfigError(
            f"run {run.run_id!r} has other settings now than when the ticket was made; ask for a new one, or join "
            f"without it: manyhands join {network.initial_peers[0]} {named}"
        )
    if ticket.is_charted and not run.is_trained and not run.beginners:
        raise _not_begun(ticket.run_id)
    if not run.is_trained and not run.beginners:
        raise RunNotFound(
            f"nobody trains in run {run.run_id!r}, so there is nothing to join; to begin it, or to go on from a "
            f"checkpoint in this folder: manyhands train {named} --initial-peers {peers}"
        )
    return run, charter


def _not_begun(run_id: str) -> RunNotFound:
    return RunNotFound(
        f"nobody trains in run {run_id!r} yet; to begin it with your model and settings: manyhands train "
        "--initial-peers TICKET"
    )
