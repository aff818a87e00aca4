"""The roster of the run moves with a peer's state: with each step, to newcomers, and into checkpoints."""

from __future__ import annotations

import msgspec
import pytest
import torch

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.messages import Group, Member, Position
from manyhands.averaging.roster import Roster, Standing, lineage_of, next_place
from manyhands.averaging.state.content import StateHeader
from manyhands.base.identity import PeerId
from manyhands.optim.accumulator import Contribution
from manyhands.optim.metrics import RecentSteps, alone_lineage
from manyhands.optim.run.step_rounds import Averaged
from manyhands.optim.state.check import check_of
from manyhands.optim.step.global_step import GlobalStep
from manyhands.optim.step.replica import Replica

ME, OTHER = PeerId("me"), PeerId("other")


def new_replica() -> Replica:
    return Replica(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5), None)


def step_alone(replica: Replica) -> GlobalStep:
    step = GlobalStep(replica, Contribution(torch.tensor([4.0, 2.0, 1.0]), 8, 8.0))
    step.use_own_gradient(ME, can_lead=False)
    step.advance()
    return step


def step_together(replica: Replica) -> None:
    group = Group(b"group", ME, replica.position, [Member(peer_id, [], False, 8.0) for peer_id in (ME, OTHER)])
    position, roster, seal = next_place(replica.position, replica.roster, group.manifest(b"digest"))
    outcome = Averaged(None, position.lineage, 16, roster=roster, seal=seal)
    replica.advance(torch.tensor([4.0, 2.0, 1.0]), outcome)
    assert replica.position == position


def check(replica: Replica, header: StateHeader) -> None:
    check_of(replica.manifest("run", 8, AveragingConfig(), {}))(header)


def test_each_step_leads_to_a_roster_that_the_lineage_covers() -> None:
    replica = new_replica()
    assert replica.roster == Roster()
    check(replica, replica.capture().header)
    for make, members in (
        (step_alone, {ME}),
        (step_together, {ME}),
        (step_together, {ME}),
        (step_together, {ME, OTHER}),
    ):
        make(replica)
        assert replica.roster.members == members
        assert replica.position.lineage == lineage_of(replica.seal, replica.roster)
        check(replica, replica.capture().header)
    assert replica.roster.round == replica.position.step == 4


def test_a_newcomer_and_a_checkpoint_have_the_roster() -> None:
    donor, newcomer, resumed = new_replica(), new_replica(), new_replica()
    step_alone(donor)
    step_together(donor)
    newcomer.restore(donor.capture())
    resumed.load(donor.wrapped.state_dict(), donor.place())
    for replica in (newcomer, resumed):
        assert (replica.position, replica.roster, replica.seal) == (donor.position, donor.roster, donor.seal)
        step_together(replica)
    assert newcomer.position == resumed.position
    assert newcomer.roster == resumed.roster


def test_a_state_whose_roster_is_not_that_of_its_lineage_is_refused() -> None:
    replica = new_replica()
    begun = replica.capture().header
    step_alone(replica)
    header, replace = replica.capture().header, msgspec.structs.replace
    other = Roster({OTHER: Standing(3, is_member=True)}, 1)
    for changed, why in (
        (replace(header, roster=other), "not that of its lineage"),
        (replace(header, seal=b"another"), "not that of its lineage"),
        (replace(header, position=Position(1, b"another")), "not that of its lineage"),
        (replace(header, roster=replace(other, frozen=99)), "odd counts"),
        (replace(begun, roster=other), "before the first step"),
        (replace(begun, seal=b"some"), "before the first step"),
    ):
        with pytest.raises(ValueError, match=why):
            check(replica, changed)


def test_others_can_tell_from_a_lineage_that_a_step_was_made_alone() -> None:
    replica = new_replica()
    step = step_alone(replica)
    assert replica.position.lineage == alone_lineage(step.left_from.lineage, ME, replica.roster.digest())
    steps = RecentSteps(ME)
    steps.add(step.left_from, replica.position, {ME: 8.0}, roster=replica.roster.digest())
    (made,) = steps.listed()
    assert made.is_proven_alone(ME)
    assert not made.is_proven_alone(OTHER)
