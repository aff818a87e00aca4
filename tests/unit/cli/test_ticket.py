"""The ticket that commands print."""

from __future__ import annotations

import pytest

import manyhands
from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.base.ticket import Ticket
from manyhands.cli.run_look_up import Scout
from manyhands.cli.ticket_command import print_ticket, ticket


def test_a_ticket_for_this_machine_alone_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for addresses, is_local in ((["127.0.0.1:1", "[::1]:1"], True), (["127.0.0.1:1", "203.0.113.7:1"], False)):
        print_ticket("r", addresses)
        shown = capsys.readouterr().out
        assert ("On this machine only: no other one can dial 127.0.0.1:1." in shown) == is_local
        assert ("▄" in shown) != is_local, "a QR code is for other machines"


def test_choosing_a_run_where_there_is_none_says_how_to_begin_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.cli.run_look_up.PATIENCE_S", 0.0)
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as first, Scout(first.addresses) as scout:
        begin = f"manyhands train --run-id NAME --start-new --initial-peers {first.addresses[0]}$"
        with pytest.raises(RunNotFound, match=begin):
            scout.choose(None)


def test_a_ticket_in_place_of_an_address_is_answered_with_what_to_do() -> None:
    pasted = str(Ticket("r", [Address.parse("127.0.0.1:9")]))
    with pytest.raises(ConfigError, match=r"a ticket already: others join with manyhands join TICKET\. .* HOST:PORT"):
        ticket((pasted,))
