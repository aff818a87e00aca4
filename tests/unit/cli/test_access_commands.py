"""``manyhands run create``, ``invite``, ``ban`` and ``members``: what they say, and what they say no to."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import pytest

import manyhands
from manyhands.access import Charter, Invitation, Limits, SignedCharter
from manyhands.access.charter import Access
from manyhands.access.invitation import SignedInvitation
from manyhands.access.ledger import Ledger
from manyhands.base.address import Address, parse_addresses
from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.base.identity import Identity
from manyhands.base.ticket import Ticket
from manyhands.cli.charter_options import checked_charter, run_id_of
from manyhands.cli.main import EXIT_OK, EXIT_USAGE, run
from manyhands.cli.options import NetworkOptions, PeerOptions
from manyhands.cli.run_look_up import Scout
from manyhands.cli.run_to_follow import wait_for_trainers
from manyhands.cli.train_command import look_for
from manyhands.state_dir import StateDir
from tests.network import identity_of
from tests.trainers import LISTEN, Trainer

PEER = identity_of(9).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def created(*arguments: str) -> SignedCharter:
    assert run(["run", "create", "--run-id", "ours", *arguments]) == EXIT_OK
    return SignedCharter.load("ours.charter")


def new_coordinator(folder: Path) -> Identity:
    """A state dir, as that of a first peer."""
    identity = Identity.load_or_create(folder / "state" / "identity.pem")
    ledger = Ledger(folder / "state")
    ledger.keep_charter(created("--coordinator", identity.peer_id))
    ledger.note_addresses([ADDRESS])
    return identity


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(arguments) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1, said.err
    return said.err


def invited_by(charter: SignedCharter, capsys: pytest.CaptureFixture[str]) -> tuple[Ticket, SignedInvitation]:
    word = next(word for word in capsys.readouterr().out.split() if word.startswith("mh1"))
    ticket = Ticket.parse(word)
    return ticket, SignedInvitation.from_bytes(ticket.token, charter, "test")


def test_an_owner_key_is_private_and_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    charter = created()
    key = folder / "ours.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    assert Identity.load_or_create(key).peer_id == charter.charter.owner
    assert charter.charter.access == "invite"
    assert "--charter ours.charter --identity ours.key" in capsys.readouterr().out
    assert "ours.charter exists, and is not overwritten" in complaint(["run", "create", "--run-id", "ours"], capsys)
    assert run(["run", "create", "--run-id", "ours", "--charter", "second.charter"]) == EXIT_OK
    assert key.read_bytes() == before
    assert SignedCharter.load("second.charter").charter.owner == charter.charter.owner


def test_a_coordinator_and_the_owner_make_invitations_with_the_given_limits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = new_coordinator(folder)
    charter = SignedCharter.load("ours.charter")
    assert run(["invite", "--state-dir", "state", "--uses", "5", "--expires", "7d", "--for", PEER]) == EXIT_OK
    ticket, signed = invited_by(charter, capsys)
    assert (ticket.run_id, ticket.charter, list(map(str, ticket.addresses))) == ("ours", charter.digest, [ADDRESS])
    invitation = signed.invitation
    assert (invitation.uses, invitation.peer_id, invitation.coordinator) == (5, PEER, coordinator.peer_id)
    assert 6.9 < (invitation.expires_at - time.time()) / 86400 < 7.1
    by_owner = ["--key", "ours.key", "--charter", "ours.charter", "--initial-peers", "203.0.113.7:31337"]
    assert run(["invite", *by_owner, "--role", "observer", "--expires", "12h"]) == EXIT_OK
    _, signed = invited_by(charter, capsys)
    assert signed.signed.signer == charter.charter.owner
    assert 11.9 < (signed.invitation.expires_at - time.time()) / 3600 < 12.1
    assert signed.invitation.coordinator == coordinator.peer_id, "it counts the uses while the owner is offline"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["invite"], "no run is named; give the --state-dir of a coordinator on this machine"),
        (["invite", "--charter", "ours.charter"], "needs its owner key (--key FILE), or the --state-dir of one"),
        (["invite", "--charter", "ours.charter", "--key", "lost.key"], "A lost owner key cannot be made again"),
        (["invite", "--charter", "ours.charter", "--key", "other.key"], "is neither the owner nor a coordinator"),
        (["invite", "--charter", "ours.charter", "--key", "ours.key"], "needs the address of a peer of the run"),
        (["invite", "--charter", "ours.key", "--key", "ours.key"], "ours.key is not a charter, or was changed"),
        (["invite", "--charter", "none", "--key", "ours.key"], "charter none: No such file"),
        (["invite", "--state-dir", "none"], "--state-dir none is not a folder"),
        (["invite", "--state-dir", "theirs"], "theirs/identity.pem does not exist: the coordinator was started"),
        (["invite", "--state-dir", "state", "--uses", "0"], 'Invalid value "0" for --uses. Must be >= 1'),
        (["invite", "--state-dir", "state", "--expires", "soon"], "--expires is 'soon'; it must be a number with s"),
        (["invite", "--state-dir", "state", "--for", "me"], "'me' is not a peer id"),
        (["ban", "me", "--state-dir", "state"], "'me' is not a peer id"),
        (["ban", PEER], "no run is named; give"),
        (["ban", PEER, "--key", "ours.key", "--charter", "ours.charter"], "name a peer of the run: --initial-peers"),
        (["members", "--charter", "ours.charter", "--key", "lost.key"], "key lost.key does not exist"),
        (["run", "create", "--run-id", "a.b"], "run_id 'a.b' has a '.'"),
        (["run", "create", "--run-id", "r", "--coordinator", "me"], "'me' is not a peer id"),
        (["run", "create", "--run-id", "r", "--key", "lost.key"], "and a run with a new key has another owner"),
        (
            ["run", "create", "--run-id", "r", "--max-weight-ratio", "0.5"],
            "max_weight_ratio is 0.5; it must be finite and at least 1, for example 10",
        ),
        (
            ["run", "create", "--run-id", "r", "--max-weight-share", "0"],
            "max_weight_share is 0; it must be above 0 and at most 1, for example 0.25",
        ),
        (["run", "create", "--run-id", "r", "--manifest-of", "127.0.0.1:1"], "connection refused"),
        (["first-peer", "--charter", "ours.charter"], "in its state dir; name one: --state-dir DIR"),
        (["first-peer", "--charter", "ours.key", "--state-dir", "state"], "ours.key is not a charter"),
        (["monitor", "--charter", "ours.charter", "--state-dir", "s", "--run-id", "x"], "charter is of run 'ours'"),
    ],
)  # fmt: skip
def test_access_commands_say_in_one_line_what_to_do(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new_coordinator(folder)
    Identity.load_or_create(folder / "other.key")
    Ledger(folder / "theirs").keep_charter(SignedCharter.load("ours.charter"))
    assert message in complaint(arguments, capsys)
    assert not (folder / "lost.key").exists()
    assert not (folder / "r.charter").exists()
    assert not (folder / "r.key").exists()


def test_a_charter_takes_limits_and_the_settings_of_a_running_trainer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--max-weight-ratio", "20", "--max-weight-share", "0.5"]
    with manyhands.Peer(listen=LISTEN) as first, manyhands.Peer(first.addresses, listen=LISTEN) as trial:
        arguments = ["run", "create", "--run-id", "ours"]
        assert "start a trainer with your settings first: manyhands train --run-id ours" in complaint(
            [*arguments, "--manifest-of", first.addresses[0]], capsys
        )
        trainer = Trainer(trial, "ours", 8)
        assert "does not train in run 'ours'; start a trainer" in complaint(
            [*arguments, "--manifest-of", first.addresses[0]], capsys
        )
        charter = created("--manifest-of", trial.addresses[0], *limits).charter
        fingerprint = trainer.optimizer.manifest.fingerprint()
    assert charter.manifest == fingerprint
    assert charter.limits == Limits(20.0, 0.5)
    assert f"with fingerprint {fingerprint.hex()}" in capsys.readouterr().out


def test_an_open_run_needs_no_invitation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    created("--access", "open")
    arguments = ["invite", "--charter", "ours.charter", "--key", "ours.key"]
    assert "is open: everybody can join it" in complaint(arguments, capsys)


def test_ban_and_members_work_on_the_machine_of_a_coordinator(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = new_coordinator(folder)
    assert run(["ban", PEER, "--state-dir", "state"]) == EXIT_OK
    assert "the ban takes effect when it is started" in capsys.readouterr().out
    running = StateDir("state")
    assert run(["ban", identity_of(8).peer_id, "--state-dir", "state"]) == EXIT_OK
    running.close()
    assert capsys.readouterr().out.endswith(" is banned from run ours.\n")
    capsys.readouterr()
    assert run(["members", "--state-dir", "state"]) == EXIT_OK
    assert f"{PEER}  banned" in capsys.readouterr().out
    arguments = ["ban", coordinator.peer_id, "--state-dir", "state"]
    assert "those cannot be banned" in complaint(arguments, capsys)


def test_a_coordinator_that_is_started_again_needs_no_charter_option(folder: Path) -> None:
    assert checked_charter(None, PeerOptions()) is None
    assert checked_charter(None, PeerOptions(state_dir=folder / "new")) is None
    new_coordinator(folder)
    charter = checked_charter(None, PeerOptions(state_dir=folder / "state"))
    assert charter is not None
    assert charter.digest == SignedCharter.load("ours.charter").digest


def test_a_newcomer_without_a_ticket_is_told_to_ask_for_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = new_coordinator(folder)
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"], identity=identity) as first:
        first.coordinate("ours.charter")
        address = first.addresses[0]
        host_port = f"127.0.0.1:{first.endpoint.addresses[0].port}"
        for place in (address, host_port):
            said = complaint(["train", "--run-id", "ours", "--initial-peers", place], capsys)
            assert (
                "run 'ours' is by invitation; ask its owner for a ticket, and give that instead of the address" in said
            )
            options = NetworkOptions(initial_peers=(place,))
            with pytest.raises(ConfigError, match="run 'ours' is by invitation; ask its owner for a ticket"):
                look_for(options, None, start_new=False)
        ticket = str(Ticket("other", [Address.parse(address)], b"", bytes(32)))
        assert "the ticket is for run 'other'" in complaint(
            ["train", "--run-id", "ours", "--initial-peers", ticket], capsys
        )


@pytest.mark.parametrize(
    ("addresses", "where"),
    [("127.0.0.1:1", "this machine"), ("127.0.0.1:1 10.0.0.7:1", "this network"), ("10.0.0.7:1 203.0.114.7:1", "")],
)
def test_an_invitation_says_how_to_begin_the_run_and_from_where_its_addresses_can_be_dialled(
    folder: Path, capsys: pytest.CaptureFixture[str], addresses: str, where: str
) -> None:
    new_coordinator(folder)
    capsys.readouterr()
    assert run(["invite", "--state-dir", "state", "--initial-peers", *addresses.split()]) == EXIT_OK
    said = capsys.readouterr()
    assert "The first trainer begins the run with: manyhands train --initial-peers TICKET" in said.out
    assert (f"can be dialled from {where} only" in said.err) if where else not said.err
    assert run(["invite", "--state-dir", "state", "--role", "observer"]) == EXIT_OK
    assert "An observer measures the run with: manyhands evaluate --initial-peers TICKET" in capsys.readouterr().out


def test_joining_a_run_that_nobody_trains_yet_says_how_to_begin_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = new_coordinator(folder)
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"], identity=identity) as first:
        first.coordinate("ours.charter")
        charter = SignedCharter.load("ours.charter")
        ticket = str(Ticket("ours", parse_addresses(first.addresses), b"", charter.digest))
        said = complaint(["join", ticket], capsys)
    assert "nobody trains in run 'ours' yet; to begin it with your model and settings: manyhands train" in said
    assert said.strip().endswith("--initial-peers TICKET")


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "367d", "7 d"])
def test_malformed_lifetimes_of_invitations_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "for example 7d" in complaint(["invite", "--state-dir", "state", "--expires", text], capsys)


def signed_by_owner(number: int, access: Access, path: Path) -> Path:
    owner = identity_of(number)
    SignedCharter.sign(owner, Charter("ours", owner.peer_id, access)).save(path)
    return path


def test_a_run_with_two_charters_needs_a_ticket(folder: Path) -> None:
    listen = ["/ip4/127.0.0.1/tcp/0"]
    with (
        manyhands.Peer(listen=listen, identity=identity_of(21)) as one,
        manyhands.Peer(one.addresses, listen=listen, identity=identity_of(22)) as two,
    ):
        one.coordinate(signed_by_owner(21, "open", folder / "one"))
        two.coordinate(signed_by_owner(22, "invite", folder / "two"))
        with (
            Scout([*one.addresses, *two.addresses]) as scout,
            pytest.raises(ConfigError, match="have 2 different charters; ask its owner for a ticket, and use it"),
        ):
            scout.find_charter("ours")
        digest = SignedCharter.load(folder / "one").digest
        with Scout(one.addresses) as scout:
            assert scout.find_charter("ours") == digest, "another peer cannot put its charter on the run"
        with Scout([str(Ticket("ours", parse_addresses(two.addresses), b"", digest))]) as scout:
            assert scout.find_charter("ours") == digest
        with Scout([str(Ticket("ours", parse_addresses(two.addresses), b""))]) as scout:
            assert scout.find_charter("ours") == b"", "a ticket without a charter is of a run without one"


def test_evaluators_and_monitors_without_a_ticket_are_told_to_ask_for_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = new_coordinator(folder)
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"], identity=identity) as first:
        first.coordinate("ours.charter")
        address = first.addresses[0]
        with manyhands.Peer([address], listen=["/ip4/127.0.0.1/tcp/0"]) as peer:
            for name in ("ours", None):
                with pytest.raises(ConfigError, match="run 'ours' is by invitation; ask its owner for a ticket"):
                    wait_for_trainers(peer, name)
        for command in (["monitor"], ["monitor", "--run-id", "ours"]):
            assert run([*command, "--initial-peers", address]) == EXIT_USAGE
            assert "run 'ours' is by invitation; ask its owner for a ticket" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(90.0, "90 s ahead of"), pytest.param(-3600.0, "3600 s behind", marks=pytest.mark.long)]
)
def test_a_wrong_clock_is_told_where_no_run_seems_to_be_there(
    ahead_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scouting: list[manyhands.Peer] = []

    def start_peer(*args: Any, **options: Any) -> manyhands.Peer:
        scouting.append(manyhands.Peer(*args, **options))
        return scouting[-1]

    monkeypatch.setattr("manyhands.cli.run_look_up.Peer", start_peer)
    with manyhands.Peer(listen=["/ip4/127.0.0.1/tcp/0"]) as first, Scout(first.addresses) as scout:
        with pytest.raises(RunNotFound):
            scout.choose("ours")
        scouting[0].presence.wall_clock = lambda: time.time() + ahead_s
        for name in ("ours", None):
            with pytest.raises(
                ConfigError, match=f"the clock of this machine is about {words} the clocks of the other peers"
            ):
                scout.choose(name)


def test_a_peer_that_joins_an_open_run_by_an_address_knows_its_charter(folder: Path) -> None:
    listen = ("/ip4/127.0.0.1/tcp/0",)
    with manyhands.Peer(listen=listen, identity=identity_of(21)) as first:
        first.coordinate(signed_by_owner(21, "open", folder / "one"))
        given = NetworkOptions(initial_peers=(f"127.0.0.1:{first.endpoint.addresses[0].port}",), listen=listen)
        for name, is_new in (("ours", True), (None, False)):
            _, network = look_for(given, name, start_new=is_new)
            assert run_id_of(network, None) == "ours"
            with network.connect() as peer:
                assert peer.presence.members["ours"].charter.charter.owner == first.peer_id
        assert look_for(NetworkOptions(initial_peers=tuple(first.addresses)), "other", start_new=True)[1].initial_peers


def test_an_invitation_is_revoked_by_its_id_or_its_ticket(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_coordinator(folder)
    for number in range(2):
        assert run(["invite", "--state-dir", "state", "--uses", "5"]) == EXIT_OK
        said = capsys.readouterr().out
        ticket = next(word for word in said.split() if word.startswith("mh1"))
        invitation = SignedInvitation.from_bytes(Ticket.parse(ticket).token, SignedCharter.load("ours.charter"), "test")
        own_id = invitation.invitation.id.hex()
        assert f"has the id {own_id}" in said
        named = ticket if number else own_id
        assert run(["run", "revoke-invitation", named, "--state-dir", "state"]) == EXIT_OK
        assert capsys.readouterr().out == f"Invitation {own_id} is revoked; 0 peers had used it.\n"
        assert own_id in Ledger(folder / "state").invitations.revoked


def test_an_unknown_invitation_is_not_revoked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_coordinator(folder)
    arguments = ["run", "revoke-invitation", "00" * 12]
    assert "was neither made nor used here" in complaint([*arguments, "--state-dir", "state"], capsys)
    by_owner = ["--key", "ours.key", "--charter", "ours.charter"]
    assert "where its uses are counted" in complaint([*arguments, *by_owner], capsys)
    ticket = str(Ticket("ours", parse_addresses([ADDRESS]), b"", bytes(32), b"no invitation"))
    arguments = ["run", "revoke-invitation", ticket, "--state-dir", "state"]
    assert "the ticket has no invitation to run 'ours'" in complaint(arguments, capsys)


def test_a_ban_says_whether_the_peer_can_return_by_its_ticket(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = new_coordinator(folder)
    charter = SignedCharter.load("ours.charter")
    ledger = Ledger(folder / "state")
    expires_at = time.time() + 3600.0
    peers = [identity_of(number).peer_id for number in (20, 21, 22)]
    several, single = b"for several.", b"for one only"
    for name, uses, peer in ((several, 3, peers[0]), (several, 3, peers[1]), (single, 1, peers[2])):
        ledger.use(Invitation(charter.digest, name, uses, expires_at, coordinator.peer_id), peer)
    ledger.to_save(time.time())()
    capsys.readouterr()
    assert run(["ban", peers[2], "--state-dir", "state"]) == EXIT_OK
    assert "was for one peer, and is used up" in capsys.readouterr().out
    assert run(["ban", peers[0], "--state-dir", "state"]) == EXIT_OK
    said = capsys.readouterr().out
    assert "(1 others have used it), so it may return with another id" in said
    assert f"manyhands run revoke-invitation {several.hex()}" in said
    assert peers[1] in said
    assert run(["run", "revoke-invitation", several.hex(), "--state-dir", "state"]) == EXIT_OK
    assert f"{peers[0]}  banned\n  {peers[1]}\n" in capsys.readouterr().out
    assert run(["ban", peers[1], "--state-dir", "state"]) == EXIT_OK
    assert "another id" not in capsys.readouterr().out, "its ticket is revoked"
    assert run(["members", "--state-dir", "state"]) == EXIT_OK
    assert f"{peers[0]}  banned, by invitation {several.hex()}" in capsys.readouterr().out
