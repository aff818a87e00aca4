"""Which peers can take part: those behind firewalls, routers and tunnels, and many clients. Needs Linux and root.

    python benchmarks/reach.py --json FILE [--setups public,client,...] [--drop-s 60]
    python benchmarks/reach.py --json FILE --clients 16,256
    python benchmarks/reach.py --json FILE --pairs
    python benchmarks/reach.py --json FILE --swarm 8 --mbit-s 20

Two ordinary peers train a small model. Another one joins, in a process and a network namespace of its own
(benchmarks/_routers.py). It gets their addresses and no option that says how it is connected, except in ``tunnel``:

  public                  others can dial it
  client                  a firewall drops what does not answer its own connections
  tunnel                  the same firewall, and a TCP relay whose tunnels drop after ``--drop-s``, each with a new port
  port-preserving router  its connections come from the address of a router, with the same port; nothing is forwarded
  symmetric router        the same with another port for each connection
  unannounced router      the router forwards its port, but the peer announces its private address only
  two routers             a port-preserving router behind another one
  only port 443 out       a firewall lets out connections to that port only; both ordinary peers listen there
  one peer on port 443    the same, and the second of the ordinary peers listens elsewhere; both relay (``--relay``)
  coordinator on port 443  the same firewall; it gets the address of a first peer alone, which listens there, relays and
                          does not train; both ordinary peers listen elsewhere

JSON: a list of ``{setup, joins, contributes, first_contribution_s, advice, peer_s, mode, drops, others_aborted}``:

  joins                 it saw both others
  contributes           its samples were in a committed round with others, also in one of the last 15 s that it was
                        watched: ``--watch-s``, or with a tunnel the first drop and 30 s more
  first_contribution_s  since it began to make its manyhands.Optimizer
  advice                its warnings about how it is connected
  peer_s                for making its manyhands.Peer before that
  mode                  ordinary or client, in the end
  drops                 of the tunnel
  others_aborted        averaging rounds of the ordinary peers that failed after it had begun

With ``--clients``, so many peers in client mode average ``--params`` values with one ordinary peer, which reduces all;
each process has up to 32. Real clients have machines of their own, so the ordinary peer has precedence over them, and
their threads take longer turns: with the usual ones, waiting for each other takes half of both cores. JSON: a list of
``{clients, params, rounds, reducer_mb, to_first, failed, round_s}``:

  reducer_mb  peak memory of the ordinary peer during the rounds, without libraries
  to_first    that divided by the first row's
  failed      rounds of clients that did not commit, or not with all peers; up to the first round with all,
              at most three do not count
  round_s     the median

With ``--pairs``, one peer calls another one, each behind one of ``--kinds`` (benchmarks/_pairs.py), and both know a
public peer that relays; it has IPv4 only. Of a public peer and another one, the other one calls. JSON: a list of ``{a,
b, way, connect_ms, punched_ms, mb_per_s, first_contribution_s}``: until the first call is answered, until there is a
connection without a relay (both since the call began), the throughput of one stream, and, in a run that the public peer
has begun, from the start of both until the end of the first averaging round with the samples of both. There they get no
option that says how they are connected. The emulated internet carries TCP alone, so a router that blocks UDP makes no
difference in any row.

With ``--swarm``, so many peers and one public one average ``--swarm-params`` values with int8. All have an upload of
``--mbit-s``. JSON: a list of ``{swarm, punched_pairs, step_s, public_mb, other_mb, failed}``, medians of ``--rounds``;
``public_mb`` is what the public peer sends in a step, ``other_mb`` one of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import resource
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run, skip, write_json
from _memory import free_at_once, peak_own_bytes, start_peak
from _pairs import KINDS, PORT, SWARMS, End, measure_pair, measure_swarm
from _relay import Relay
from _routers import Host, bridged, internet, public_ip
from _star import enter, why_not
from _trainer import Trainer, wait_for
from _worker import Worker

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.averaging.round import times

OPEN = Host()
NEWCOMER, RELAY = 2, 3  # the numbers of hosts; 0 and 1 are the ordinary peers
HTTPS = 443
PORTS = {"only port 443 out": (HTTPS, HTTPS), "one peer on port 443": (HTTPS, PORT)}
"""Where the ordinary peers listen, if not both at ``PORT``."""
RELAYED = ("one peer on port 443",)
"""Set-ups in which the ordinary peers relay."""
COORDINATED = ("coordinator on port 443",)
"""Set-ups in which all join by a peer that does not train."""
SETUPS = {
    "public": Host(),
    "client": Host(has_firewall=True),
    "tunnel": Host(has_firewall=True, lets_in=(RELAY,)),
    "port-preserving router": Host(has_router=True),
    "symmetric router": Host(has_router=True, is_symmetric=True),
    "unannounced router": Host(has_router=True, forwarded_port=PORT),
    "two routers": Host(has_router=True, has_second_router=True),
    "only port 443 out": Host(has_firewall=True, only_to=HTTPS),
    "one peer on port 443": Host(has_firewall=True, only_to=HTTPS),
    "coordinator on port 443": Host(has_firewall=True, only_to=HTTPS),
}
AFTER_DROP_S = 30.0
LAST_S = 15.0
PEERS_IN_PROCESS = 32
PRECEDENCE = -10
TURN_S = 0.02
ROUND_S = 60.0
WARM_UP_ROUNDS = 3
MB = 10**6
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def measure(setup: str, drop_s: float, watch_s: float) -> dict[str, Any]:
    """One row."""
    hosts = [OPEN, OPEN, SETUPS[setup], OPEN]
    ports = PORTS.get(setup, (PORT, PORT))
    is_tunnel = setup == "tunnel"
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(internet(hosts))
        workers = [stack.enter_context(Worker(Trainer, name)) for name in names[: NEWCOMER + 1]]
        if is_tunnel:
            stack.enter_context(Worker(Relay, names[RELAY], drop_s)).call("ready")
            watch_s = drop_s + AFTER_DROP_S
        door: list[str] = []
        if setup in COORDINATED:
            door, _ = stack.enter_context(Worker(End, names[RELAY])).call("start", [], HTTPS, False, True)
        relays = setup in RELAYED
        addresses = workers[0].call("start", door, ports[0], None, relays, True)
        wait_for(workers[:1], "step")  # so that the next one finds the run
        addresses += workers[1].call("start", door or addresses, ports[1], None, relays)
        wait_for(workers[:NEWCOMER], "first_s")
        aborted = sum(worker.call("report")["aborted"] for worker in workers[:NEWCOMER])
        newcomer = workers[NEWCOMER]
        newcomer.call("start", door or addresses, PORT, public_ip(RELAY) if is_tunnel else None)
        until = time.monotonic() + watch_s
        while time.monotonic() < until:
            time.sleep(min(1.0, watch_s))
            if newcomer.call("report")["error"]:
                break
        report = newcomer.call("report")
        others = [worker.call("report") for worker in workers[:NEWCOMER]]
    first_s, since_s = report["first_s"], report["since_last_s"]
    if report["error"]:
        report["advice"].append(report["error"])
    return {
        "setup": setup,
        "joins": not report["error"] and report["num_peers"] >= len(workers),
        "contributes": first_s is not None and since_s <= LAST_S,
        "first_contribution_s": round(first_s, 2) if first_s is not None else None,
        "advice": "\n".join(report["advice"]),
        "peer_s": round(report["peer_s"], 2),
        "mode": report["mode"],
        "drops": report["drops"],
        "others_aborted": sum(other["aborted"] for other in others) - aborted,
    }


class Averagers:
    """Some peers that average, in one process and namespace."""

    def __init__(self, namespace: str, num_params: int) -> None:
        enter(namespace)
        torch.set_num_threads(1)
        free_at_once()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._num_params = num_params
        self._peers: list[manyhands.Peer] = []
        self._averagers: list[manyhands.Averager] = []
        self._pool = ThreadPoolExecutor(PEERS_IN_PROCESS)

    def start(self, num: int, initial_peers: list[str]) -> list[str]:
        """Join with so many peers; they are clients, except the first peer of all. Returns the addresses."""
        times.TWO_DIALS_S = ROUND_S / 2  # type: ignore[attr-defined]  # all on one machine: streams open late
        config = AveragingConfig(
            codec="none", matchmaking_time_s=ROUND_S / 2, averaging_timeout_s=ROUND_S,
            max_group_size=2 * 256,
        )  # fmt: skip
        if not initial_peers:
            os.nice(PRECEDENCE)  # of this thread, and of those that it starts
        for _ in range(num):
            peer = manyhands.Peer(initial_peers, client_mode=bool(initial_peers))
            self._peers.append(peer)
            if initial_peers:
                sys.setswitchinterval(TURN_S)  # the first peer has shortened it
            tensor = torch.zeros(self._num_params)
            self._averagers.append(manyhands.Averager([tensor], peer=peer, run_id="clients", averaging=config))
        return self._peers[0].addresses

    def round(self, num_peers: int) -> tuple[int, list[str], float]:
        """Average once: the number of failures, their reasons, the seconds."""
        began = time.perf_counter()
        results = list(self._pool.map(lambda averager: averager.step(timeout_s=ROUND_S), self._averagers))
        failed = [result for result in results if not result.committed or len(result.contributors) != num_peers]
        reasons = {result.reason or f"with {len(result.contributors)} of {num_peers} peers" for result in failed}
        return len(failed), sorted(reasons), time.perf_counter() - began

    def settle(self) -> None:
        """Before memory is measured."""
        gc.collect()

    def close(self) -> None:
        with ThreadPoolExecutor(PEERS_IN_PROCESS) as pool:
            list(pool.map(lambda peer: peer.close(), self._peers))


def measure_clients(num_clients: int, num_params: int, num_rounds: int) -> dict[str, Any]:
    """One row."""
    num_processes = -(-num_clients // PEERS_IN_PROCESS)
    sizes = [len(range(number, num_clients, num_processes)) for number in range(num_processes)]
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(bridged(1 + num_processes))
        pool = stack.enter_context(ThreadPoolExecutor(1 + num_processes))
        workers = [stack.enter_context(Worker(Averagers, name, num_params)) for name in names]
        reducer = workers[0]

        def call(method: str, *arguments: Any) -> list[Any]:
            calls = [pool.submit(worker.call, method, *arguments, timeout_s=2 * ROUND_S) for worker in workers]
            return [one.result() for one in calls]

        addresses = reducer.call("start", 1, [])
        starting = [
            pool.submit(worker.call, "start", size, addresses, timeout_s=600.0)
            for worker, size in zip(workers[1:], sizes, strict=True)
        ]
        for start in starting:
            start.result()
        for _ in range(WARM_UP_ROUNDS):  # they open the connections, and make the peers known to each other
            outcomes = call("round", 1 + num_clients)
            num_failed, seconds = sum(outcome[0] for outcome in outcomes), max(outcome[2] for outcome in outcomes)
            why = "; ".join(sorted({reason for outcome in outcomes for reason in outcome[1]})[:2])[:400]
            text = f"{num_failed} did not average with all, {seconds:.1f} s {why}"
            print(f"  warm-up: {text}", file=sys.stderr, flush=True)
            if not num_failed:
                break
        call("settle")
        start_peak(reducer.pid)
        failed, reasons, all_seconds = 0, set[str](), []
        for _ in range(num_rounds):
            outcomes = call("round", 1 + num_clients)
            failed += sum(outcome[0] for outcome in outcomes[1:])
            reasons |= {reason for outcome in outcomes for reason in outcome[1]}
            all_seconds.append(max(outcome[2] for outcome in outcomes))
        peak = peak_own_bytes(reducer.pid)
    for reason in sorted(reasons)[:5]:
        print(reason, file=sys.stderr)
    return {
        "clients": num_clients, "params": num_params, "rounds": num_rounds, "reducer_mb": round(peak / MB, 1),
        "failed": failed, "round_s": round(statistics.median(all_seconds), 2),
    }  # fmt: skip


def setups(text: str) -> list[str]:
    """Set-ups, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SETUPS]:
        raise argparse.ArgumentTypeError(f"no set-up {unknown[0]!r}; there are {', '.join(SETUPS)}")
    return names


def kinds(text: str) -> list[str]:
    """Kinds of routers, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return names


def counts(text: str) -> list[int]:
    """Numbers of clients, separated by commas."""
    return [positive_int(part) for part in text.split(",")]


def leave(number: int, _: Any) -> None:
    """Leave through the blocks that remove the namespaces, once: `timeout` sends its signal twice."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--setups", type=setups, default=list(SETUPS), help="several (default: all)")
    parser.add_argument("--drop-s", type=positive, default=60.0, help="of a tunnel (default: 60)")
    parser.add_argument("--watch-s", type=positive, default=30.0, help="of the newcomer (default: 30)")
    parser.add_argument("--clients", type=counts, help="measure so many clients instead, for example 16,256")
    parser.add_argument("--params", type=positive_int, default=100_000, help="with --clients (default: 100000)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="with --clients (default: 3)")
    parser.add_argument("--pairs", action="store_true", help="measure pairs of peers behind routers instead")
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), help="with --pairs: several (default: all)")
    parser.add_argument("--swarm", type=positive_int, help="measure so many peers behind routers instead")
    parser.add_argument("--mbit-s", type=positive, default=20.0, help="with --swarm: upload of each (default: 20)")
    parser.add_argument(
        "--swarm-params", type=positive_int, default=12_000_000, help="with --swarm (default: 12000000)"
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        skip(reason)
    for number in SIGNALS:
        signal.signal(number, leave)
    rows: list[dict[str, Any]] = []
    cases: list[Any] = options.clients or options.setups
    if options.pairs:
        cases = list(itertools.combinations_with_replacement(options.kinds, 2))
    elif options.swarm:
        cases = list(SWARMS)
    with progress_of(len(cases)) as steps:
        for case in cases:
            if options.pairs:
                steps.begin(" and ".join(case))
                row = measure_pair(*case)
            elif options.swarm:
                steps.begin(f"{options.swarm} peers: {case}")
                row = measure_swarm(case, options.swarm, options.swarm_params, options.mbit_s, options.rounds)
            elif options.clients:
                steps.begin(f"{case} clients and one ordinary peer")
                row = measure_clients(case, options.params, options.rounds)
                row["to_first"] = round(row["reducer_mb"] / (rows[0] if rows else row)["reducer_mb"], 2)
            else:
                steps.begin(f"a peer of the set-up {case}")
                row = measure(case, options.drop_s, options.watch_s)
            rows.append(row)
            write_json(options.json, rows)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
