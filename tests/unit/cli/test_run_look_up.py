"""Looking up the runs of a swarm before a peer joins one."""

from __future__ import annotations

import logging

import pytest

import manyhands
from manyhands.base.address import Address
from manyhands.cli.run_look_up import Scout

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


def test_looking_a_run_up_does_not_log_that_peers_are_trusted_on_first_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logging.getLogger("manyhands")
    monkeypatch.setattr(ours, "level", logging.INFO)
    with manyhands.Peer(listen=LISTEN) as first:
        place = Address.parse(first.addresses[0]).host_port
        with Scout([place]) as scout:
            assert scout.runs() == []
        with pytest.raises(manyhands.JoinFailed):
            Scout(["127.0.0.1:1"])
        assert ours.level == logging.INFO
        assert "trusted on first use" not in caplog.text
        with manyhands.Peer([place], client_mode=True):
            assert "trusted on first use" in caplog.text
