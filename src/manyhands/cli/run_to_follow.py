"""Waits for the run that an evaluator or a monitor follows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from manyhands.base.errors import ConfigError, RunNotFound, Unavailable
from manyhands.cli.run_look_up import LOOK_TIMEOUT_S, PATIENCE_S
from manyhands.optim.run.run_records import Run, find_runs, listed, nobody_is_in
from manyhands.peer import Peer
from manyhands.recipes.albert.adoption import RunRecipe, adopted

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
TELL_PERIOD_S = 60.0


class RunToFollow(NamedTuple):
    """A run with trainers, and its recipe."""

    run_id: str
    recipe: RunRecipe


def wait_for_run(
    peer: Peer, run_id: str | None, given: Mapping[str, Any], *, may_be_mistyped: bool = False
) -> RunToFollow:
    """Wait until a run has trainers. Without a name, it is the only run there is.

    Args:
        given: settings of the recipe that this peer chooses itself.
        may_be_mistyped: do not wait for a run that no peer knows if there are other runs.
    Raises:
        RunNotFound: there are other runs, and none of this name.
        ConfigError: there are several runs, the recipe cannot be used, or its model does not fit into the memory.
    """
    from manyhands.recipes.albert.memory import check_memory  # needs a package of manyhands[albert]

    run = wait_for_trainers(peer, run_id, may_be_mistyped=may_be_mistyped)
    assert run.manifest is not None
    found = adopted(run.run_id, run.manifest.extra, given)
    check_memory(run.run_id, found.recipe, found.vocab_size)
    return RunToFollow(run.run_id, found)


def wait_for_trainers(peer: Peer, run_id: str | None, *, may_be_mistyped: bool = False) -> Run:
    """Wait until a run has trainers; without a name, the only run there is.

    Raises:
        RunNotFound, ConfigError: as for :func:`wait_for_run`.
    """
    tell_at = peer.time()
    patient_until = tell_at + PATIENCE_S
    if run_id is not None:
        _check_access(peer, run_id)
    while True:
        runs: list[Run] = []
        try:
            finding = find_runs(peer.dht, run_id, peer.presence.signed_manifests())
            runs = peer.run(finding, LOOK_TIMEOUT_S, "looking which runs are there")
        except Unavailable as error:
            logger.warning("Cannot read the records of the runs: %s; trying again", error)
        trained = [run for run in runs if run.is_trained and run_id in (None, run.run_id)]
        if len(trained) > 1:
            raise ConfigError(f"{len(trained)} runs are there: {listed(trained)}; choose one of them with --run-id")
        if trained and run_id is not None:
            _check_access(peer, run_id)  # its charter may not have been there at first
            return trained[0]
        if trained:  # look again: if it has a charter, only a manifest that its owner signed is valid
            run_id = trained[0].run_id
            _check_access(peer, run_id)
            continue
        others = [run for run in runs if run.run_id != run_id]
        seen = "" if run_id is None else nobody_is_in(run_id, peer.dht.num_known_peers, others)
        if may_be_mistyped and run_id is not None and others and others == runs and peer.time() >= patient_until:
            raise RunNotFound(f"{seen}. Check --run-id")
        if peer.time() >= tell_at:
            tell_at = peer.time() + TELL_PERIOD_S
            if run_id is None:
                looking = peer.presence.named_charters()
                for charter in peer.run(looking, LOOK_TIMEOUT_S, "looking which runs have a charter"):
                    _check_access(peer, charter.run_id)
            logger.info("Waiting for a trainer%s", f" ({seen})" if seen else "")
        peer.sleep(LOOK_PERIOD_S)


def _check_access(peer: Peer, run_id: str) -> None:
    """Raises ``ConfigError`` if a run is by invitation and this peer has no ticket."""
    peer.run(peer.presence.check_run(run_id), LOOK_TIMEOUT_S, "looking for a charter")
