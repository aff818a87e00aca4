"""A run by invitation, over real sockets: members average; nobody else gets into rounds, state or records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.access import Charter, Invitation, SignedCharter
from manyhands.access.invitation import SignedInvitation
from manyhands.base.address import parse_addresses
from manyhands.base.errors import ConfigError
from manyhands.base.ticket import Ticket
from tests.network import identity_of
from tests.trainers import LISTEN, Trainer, in_threads

RUN = "invited"
OWNER = identity_of(91)
COORDINATOR = identity_of(92)


def charter_of(access: Any = "invite") -> SignedCharter:
    return SignedCharter.sign(OWNER, Charter(RUN, OWNER.peer_id, access, [COORDINATOR.peer_id], created_at=1.0))


class Run:
    """A run with one coordinator."""

    def __init__(self, folder: Path, access: Any = "invite") -> None:
        self.charter = charter_of(access)
        self.path = folder / "charter"
        self.charter.save(self.path)
        self.first = manyhands.Peer(listen=LISTEN, identity=COORDINATOR, state_dir=folder / "coordinator")
        assert self.first.coordinate(self.path)

    def ticket(self, uses: int = 1, *, peer_id: str = "", lasts_s: float = 60.0, role: Any = "trainer") -> str:
        invitation = Invitation(
            self.charter.digest, b"twelve bytes", uses, time.time() + lasts_s, COORDINATOR.peer_id, role, peer_id
        )
        token = SignedInvitation.sign(COORDINATOR, invitation).signed.encoded()
        return str(Ticket(RUN, parse_addresses(self.first.addresses), b"", self.charter.digest, token))


@contextmanager
def new_run(folder: Path, access: Any = "invite") -> Iterator[Run]:
    run = Run(folder, access)
    with run.first:
        yield run


def test_invited_peers_train_together(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        ticket = run.ticket(uses=2)
        with manyhands.Peer([ticket], listen=LISTEN) as one, manyhands.Peer([ticket], listen=LISTEN) as two:
            trainers = [Trainer(peer, RUN, 12) for peer in (one, two)]
            in_threads([lambda t=trainer: t.train_until(2) for trainer in trainers])
            assert all(trainer.optimizer.statistics.steps_alone == 0 for trainer in trainers)
            assert len({trainer.optimizer.state_digest() for trainer in trainers}) == 1
            with pytest.raises(ConfigError, match="the invitation is used up, it was for 2"):
                manyhands.Peer([ticket], listen=LISTEN)
