"""Looks up the runs of a swarm before a peer joins one, so that mistakes are reported before anything is computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.base.ticket import split_tickets
from manyhands.cli.output.live_view import waiting
from manyhands.cli.output.logs import only_warnings
from manyhands.dht import DhtConfig
from manyhands.optim.run.run_records import Beginning, Run, find_runs, listed, look_up_run, nobody_is_in
from manyhands.peer import JOIN_RUN_TIMEOUT_S, Peer
from manyhands.reach.clocks import check_clock
from manyhands.runtime.retrying import until_reached

logger = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 5.0
PATIENCE_S = 3.0
"""Longest wait in seconds for a run, since other peers may be starting just now."""

PERIOD_S = 0.5
BEGINNING_TIMEOUT_S = 300.0
"""Longest wait in seconds for the settings of a run that another peer begins."""


class Scout:
    """A short-lived anonymous client-mode peer that lists the runs of a swarm.

    Args:
        addresses: of any peers, or tickets. With a ticket of a charted run it sees only the members of that run.
    Raises:
        ConfigError: an address cannot be parsed.
        JoinFailed: none of the addresses answers.
    """

    def __init__(self, addresses: Sequence[str | Address]) -> None:
        self._addresses, self._tickets = split_tickets(addresses)
        with ExitStack() as cleanup:
            cleanup.enter_context(only_warnings())
            with waiting(f"dialling {' '.join(address.host_port for address in self._addresses)}"):
                self._peer = cleanup.enter_context(Peer(self._addresses, client_mode=True))
            for ticket in self._tickets:
                if ticket.is_charted:
                    looking = self._peer.presence.join_run(ticket, only_looks=True)
                    self._peer.run(looking, JOIN_RUN_TIMEOUT_S, f"looking at run {ticket.run_id}")
            self._cleanup = cleanup.pop_all()

    def __enter__(self) -> Scout:
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def choose(self, run_id: str | None, *, is_trained: bool = False, expected: bytes = b"") -> Run:
        """The run of this name, or the only run if no name is given. Waits up to ``PATIENCE_S`` for it.

        Args:
            is_trained: also wait for a trainer in the run, or one that begins it; without one the run is still
                returned at the end.
            expected: the manifest digest of a ticket for ``run_id``; manifests that differ from it are ignored.
        Raises:
            RunNotFound: there is no such run.
            ConfigError: there are several to choose from, or by the clock of this machine nobody seems to train; the
                message says which.
        """
        with waiting(f"looking for run {run_id}" if run_id is not None else "looking for runs"):
            run = self._choose(run_id, is_trained=is_trained, expected=expected)
            if self.find_charter(run.run_id):  # then only records of members, and settings of the owner, are valid
                run = self._choose(run.run_id, is_trained=is_trained, expected=expected)
            return run

    def _choose(self, run_id: str | None, *, is_trained: bool, expected: bytes) -> Run:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            runs = self.runs(run_id, expected)
            candidates = [run for run in runs if run.run_id == run_id] if run_id is not None else _alive(runs)
            is_late = time.monotonic() > deadline
            if len(candidates) > 1:
                raise ConfigError(f"{len(runs)} runs are there: {listed(runs)}; choose one of them with --run-id")
            for run in candidates:
                if is_late or run.is_trained or run.beginners or not is_trained:
                    if not run.is_trained:
                        self.check_clock()
                    return run
            if is_late:
                break
            time.sleep(PERIOD_S)
        self.check_clock()
        if run_id is None:
            places = " ".join(map(str, self._addresses))
            begin = f"manyhands train --run-id NAME --start-new --initial-peers {places}"
            raise RunNotFound(f"no run is there yet; begin one with: {begin}")
        raise RunNotFound(nobody_is_in(run_id, self._peer.dht.num_known_peers, runs))

    def check_clock(self) -> None:
        """Raises ``ConfigError`` if this machine's clock is too wrong to read the records of runs."""
        peer = self._peer
        contacts = [contact.peer_id for contact in peer.dht.contacts()]
        checking = check_clock(peer.endpoint, peer.presence.wall_clock, contacts, DhtConfig().max_clock_skew_s)
        peer.run(checking, LOOK_TIMEOUT_S, "comparing the clocks")

    def find_charter(self, run_id: str) -> bytes:
        """The digest of a run's charter, from the ticket or else from the peers whose addresses were given.

        Returns:
            Empty if the run has none.
        Raises:
            ConfigError: the run is by invitation and there is no ticket, or the peers have different charters.
        """
        presence = self._peer.presence
        if all(ticket.run_id != run_id for ticket in self._tickets):
            self._peer.run(presence.learn_charter(run_id), LOOK_TIMEOUT_S, f"looking for the charter of {run_id}")
        members = presence.members.get(run_id)
        return members.charter.digest if members is not None else b""

    def is_signed_by_named(self, run: Run) -> bool:
        """Whether one of the peers whose addresses were given has signed the manifest of a run."""
        named = self._peer.run(self._peer.presence.named_peers(), LOOK_TIMEOUT_S, "dialling the named peers")
        return not named.isdisjoint(run.signers)

    def only_run(self) -> str | None:
        """The name of the only run, also if nobody trains in it yet; None without one.

        Raises:
            ConfigError: there are several, or the clock of this machine is wrong.
        """
        try:
            return self.choose(None).run_id
        except RunNotFound:
            return self.charted_run()

    def charted_run(self) -> str | None:
        """The run whose charter is served by the peers whose addresses were given, also if nobody trains in it yet.

        Raises:
            ConfigError: there are several.
        """
        looking = self._peer.presence.named_charters()
        charters = self._peer.run(looking, LOOK_TIMEOUT_S, "looking which runs have a charter")
        run_ids = sorted({charter.run_id for charter in charters})
        if len(run_ids) > 1:
            raise ConfigError(f"{len(run_ids)} runs are there: {', '.join(run_ids)}; choose one of them with --run-id")
        return run_ids[0] if run_ids else None

    def runs(self, wanted: str | None = None, expected: bytes = b"") -> list[Run]:
        """All runs that are found, the largest first. ``wanted`` is looked up even if no list names it."""
        by_ticket = {wanted: expected} if wanted is not None else {}
        finding = find_runs(self._peer.dht, wanted, by_ticket | self._peer.presence.signed_manifests())
        return self._peer.run(finding, LOOK_TIMEOUT_S, "looking which runs are there")


def _alive(runs: list[Run]) -> list[Run]:
    """Runs with peers; all runs if none has any."""
    return [run for run in runs if run.peers] or runs


def look_up(peer: Peer, run_id: str) -> Run:
    """Look up a run through a peer that has joined the swarm."""
    what = f"looking up run {run_id!r}"
    signed = peer.presence.signed_manifests().get(run_id, b"")
    return until_reached(
        lambda: peer.run(look_up_run(peer.dht, run_id, signed), LOOK_TIMEOUT_S, what), peer.sleep, what
    )


def begin_or_look_up(peer: Peer, run_id: str, *, may_begin: bool) -> Run:
    """Announce that this peer begins a run, or look up the run that others began, as soon as it has settings.

    Returns:
        The run, without a manifest if this peer is to begin it.
    Raises:
        RunNotFound: this peer is to begin it, and ``may_begin`` is false; or the peer that begins it takes too long.
    """
    is_told = False
    give_up_at = peer.time() + BEGINNING_TIMEOUT_S
    while True:
        run = look_up(peer, run_id)
        if run.manifest is not None:
            return run
        others = [beginner for beginner in run.beginners if beginner != peer.peer_id]  # an earlier start of this peer
        if not others:
            if not may_begin:
                raise RunNotFound(f"the peer that began run {run_id!r} has left it again, so there is nothing to join")
            if _announces(peer, run_id):
                return run
        elif peer.time() > give_up_at:
            raise RunNotFound(
                f"peer {others[0]} has been beginning run {run_id!r} for {BEGINNING_TIMEOUT_S:.0f} s, and the run has "
                "no settings yet: look at the log of that peer, or end it and start this one again"
            )
        elif not is_told:
            is_told = True
            logger.info("Peer %s begins run %s: waiting for its settings", others[0], run_id)
        peer.sleep(PERIOD_S)


def _announces(peer: Peer, run_id: str) -> bool:
    """Announce that this peer begins a run; returns False if another peer has announced it before."""
    what = f"announcing that this peer begins run {run_id!r}"
    beginning = Beginning(peer.dht, peer.peer_id, run_id)
    peer.presence.on_close.append(beginning.close)
    is_first = until_reached(lambda: peer.run(beginning.announce(), LOOK_TIMEOUT_S, what), peer.sleep, what)
    if not is_first:
        peer.presence.on_close.remove(beginning.close)
    return is_first
