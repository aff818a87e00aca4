"""The findings and advice of the doctor, for the person who fixes the problem."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from typing import NamedTuple

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, DialReason, ManyhandsError, Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.text import counted
from manyhands.doctor.checks import Finding
from manyhands.optim.run.run_records import Run, listed
from manyhands.reach.messages import NOT_ALLOWED, DialOutcome, ExamineResponse
from manyhands.rpc.frames import readable
from manyhands.rpc.outside import Router
from manyhands.rpc.ways import Way
from manyhands.transport.certificate import ALPN
from manyhands.version import __version__


def _place(address: Address) -> str:
    return f"{address.host} port {address.port}"


def ip_address(text: str) -> str:
    """Return the IP address that another peer sent; empty if it is invalid."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def _said(error: ManyhandsError) -> str:
    """Format an error in one line."""
    return " ".join(str(error).split())


def _failed(error: ManyhandsError, detail: str, advice: str) -> Finding:
    """The finding of an error, with its entry in the documentation."""
    return Finding(False, detail, f"{advice}; see {error.entry}")


def not_tried(because: str) -> Finding:
    return Finding(None, f"not tried: {because}")


# the steps of one address


def name_found(address: Address, hosts: Sequence[str]) -> Finding:
    if address.protocol.startswith("ip"):
        return Finding(None, "an IP address: there is no name to look up")
    return Finding(True, f"{address.host} is {', '.join(hosts)}")


def name_not_found(address: Address, failure: DialFailed) -> Finding:
    return Finding(
        False,
        f"the name {address.host} does not resolve" + (f" ({failure.detail})" if failure.detail else ""),
        "check that it is spelt correctly, and that this machine can resolve other names; if not, its name server is "
        "broken, and an IP address in place of the name works",
    )


def connected(address: Address, seconds: float) -> Finding:
    return Finding(True, f"{_place(address)} accepts connections ({1000 * seconds:.0f} ms)")


def not_connected(address: Address, failure: DialFailed) -> Finding:
    if failure.reason is DialReason.REFUSED:
        return Finding(
            False,
            f"connection refused: nothing listens on {_place(address)}",
            "is the peer running there, and is that its port? It prints its addresses when it starts",
        )
    if failure.reason is DialReason.TIMED_OUT:
        return Finding(
            False,
            f"no answer from {_place(address)}",
            f"the machine is down, its address has changed, or a firewall drops the packets: let TCP port "
            f"{address.port} in there, and if it is behind a router, have the router forward the port",
        )
    advice = "check that this machine is online, and that no VPN or firewall on it blocks the connection"
    if address.protocol.endswith("6") or ":" in address.host:
        advice = "this machine may have no IPv6: give an IPv4 address of the peer"
    return Finding(False, f"no route to {_place(address)} ({failure.detail or failure.reason.value})", advice)


def tls_done() -> Finding:
    return Finding(True, "it answers in TLS 1.3, with the certificate of a peer")


def tls_failed(address: Address, failure: DialFailed) -> Finding:
    if failure.reason is DialReason.TIMED_OUT:
        return Finding(
            False,
            f"{_place(address)} accepts connections, but does not answer the TLS handshake",
            "the peer hangs, or something in between (a proxy, a tunnel whose other end is gone) took the connection: "
            "look at the peer's machine and at the tunnel",
        )
    return Finding(
        False,
        f"something answers on {_place(address)}, but it is not a manyhands peer ({failure.detail})",
        "another program has that port, a web server (HTTP) for example: compare the port with what the peer printed "
        "when it started",
    )


def other_version() -> Finding:
    return Finding(
        False,
        f"a manyhands peer, but not of protocol version {ALPN}",
        f"install the same version of manyhands at both ends; here it is {__version__}",
    )


def identified(address: Address, found: PeerId) -> Finding:
    if address.peer_id is None:
        return Finding(
            None,
            f"the address names no peer id; {found} answers",
            f"to be sure that it is always this peer, write {address.with_peer(found)}",
        )
    if found == address.peer_id:
        return Finding(True, f"it is {found}, as the address says")
    return Finding(
        False,
        f"the peer there is {found} and not {address.peer_id}",
        "its identity file was replaced or not given (--identity), or the address is old: if you know that this is the "
        f"right peer, use {address.with_peer(found)}",
    )


def itself() -> Finding:
    return Finding(
        None,
        "the peer there has the identity that the doctor was started with, so it is this peer itself",
        "to check this address, leave out --identity",
    )


def welcomed() -> Finding:
    return Finding(True, f"it speaks {ALPN}, as this machine does, and accepts the connection")


def not_welcomed(error: ManyhandsError) -> Finding:
    if isinstance(error, Refused):
        return _failed(
            error,
            f"it refuses the connection: {error.message} ({error.code})",
            "wait a minute and try again, or use another initial peer",
        )
    return _failed(
        error,
        f"it closes the connection after the TLS handshake, or does not answer ({_said(error)})",
        "the peer is overloaded, is stopping, or has another version: see its log",
    )


def answers(seen: ExamineResponse | None) -> Finding:
    if seen is None:
        return Finding(True, "it answers")
    peers = counted(seen.num_known_peers, "peer")
    return Finding(True, f"it answers; it knows {peers}, and runs {readable(seen.agent) or 'an unnamed version'}")


def does_not_answer(error: ManyhandsError) -> Finding:
    if isinstance(error, Refused) and error.code == "unknown_method":
        return Finding(
            False,
            "it takes no part in the DHT: it is in client mode, or is stopping",
            "use the address of a peer that is not in client mode",
        )
    return _failed(error, f"it does not answer a ping ({_said(error)})", "it hangs or is overloaded: its log says more")


# clocks


def clock(offset_s: float, error_s: float, limit_s: float, others_agree: bool | None) -> Finding:
    """Interpret the difference of two clocks.

    Args:
        offset_s: how far the clock of this machine is ahead of the peer's.
        error_s: maximum error of the offset.
        limit_s: the largest difference that does no harm.
        others_agree: whether the clocks of the other initial peers agree with this machine's; None if there are none.
    """
    if abs(offset_s) - error_s <= limit_s:
        return Finding(True, f"differs by {abs(offset_s):.1f} s from this machine's; up to {limit_s:g} s do no harm")
    ahead = "ahead" if offset_s > 0 else "behind"
    detail = (
        f"the clock of this machine is {abs(offset_s):.0f} s {ahead} of this peer's; beyond {limit_s:g} s records are "
        "refused"
    )
    if others_agree:
        return Finding(False, detail, "other peers agree with this machine: set the clock of that peer (NTP)")
    if others_agree is False:
        return Finding(
            False, detail, "the other initial peers do not agree with this machine either: set its clock (NTP)"
        )
    return Finding(False, detail, "compare both with a clock that you trust, and set the wrong one (NTP)")


def no_clock(error: ManyhandsError | None) -> Finding:
    if isinstance(error, Refused) and error.code == "unknown_method":
        return not_tried("the peer runs an older version, which does not report its clock")
    return not_tried(f"it did not report its clock ({_said(error)})" if error is not None else "nobody answered there")


# whether others can dial this machine

_PHRASES = {
    "timed_out": "no answer",
    "refused": "connection refused",
    "held_back": "not dialled: too many dials to that host, or an address that strangers may not name",
    "unreachable": "no route",
    "name_not_found": "the name does not resolve there",
    "wrong_identity": "another peer answers",
    "not_manyhands": "something else answers",
    "itself": "it is an address of that initial peer",
    "protocol_version": "another protocol version answers",
    "unavailable": "not tried: that initial peer is closing",
}

NO_LISTENING = "or pass --client-mode: a peer then dials out only"


_IP_NAMES = {"ip4": "IPv4", "ip6": "IPv6"}


def dialled_back(
    outcomes: Sequence[tuple[Address, DialOutcome]],
    *,
    are_announced: bool,
    port_was_chosen: bool,
    listens_with: Collection[str] = ("ip4", "ip6"),
) -> Finding:
    """Interpret the outcomes of a dial-back.

    Args:
        outcomes: for each address.
        are_announced: whether the user gave the addresses. All of these must work; of others one is enough.
        port_was_chosen: whether the user gave the port. Otherwise any free one was taken.
        listens_with: the IP versions that this machine listens with.
    """
    worked = ", ".join(str(address) for address, outcome in outcomes if not outcome.code)
    failed = [(address, outcome) for address, outcome in outcomes if outcome.code]
    failures = "; ".join(f"{address}: {_phrase(outcome)}" for address, outcome in failed)
    if worked and failed and are_announced:
        advice = "remove the addresses that do not work from --announce: peers that try them first connect more slowly"
        return Finding(False, f"it reached this machine at {worked}, but not at all addresses ({failures})", advice)
    if worked:
        return Finding(True, f"it reached this machine at {worked}")
    if not failed:
        return not_tried("it did not report the outcome")
    advice = _how_to_be_dialled(failed, are_announced, port_was_chosen, listens_with)
    return Finding(False, f"it cannot dial this machine ({failures})", f"{advice}; {NO_LISTENING}")


def _phrase(outcome: DialOutcome) -> str:
    if outcome.code == NOT_ALLOWED:
        return f"not tried: {readable(outcome.detail)}"
    return _PHRASES.get(outcome.code) or readable(f"{outcome.code} {outcome.detail}".strip())


def _how_to_be_dialled(
    failed: Sequence[tuple[Address, DialOutcome]],
    are_announced: bool,
    port_was_chosen: bool,
    listens_with: Collection[str],
) -> str:
    if are_announced:
        return "check that --announce names an address and a port that lead here, and that the port is open"
    port = failed[0][0].port
    if not {address.protocol for address, _ in failed} & set(listens_with):
        number = str(port) if port_was_chosen else "PORT"
        return (
            f"it sees this machine at an {_IP_NAMES[failed[0][0].protocol]} address, with which this machine does not "
            f"listen: --listen {number} listens with IPv4 and IPv6"
        )
    if not port_was_chosen:
        return (
            "a free port was used, and firewalls seldom let those through: try again with a port that is open, "
            "--listen PORT"
        )
    if {outcome.code for _, outcome in failed} & {"wrong_identity", "not_manyhands", "refused"}:
        return (
            "packets reach a router or another machine, which does not forward them to this one: forward TCP port "
            f"{port} to this machine there"
        )
    return f"let TCP port {port} in at this machine's firewall, and if it is behind a router, forward the port there"


def nothing_to_dial(bound: Sequence[Address]) -> Finding:
    """The finding if no address of this machine can be dialled by others."""
    if not bound:
        return not_tried("this machine does not listen")
    return Finding(
        False,
        "this machine listens on its loopback address only, where no other machine can dial it",
        f"--listen {bound[0].port} listens on all of its addresses; {NO_LISTENING}",
    )


def router(kind: Router, hosts: Sequence[str], seen_at: Sequence[str] = (), *, has_ip6: bool) -> Finding:
    """The finding about the router between this machine and the peers that it has dialled.

    Args:
        hosts: the IP addresses at which most peers see this machine.
        seen_at: all the public ones at which peers see it.
        has_ip6: whether this machine has a global IPv6 address.
    """
    seen = ", ".join(hosts)
    pool = [host for host in seen_at if ":" not in host]
    how = "directly if they have IPv6, as this machine has, or else through a relay" if has_ip6 else "through a relay"
    if kind == "unknown":
        return not_tried("no initial peer can be joined")
    if kind == "none":
        return Finding(True, f"none: the others see this machine at its own address, {seen}")
    if len(pool) > 1:
        return Finding(
            None,
            f"it uses several addresses, {', '.join(pool)}, as in mobile networks: peers that cannot be dialled "
            f"are often reached {how}",
        )
    if kind == "port-preserving":
        return Finding(
            True, f"it keeps the ports of connections, at {seen}: peers behind other such routers can connect directly"
        )
    return Finding(
        None,
        f"it takes another port for each connection (symmetric), at {seen}: peers that cannot be dialled are reached "
        f"{how}",
    )


def no_dial_back(error: ManyhandsError) -> Finding:
    if isinstance(error, Refused) and error.code == "unknown_method":
        return not_tried("the peer runs an older version, which cannot be asked to dial back")
    if isinstance(error, Refused):
        return not_tried(f"it refused: {error.message}")
    if isinstance(error, Unavailable):
        return _failed(
            error, f"it was asked to dial back, and did not report the outcome ({_said(error)})", "its log says more"
        )
    return not_tried(_said(error))


def listens(addresses: Sequence[Address]) -> Finding:
    ports = ", ".join(f"{address.host} port {address.port}" for address in addresses)
    return Finding(True, f"this machine can listen on {ports}")


def cannot_listen(error: ManyhandsError) -> Finding:
    return _failed(
        error, _said(error), "if a peer runs on that port already, check it from another machine, as an initial peer"
    )


# the swarm


def peers_seen(num_peers: int, num_initial: int, *, is_part: bool) -> Finding:
    """How many peers answer, including the initial ones; ``is_part`` if a large swarm was not searched completely."""
    if num_peers > num_initial:
        return Finding(True, f"{'at least ' if is_part else ''}{num_peers} peers can be seen")
    initial = "the initial peer" if num_initial == 1 else f"the {num_initial} initial peers"
    return Finding(True, f"{initial} can be seen, and no other peer yet")


def no_peers_seen(error: ManyhandsError) -> Finding:
    return _failed(error, f"joining the swarm failed ({_said(error)})", "the initial peers hang: their logs say more")


def all_see_each_other(num_peers: int) -> Finding:
    return Finding(True, f"the {num_peers} initial peers see each other")


def do_not_see(first: Address, second: Address, *, first_sees: bool, second_sees: bool) -> Finding:
    """The finding for two initial peers of which at least one does not find the other."""
    if not first_sees and not second_sees:
        return Finding(
            False,
            f"{first.host_port} and {second.host_port} do not see each other: the swarm may be split",
            f"start each with the address of the other among its --initial-peers: {first.host_port} with {second}, and "
            f"{second.host_port} with {first}; it keeps trying, so they also find each other later",
        )
    seeing, blind = (first, second) if first_sees else (second, first)
    return Finding(
        False,
        f"{seeing.host_port} sees {blind.host_port}, but not the other way round",
        f"make sure that the machine of {blind.host_port} can dial {seeing}",
    )


# the run


def no_runs_seen(error: ManyhandsError) -> Finding:
    return Finding(None, f"the runs cannot be listed: {_said(error)}", f"see {error.entry}")


def runs_seen(runs: Sequence[Run]) -> Finding:
    if not runs:
        return Finding(None, "there is no run yet; manyhands train --run-id NAME --start-new begins one")
    return Finding(None, f"runs here: {listed(runs)}; --run-id looks at one of them")


def run_is_there(run: Run, *, is_expected: bool = False) -> Finding:
    """The finding for a run with peers; ``is_expected`` if only the settings of a ticket or a charter counted."""
    if run.manifest is None and run.has_trainers and is_expected:
        return Finding(
            False,
            f"run {run} exists, but its trainers have other settings than the ticket or the charter says",
            "ask for a new ticket; the owner of a charter signs a new one with manyhands run create --manifest-of",
        )
    if run.manifest is None:
        return Finding(True, f"run {run.run_id!r} exists, but no peer trains in it yet")
    return Finding(True, f"run {run} exists")


def run_not_there(nobody_is_in: str) -> Finding:
    return Finding(False, nobody_is_in, "compare --run-id with the names of the runs that are there")


def charter_not_there(run_id: str, *, has_another: bool) -> Finding:
    """The finding for a ticket whose charter nobody publishes."""
    if has_another:
        return Finding(False, f"run {run_id!r} has another charter than the ticket says", "ask for a new ticket")
    return Finding(
        False,
        f"nobody publishes the charter of run {run_id!r} that the ticket names",
        "one of its coordinators must run; try again when one does",
    )


def is_by_invitation(run_id: str, *, has_ticket: bool) -> Finding:
    """The finding for a run whose peers can be seen by members only."""
    if has_ticket:
        return Finding(True, f"run {run_id!r} has the charter that the ticket names; only members see its peers")
    return Finding(False, f"run {run_id!r} is by invitation", "ask its owner for a ticket, in place of the address")


# the ways to its peers

SHOWN_PEERS = 4


class Met(NamedTuple):
    """A peer of the run that this machine has tried to connect to.

    Attributes:
        way: how it is connected; None if it is not.
        is_client: whether it says that nobody can dial it.
        carries_bulk: whether averages can take this way.
        obstacle: to a connection without a relay, in words; empty if unknown.
    """

    peer_id: PeerId
    way: Way | None
    is_client: bool = True
    carries_bulk: bool = True
    obstacle: str = ""


def ways(run_id: str, met: Sequence[Met], num_peers: int, *, is_place_known: bool) -> Finding:
    """How this machine is connected to the peers of a run, as one that nobody can dial.

    Args:
        num_peers: of the run; not all of them are met.
        is_place_known: whether this machine's router keeps ports, or it has a global IPv6 address.
    """
    if not met:
        return not_tried(f"no other peer is in run {run_id!r}")
    groups: dict[str, list[PeerId]] = {}
    for one in met:
        groups.setdefault(str(one.way) if one.way is not None else "not reached", []).append(one.peer_id)
    told = ", ".join(f"{len(peer_ids)} {how}{_named(how, peer_ids)}" for how, peer_ids in groups.items())
    of_all = f"{len(met)} of {num_peers}" if num_peers > len(met) else str(num_peers)
    detail = f"{of_all} {'peer' if of_all == '1' else 'peers'} of run {run_id!r}: {told}"
    if len(groups.get("not reached", ())) == len(met):
        return Finding(
            False,
            detail,
            "open a port to this machine, or have a peer that it can dial started with --relay",
        )
    is_reached = "not reached" not in groups
    carries_all = all(one.carries_bulk for one in met)
    advice = []
    if not is_reached:
        advice.append("those that were not reached have left, or need a peer that both can dial, started with --relay")
    if not carries_all:
        advice.append("that relay forwards no averages: start it with --relay")
    relayed = [one for one in met if one.way is not None and one.way.relay is not None]
    if not all(one.is_client for one in relayed):
        advice.append(
            "a firewall lets connections to some ports out of this network only, or addresses of some peers are wrong"
        )
    if any(one.is_client for one in relayed):
        whose = "the other machines' routers" if is_place_known else "this machine's router"
        found = "; ".join(
            f"{_first_of(peer_ids)}: {obstacle}" for obstacle, peer_ids in _by_obstacle(relayed).items() if obstacle
        )
        advice.append(
            f"{whose} stood in the way of a direct connection{f' ({found})' if found else ''}: an open port at either "
            "end, or IPv6 at both, would help"
        )
    return Finding(True if is_reached and carries_all else None, detail, "; ".join(advice))


def _by_obstacle(met: Sequence[Met]) -> dict[str, list[PeerId]]:
    """The clients among some peers, by what stands in the way of a connection without a relay."""
    peer_ids: dict[str, list[PeerId]] = {}
    for one in met:
        if one.is_client:
            peer_ids.setdefault(one.obstacle, []).append(one.peer_id)
    return peer_ids


def _named(how: str, peer_ids: Sequence[PeerId]) -> str:
    return "" if how == "direct" else f" ({_first_of(peer_ids)})"


def _first_of(peer_ids: Sequence[PeerId]) -> str:
    more = f" and {len(peer_ids) - SHOWN_PEERS} more" if len(peer_ids) > SHOWN_PEERS else ""
    return ", ".join(peer_ids[:SHOWN_PEERS]) + more
