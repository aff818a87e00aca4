"""``manyhands train``: begin or join a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from manyhands.base.errors import RunNotFound
from manyhands.base.run_id import checked_run_id
from manyhands.base.ticket import split_tickets
from manyhands.cli.charter_options import run_id_of, with_charter
from manyhands.cli.loading import begin_loading
from manyhands.cli.options import DEFAULT_RUN_ID, NetworkOptions, OutputOptions
from manyhands.cli.run_look_up import Scout
from manyhands.cli.taking_part import check_before, is_further_rank, take_part, with_data, with_peers_here
from manyhands.cli.web_page import WebOptions
from manyhands.optim.run.run_records import Run
from manyhands.recipes.albert.config import AlbertRecipe
from manyhands.recipes.albert.presets import model_settings
from manyhands.recipes.albert.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True, init=False)
class GivenRecipe(AlbertRecipe):
    """The recipe settings that were named on the command line; an existing run has all others.

    Attributes:
        given: name -> value.
    """

    model: Annotated[str, Parameter(show_default=False)] = "small"
    """albert-large-v2, small (the default), or a config.json; it sets the sizes that are not given."""

    batch_size: Annotated[int, Parameter(show_default=False)] = AlbertRecipe.batch_size
    """Samples in one local step of this peer; by default as many as take 0.2 to 1 s, found by a short trial."""

    def __init__(self, **given: Any) -> None:
        object.__setattr__(self, "given", given)


def settings_given(recipe: GivenRecipe | None) -> dict[str, Any]:
    """The settings of the recipe that were given, with the sizes of ``--model``."""
    given: dict[str, Any] = dict(getattr(recipe, "given", {}))
    return given if (model := given.pop("model", None)) is None else model_settings(model) | given


def train(
    *,
    run_id: Annotated[
        str | None,
        Parameter(
            help="Name of the run: 1 to 64 characters, without '.'. Not needed if only one run is there. A new run is "
            "named albert by default."
        ),
    ] = None,
    start_new: Annotated[bool, Parameter(help="Begin the run even if no peer of --initial-peers knows it.")] = False,
    network: NetworkOptions = NetworkOptions(),
    training: Annotated[TrainingSettings, Parameter(name="*", group="Training")] = TrainingSettings(),
    recipe: Annotated[
        GivenRecipe | None, Parameter(name="*", group="Recipe (set by the peer that begins a run)")
    ] = None,
    web: WebOptions = WebOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Begin a run that trains an ALBERT, or join one, with this machine.

    Without --initial-peers it begins a run, which others can join. Runs until Ctrl-C or --max-steps.
    """
    given = settings_given(recipe)
    if run_id is not None:
        checked_run_id(run_id)
    run_id = run_id_of(network, run_id)
    found = with_peers_here(network, run_id or DEFAULT_RUN_ID, output)
    is_of_folder = found is not network
    network = found
    if not network.initial_peers:
        AlbertRecipe(**given)
    if (start_new or is_of_folder) and run_id is None:
        run_id = DEFAULT_RUN_ID
    given = with_data(training, given, output)
    check_before(network, training, given)
    if is_further_rank(training):
        return
    begin_loading()
    run = None
    with web.taken() as page:
        if network.initial_peers:
            run, network = look_for(network, run_id, start_new=start_new or is_of_folder)
        if run_id is None:
            run_id = run.run_id if run is not None else run_id_of(network, None) or DEFAULT_RUN_ID
        take_part(run_id, network, training, given, output, run=run, start_new=start_new or None, page=page)


def look_for(network: NetworkOptions, run_id: str | None, *, start_new: bool) -> tuple[Run | None, NetworkOptions]:
    """Look for the run to join.

    A run is begun without --start-new if no name was given and no run is found, or if this peer was invited to a run
    that has no trainers yet: in both cases no name can be mistyped. If the initial peers serve the charter of one run,
    it is that run.

    Returns:
        The run, or None if this peer begins it; and the options to join with, which name the run's charter if it has
        one.
    Raises:
        RunNotFound: the named run does not exist, and ``start_new`` is false.
        ConfigError: the run is by invitation, and there is no ticket.
    """
    with Scout(network.initial_peers or ()) as scout:
        charter = scout.find_charter(run_id) if run_id is not None else b""
        if start_new or charter:
            run = next((run for run in scout.runs(run_id) if run.run_id == run_id), None)
            if run is None or not run.is_trained:
                scout.check_clock()
        else:
            run = _chosen(scout, run_id)
            if run is None:
                run_id = scout.charted_run()
            named = run_id or (run.run_id if run is not None else None)
            charter = scout.find_charter(named) if named is not None else b""
    is_named = any(ticket.charter == charter for ticket in split_tickets(network.initial_peers or ())[1])
    named = run_id or (run.run_id if run is not None else None)
    return run, network if is_named or named is None else with_charter(network, named, charter)


def _chosen(scout: Scout, run_id: str | None) -> Run | None:
    try:
        return scout.choose(run_id)
    except RunNotFound as error:
        if run_id is None:
            return None
        raise RunNotFound(f"{error}. Check --run-id, or begin the run with --start-new") from None
