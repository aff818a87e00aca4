"""A run by invitation, over real sockets: members train; nobody else gets into rounds, the state or the records."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import manyhands
from manyhands.access import AccessConfig, Charter, Invitation, Limits, SignedCharter
from manyhands.access.invitation import SignedInvitation
from manyhands.averaging.messages import JOIN, JoinRequest, Member, Position
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.round.limits import MemberLimits
from manyhands.averaging.rounds import RoundRunner
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.base.address import parse_addresses
from manyhands.base.errors import ConfigError, PeerError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.ticket import Ticket
from manyhands.cli.run_look_up import Scout, look_up
from manyhands.cli.run_to_follow import wait_for_trainers
from manyhands.optim.state.catching_up import download_state
from tests.network import identity_of
from tests.trainers import LISTEN, Trainer, in_threads, kill, mortal, new_model
from tests.waiting import wait_until

RUN = "invited"
OWNER = identity_of(91)
COORDINATOR = identity_of(92)
FAST_LOOKS = AccessConfig(look_period_s=0.2)


class Run:
    """A run with one coordinator."""

    def __init__(self, folder: Path, access: Any = "invite", **decided: Any) -> None:
        charter = Charter(RUN, OWNER.peer_id, access, [COORDINATOR.peer_id], created_at=1.0, **decided)
        self.charter = SignedCharter.sign(OWNER, charter)
        self.path = folder / "charter"
        self.charter.save(self.path)
        self.state_dir = folder / "coordinator"
        with mortal():
            self.first = manyhands.Peer(listen=LISTEN, identity=COORDINATOR, state_dir=self.state_dir)
        assert self.first.coordinate(self.path)

    def ticket(self, uses: int = 1, *, role: Any = "trainer") -> str:
        expires_at = time.time() + 60.0
        invitation = Invitation(
            self.charter.digest, secrets.token_bytes(12), uses, expires_at, COORDINATOR.peer_id, role
        )
        token = SignedInvitation.sign(COORDINATOR, invitation).signed.encoded()
        return str(Ticket(RUN, parse_addresses(self.first.addresses), b"", self.charter.digest, token))

    def ban(self, peer_id: PeerId) -> None:
        from manyhands.access.ledger import Ledger

        Ledger(self.state_dir).ban(peer_id, time.time())


@contextmanager
def new_run(folder: Path, access: Any = "invite", **decided: Any) -> Iterator[Run]:
    run = Run(folder, access, **decided)
    with run.first:
        yield run


def member(run: Run, ticket: str) -> manyhands.Peer:
    return manyhands.Peer([ticket], listen=LISTEN, access_config=FAST_LOOKS)


async def join_a_round(peer: manyhands.Peer, leader: Trainer) -> None:
    own = Member(peer.peer_id, [], False, 4.0, 0)
    request = JoinRequest(leader.optimizer.manifest.fingerprint(), Position(2, b""), own, 5.0)
    await RunEndpoint(peer.endpoint, RUN).call(leader.peer.peer_id, JOIN, request, 5.0)


def test_invited_peers_train_together_and_no_more_of_them_than_the_invitation_says(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        ticket = run.ticket(uses=2)
        with member(run, ticket) as one, member(run, ticket) as two:
            trainers = [Trainer(peer, RUN, 12) for peer in (one, two)]
            in_threads([lambda t=trainer: t.train_until(2) for trainer in trainers])
            assert all(trainer.optimizer.statistics.steps_alone == 0 for trainer in trainers)
            assert len({trainer.optimizer.state_digest() for trainer in trainers}) == 1
            with pytest.raises(
                ConfigError, match="the invitation was for 2 peers and is used up; ask for another ticket"
            ):
                member(run, ticket)


def test_an_uninvited_peer_gets_into_no_round_no_state_and_no_count(tmp_path: Path) -> None:
    with new_run(tmp_path) as run, member(run, run.ticket()) as one:
        trainer = Trainer(one, RUN, 8)
        trainer.train_until(2)
        with manyhands.Peer(run.first.addresses, listen=LISTEN) as stranger:
            reached = stranger.run(stranger.endpoint.connect(one.endpoint.addresses[0]), 5.0, "dialling")
            assert reached == one.peer_id
            with pytest.raises(Refused, match=r"is by invitation, and peer .* has no valid lease here"):
                stranger.run(join_a_round(stranger, trainer), 5.0, "joining a round")
            with pytest.raises(ConfigError, match="is by invitation"):
                Trainer(stranger, RUN, 8)

            async def publish() -> None:
                claimed = PeerRecord(
                    Position(9, b"x"), False, [], 60.0, samples=10**6, samples_per_second=1e6, lineage_samples=10**9
                )
                record = msgspec.to_builtins(claimed, builtin_types=(bytes,))
                assert await stranger.dht.store(peer_key(RUN, PROGRESS_KIND), record, 60.0, subkey=stranger.peer_id)
                assert stranger.peer_id in await stranger.dht.get(peer_key(RUN, PROGRESS_KIND))

            stranger.run(publish(), 10.0, "publishing progress")
            assert stranger.peer_id not in one.get(peer_key(RUN, PROGRESS_KIND))
            trainer.train_until(4)
            assert trainer.optimizer.statistics.states_loaded == 0
            assert trainer.optimizer.statistics.steps_alone == 4, "the samples that the stranger claims do not count"


def test_a_ticket_for_another_run_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with new_run(tmp_path) as run, member(run, run.ticket()) as one:
        error = r"the ticket is for run 'invited', and run_id is 'prog'; use run_id='invited'"
        with pytest.raises(ConfigError, match=error):
            Trainer(one, "prog", 8)
        with pytest.raises(ConfigError, match=error):
            manyhands.Averager([torch.zeros(3)], peer=one, run_id="prog")
        with pytest.raises(ConfigError, match=error):
            manyhands.load_state_from_peers(one, "prog", into=new_model())


def test_a_program_with_an_address_alone_is_told_to_ask_for_a_ticket(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        for place in (run.first.addresses[0], f"127.0.0.1:{run.first.endpoint.addresses[0].port}"):
            with manyhands.Peer([place], listen=LISTEN) as stranger:
                error = "run 'invited' is by invitation; ask its owner for a ticket"
                with pytest.raises(ConfigError, match=error):
                    Trainer(stranger, RUN, 8)
                with pytest.raises(ConfigError, match=error):
                    manyhands.Averager([torch.zeros(3)], peer=stranger, run_id=RUN)
                with pytest.raises(ConfigError, match=error):
                    manyhands.load_state_from_peers(stranger, RUN, into=new_model())
                Trainer(stranger, "another", 8).train_until(1)  # a peer of an open run may know the same coordinator


def test_an_observer_has_the_state_and_is_in_no_round(tmp_path: Path) -> None:
    with new_run(tmp_path) as run, member(run, run.ticket()) as one:
        trainer = Trainer(one, RUN, 8)
        trainer.train_until(1)
        with member(run, run.ticket(role="observer")) as two:
            downloading = download_state(
                two.endpoint, trainer.optimizer.manifest, [one.peer_id], Position(1, b""), is_onlooker=True
            )
            assert two.run(downloading, 10.0, "downloading").header.position.step == 1
            with pytest.raises(Refused, match="may only look at run 'invited': its role is observer"):
                two.run(join_a_round(two, trainer), 5.0, "joining a round")


def test_a_banned_peer_is_out_of_the_next_round(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        ticket = run.ticket(uses=3)
        with member(run, ticket) as one, member(run, ticket) as two, member(run, ticket) as bad:
            trainers = [Trainer(peer, RUN, 12) for peer in (one, two, bad)]
            in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])
            run.ban(bad.peer_id)
            for peer in (one, two, bad):
                wait_until(lambda p=peer: p.presence.members[RUN].is_banned(bad.peer_id), "the ban is known")
            in_threads([lambda t=trainer: t.train_until(3) for trainer in trainers[:2]])
            assert bad.peer_id not in one.get(peer_key(RUN, PROGRESS_KIND))
            assert trainers[0].optimizer.last_round is not None
            assert sorted(trainers[0].optimizer.last_round.members) == sorted([one.peer_id, two.peer_id])
            with pytest.raises(ConfigError, match=r"this peer was banned from run 'invited' by .*; ask its owner"):
                trainers[2].train_until(3)
            with pytest.raises(ConfigError, match="this peer was banned from run 'invited'"):
                manyhands.Peer([ticket], listen=LISTEN, identity=bad.identity)


def test_leased_peers_go_on_when_the_coordinator_is_gone_and_one_of_them_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with new_run(tmp_path) as run:
        ticket, state_dir = run.ticket(uses=2), tmp_path / "two"
        with member(run, ticket) as one:
            with manyhands.Peer([ticket], listen=LISTEN, state_dir=state_dir) as two:
                trainers = [Trainer(peer, RUN, 12) for peer in (one, two)]
                in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])
                kill(run.first)
                in_threads([lambda t=trainer: t.train_until(2) for trainer in trainers])
            with caplog.at_level(logging.WARNING), manyhands.Peer([ticket], listen=LISTEN, state_dir=state_dir) as two:
                trainers[1] = Trainer(two, RUN, 12)
                assert trainers[1].optimizer.global_step >= 2, "it has the state of the run"
                in_threads([lambda t=trainer: t.train_until(4) for trainer in trainers])
            with pytest.raises((Unavailable, PeerError)):
                manyhands.Peer([*one.addresses, ticket], listen=LISTEN)


def test_an_open_run_with_a_charter_needs_no_invitation_and_keeps_banned_peers_out(tmp_path: Path) -> None:
    with new_run(tmp_path, "open") as run:
        ticket = str(Ticket(RUN, parse_addresses(run.first.addresses), b"", run.charter.digest))
        with member(run, ticket) as one, manyhands.Peer(run.first.addresses, listen=LISTEN) as two:
            trainers = [Trainer(peer, RUN, 12) for peer in (one, two)]
            in_threads([lambda t=trainer: t.train_until(1) for trainer in trainers])
            assert all(trainer.optimizer.statistics.steps_alone == 0 for trainer in trainers)
            run.ban(two.peer_id)
            wait_until(lambda: one.presence.members[RUN].is_banned(two.peer_id), "the ban is known")
            assert two.peer_id not in one.get(peer_key(RUN, PROGRESS_KIND))


def test_a_program_with_an_address_of_a_coordinator_knows_the_limits_and_bans_of_an_open_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[MemberLimits | None] = []  # of the rounds of each object that averages
    init = RoundRunner.__init__

    def note(runner: RoundRunner, *arguments: Any, limits: MemberLimits | None = None, **options: Any) -> None:
        made.append(limits)
        init(runner, *arguments, limits=limits, **options)

    monkeypatch.setattr(RoundRunner, "__init__", note)
    limits = Limits(max_weight_ratio=5.0)
    with new_run(tmp_path, "open", limits=limits) as run:
        for place in (run.first.addresses[0], f"127.0.0.1:{run.first.endpoint.addresses[0].port}"):
            with manyhands.Peer([place], listen=LISTEN, access_config=FAST_LOOKS) as one:
                trainer = Trainer(one, RUN, 8)
                assert one.presence.members[RUN].charter.digest == run.charter.digest
                assert made[-1] is not None
                assert made[-1].max_weight_ratio == 5.0
                manyhands.Averager([torch.zeros(3)], peer=one, run_id="another")  # one charter keeps nobody from others
                run.ban(one.peer_id)
                wait_until(lambda p=one: p.presence.members[RUN].is_banned(p.peer_id), "the ban is known")
                with pytest.raises(ConfigError, match=r"this peer was banned from run 'invited' by .*; ask its owner"):
                    trainer.train_until(1)


def test_a_charter_that_another_peer_publishes_is_not_followed(tmp_path: Path) -> None:
    with (
        new_run(tmp_path, "open") as run,
        manyhands.Peer(run.first.addresses, listen=LISTEN) as two,
        manyhands.Peer(two.addresses, listen=LISTEN) as three,
    ):
        Trainer(three, RUN, 8)
        assert not three.presence.members


def test_only_the_settings_that_the_owner_signed_are_those_of_the_run(tmp_path: Path) -> None:
    with manyhands.Peer(listen=LISTEN) as trial:
        fingerprint = Trainer(trial, RUN, 8).optimizer.manifest.fingerprint()
    with new_run(tmp_path, "open", manifest=fingerprint) as run:
        coordinator = run.first.addresses
        with manyhands.Peer(coordinator, listen=LISTEN) as other:
            error = f"fit run 'invited': its owner signed other settings (fingerprint {fingerprint.hex()[:16]}, here "
            with pytest.raises(ConfigError, match=re.escape(error)):
                Trainer(other, RUN, 16)
        with manyhands.Peer(coordinator, listen=LISTEN) as one, manyhands.Peer(coordinator, listen=LISTEN) as two:
            first = Trainer(one, RUN, 8)
            with pytest.raises(ConfigError, match="target_batch_size is 16 here, 8 in the run"):
                Trainer(two, RUN, 16)
            first.optimizer.close()


def test_false_manifests_do_not_mislead_peers_that_know_what_the_owner_signed(tmp_path: Path) -> None:
    with manyhands.Peer(listen=LISTEN) as trial:
        fingerprint = Trainer(trial, RUN, 8).optimizer.manifest.fingerprint()
    with (
        new_run(tmp_path, "open", manifest=fingerprint) as run,
        manyhands.Peer(run.first.addresses, listen=LISTEN) as by,
        manyhands.Peer(by.addresses, listen=LISTEN) as liar,
        manyhands.Peer(by.addresses, listen=LISTEN) as second,
    ):
        liars = [Trainer(peer, RUN, 16) for peer in (liar, second)]
        honest = Trainer(by, RUN, 8)
        for run_id in (RUN, None):
            with Scout(run.first.addresses) as scout:
                manifest = scout.choose(run_id, is_trained=True).manifest
                assert manifest == honest.optimizer.manifest != liars[0].optimizer.manifest
            with manyhands.Peer(run.first.addresses, client_mode=True) as evaluator:
                assert wait_for_trainers(evaluator, run_id).manifest == honest.optimizer.manifest
                assert look_up(evaluator, RUN).manifest == honest.optimizer.manifest
