"""The state of a run as a monitor knows it, as plain data: for the page, the terminal, programs and the history. Pure.

All of it comes from the records of peers. Names, versions, devices and reasons are text of strangers: they are cut to
length, and a program that shows them must escape them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.optim.metrics import Unit

SCHEMA_VERSION = 1
"""Version of the JSON of all classes here. It is raised when a field is removed or redefined, not when one is added."""

PeerState = Literal["training", "averaging", "gone", "left"]
"""A peer that said goodbye has ``left``. A peer that did not, and has published nothing for 13.5 s (longer with a long
``progress_ttl_s``), is ``gone``."""

Reachability = Literal["direct", "punched", "relayed", "client", "auxiliary"]
"""A peer that others can dial is ``direct``. One that they cannot dial is ``punched`` if it has a direct
connection to another such peer, ``relayed`` if it needs a relay for that, else ``client``. An ``auxiliary``
peer has no data."""

EventKind = Literal["joined", "left", "died", "aborted", "reloaded", "refused", "restarted"]


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of the run.

    Attributes:
        name: chosen by its owner; empty without one.
        relay: the id of the peer that relays its connections; empty without one.
        since, last_seen: seconds since 1970, by the clock of this coordinator.
        step: the last global step that it has made.
        samples: its own samples in committed global steps, over all its sessions.
        share: ``samples`` divided by those of all peers, 0 to 1.
        samples_per_second: its speed, as it reports it.
        rounds_committed, rounds_missed: global steps made since ``since`` with its samples, and without.
        reason: why its samples are not in the last global step; empty if they are.
    """

    peer_id: str
    name: str = ""
    state: PeerState = "training"
    reach: Reachability = "direct"
    relay: str = ""
    version: str = ""
    device: str = ""
    since: float = 0.0
    last_seen: float = 0.0
    step: int = 0
    samples: int = 0
    share: float = 0.0
    samples_per_second: float = 0.0
    rounds_committed: int = 0
    rounds_missed: int = 0
    reason: str = ""


class LeaderboardRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the leaderboard: all peers of one name, or one peer without a name.

    Attributes:
        rank: from 1; rows with equal samples have the same rank.
        name: empty for a peer without one.
        peer_ids: of all its peers, also of those that have left.
        samples: in committed global steps.
        share: of all committed samples, 0 to 1.
    """

    rank: int
    name: str
    peer_ids: list[str]
    samples: int
    share: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One committed global step on the curves. A value that no peer has published is None.

    Attributes:
        time: seconds since 1970.
        loss: mean over the micro-batches of all peers.
        samples: committed in this step.
        samples_per_second: of all peers; 0 if the monitor did not read the metrics of this step.
        bytes_sent: by all peers together since the step before.
    """

    time: float
    step: int
    loss: float | None = None
    heldout_loss: float | None = None
    samples: int = 0
    samples_per_second: float = 0.0
    peers: int = 0
    learning_rate: float | None = None
    bytes_sent: int | None = None


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        time: seconds since 1970.
        peer_id, name: of the peer that it is about; empty if it is about the run.
        text: one short sentence in plain English.
    """

    time: float
    kind: EventKind
    text: str
    step: int = 0
    peer_id: str = ""
    name: str = ""


class RunPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The run at one moment.

    Attributes:
        time: seconds since 1970.
        step: number of committed global steps.
        samples: accumulated for the next one, by all peers.
        target_batch_size: samples that the next one needs; 0 while no manifest of the run has been read.
        eta_s: seconds until the next one, counted from ``time``; None while no peer computes, or without a target.
        num_peers: peers that train now.
        samples_per_second: of all.
        committed_samples: in all global steps that this coordinator knows of; the sum over all leaders.
        committed_since: the time of the first of these, in seconds since 1970; None if they begin with the run.
        unit: of that, and of ``samples`` of peers, leaders and points. Other counts are always samples.
        last: the last committed step; None before the first.
        peers: also those that have left in the last hour; those that train first, by samples.
        leaders: the leaderboard, by rank; at most 100.
        events: the newest first; at most 50.
    """

    run_id: str
    time: float
    version: int = SCHEMA_VERSION
    step: int = 0
    samples: int = 0
    target_batch_size: int = 0
    num_peers: int = 0
    samples_per_second: float = 0.0
    eta_s: float | None = None
    committed_samples: int = 0
    committed_since: float | None = None
    unit: Unit = "samples"
    last: Point | None = None
    peers: list[PeerRow] = []
    leaders: list[LeaderboardRow] = []
    events: list[RunEvent] = []
