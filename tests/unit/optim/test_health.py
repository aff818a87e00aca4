"""How a peer does, and what is said of it."""

from __future__ import annotations

import logging

import pytest

from manyhands.optim.health import Health, HealthLog
from tests.simulation.test_copied_identities import Machines


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (Health(step=3, publish_failures=3), "could not be published 3 times in a row"),
        (Health(step=3, alone_s=125.0), "no other peer of the run has been seen for 125 s"),
        (Health(step=3, clock_offset_s=45.0), "is 45 s ahead of those of other peers"),
        (Health(step=3, clock_offset_s=-3600.0), "is 3600 s behind those of other peers"),
    ],
)
def test_each_health_problem_is_logged_once_until_it_comes_back(
    health: Health, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = HealthLog()
    log.tell(Health(step=3, publish_failures=2, alone_s=10.0, clock_offset_s=1.0))
    assert not caplog.records
    log.tell(health)
    log.tell(health)
    assert [said in record.message for record in caplog.records] == [True]
    log.tell(Health(step=4))
    assert len(caplog.records) == 1
    log.tell(health)
    assert len(caplog.records) == 2, "it has come back"


@pytest.mark.parametrize(("last_said_goodbye", "level"), [(True, "INFO"), (False, "WARNING")])
def test_a_peer_that_the_others_have_left_on_purpose_is_not_warned(
    last_said_goodbye: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    HealthLog().tell(Health(step=3, alone_s=125.0, publish_failures=3, last_said_goodbye=last_said_goodbye))
    assert {record.levelname for record in caplog.records if "has been seen" in record.message} == {level}
    assert {record.levelname for record in caplog.records if "published" in record.message} == {"WARNING"}


@pytest.mark.long
def test_a_wrong_clock_is_warned_of_once_by_its_peer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "manyhands.optim.health")
    machines = Machines()
    machines.start("one", 0.0)
    machines.start("two", 1.0)
    machines.start("wrong", 2.0)
    machines.world.network.hosts["wrong"].skew_s = 45.0
    machines.world.run(100.0)
    said = [record.message for record in caplog.records if "clock" in record.message]
    assert said == [line for line in said if "is 45 s ahead of those of other peers" in line]
    assert len(said) == 1, said
