"""Attack a run: three honest trainers and a monitor, and one machine that means them harm, all real processes.

    sudo python -m tests.hostile                    # all attacks; `make test-hostile`
    sudo python -m tests.hostile --case state       # those with this in their name
    sudo python -m tests.hostile --case state --keep-logs FOLDER

Each machine is a network namespace with an address of its own, so Linux and root are needed. For each attack a line of
JSON: ``steps_per_s_before``, ``during``, ``after``; ``max_step_block_s``; ``rss_mb`` that the greediest process of the
run gained; ``forked``: two trainers held different states after the same step, or ended far apart; ``loss_before`` the
attack, at its end and ``loss_after`` all; ``lost_share`` of the samples; ``num_dead`` processes; ``attacker_named`` in
the log of a trainer or the monitor. At the end a table of them, for docs/figures.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from manyhands.access import Charter, Invitation, SignedCharter
from manyhands.access.invitation import ID_BYTES, SignedInvitation
from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.base.ticket import Ticket
from tests.hostile import networks
from tests.hostile.attacks import (
    ADDRESSES,
    ATTACKS,
    BY_INVITATION,
    FALSE_MANIFESTS,
    FURTHER_HOSTS,
    LOCAL_PLACES,
    OUTWEIGHS,
    PUNCHES,
    RELAYS,
    SSH_PORT,
    THIRD_PARTY,
    UNSIGNED,
)
from tests.hostile.trainer import CLIENT, RUN_ID, fingerprint

NUM_TRAINERS = 3
MONITOR, ATTACKER, NEWCOMER = NUM_TRAINERS, NUM_TRAINERS + 1, NUM_TRAINERS + 2
WARM_UP_STEPS = 6
NUM_LOSSES = 4
PERIOD_S = 20.0
"""Before, during and after the attack, at least."""
STEPS_OF_PERIOD = 12
SAMPLES_PER_S = 960
PATIENCE_S = 120.0

MIN_UNNAMED = 0.9
"""An attacker that leaves this share of the steps costs nothing that anybody could act on. With less its identity must
be in the log of a trainer or the monitor."""
MIN_SPEED = 0.8
"""Of the steps before, during and after the attack; with many more the batches would not be full."""
LEARNT = 1e-3
"""A loss below this need not fall any more: where the start took long, all is learnt before the attack."""
STANDS_STILL = 1.5
"""A loss may grow by this factor where an attack is known to stop all progress."""
MAX_BLOCK_S = 10.0
MAX_RSS_MB = 100.0
MAX_LOST = 0.01
MAX_SPEED = 2.0
MAX_APART = 3
MAX_DIALS = 500
"""Of three trainers and a monitor, to one address that strangers name, in all."""
CUT_S = 10.0
FAULTS = "faults of a machine"


class Process:
    """A process on one machine, whose output goes to files."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        with self.out.open("w") as out, self.log.open("w") as log:
            self._popen = subprocess.Popen(command, stdout=out, stderr=log, start_new_session=True, cwd=Path.cwd())
        self.most_rss = 0

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def look(self) -> float:
        """Its memory in MB."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._popen.pid)
            return sum(one.memory_info().rss for one in [root, *root.children(recursive=True)]) / 1e6
        return 0.0

    def facts(self) -> list[dict[str, Any]]:
        """The lines that are whole."""
        lines = self.out.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def wait_for(self, text: str) -> str:
        """The first line with a text in it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in (self.out.read_text() + self.log.read_text()).splitlines():
                if text in line:
                    return line
            if not self.is_alive:
                break
            time.sleep(0.2)
        raise RuntimeError(f"{text!r} did not come:\n{self.out.read_text()}\n{self.log.read_text()}")

    def hang_up(self) -> None:
        """As the end of a session does, or log rotation."""
        self._popen.send_signal(signal.SIGHUP)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, 9)
        self._popen.wait()


@dataclass
class Siege:
    """A run that goes on, and the machine of its attacker."""

    machines: networks.Machines
    trainers: list[Process]
    monitor: Process
    address: str
    place: str  # for trainers: the address or a ticket
    folder: Path
    start: Callable[..., Process]
    newcomer: Process | None = None
    sinks: list[Process] = field(default_factory=list)

    @property
    def members(self) -> list[Process]:
        return [*self.trainers, self.monitor, *([self.newcomer] if self.newcomer else [])]

    def attack(self, name: str) -> Process:
        """The attacker's process, which has begun."""
        # on a machine of its own an attacker takes no processor time from the others: here it gets what they leave
        nice = ["nice", "-n", "19", sys.executable, "-u"]
        attacker = self.start(
            ATTACKER, "attacker", "tests.hostile.attacks", name, networks.host(ATTACKER), self.address, python=nice
        )
        attacker.wait_for("attacking")
        return attacker

    def come(self, *options: str) -> Process:
        """Another honest trainer."""
        host = networks.host(NEWCOMER)
        self.newcomer = self.start(NEWCOMER, "newcomer", "tests.hostile.trainer", host, self.place, *options)
        return self.newcomer

    def come_behind_a_firewall(self) -> None:
        """One that reaches the monitor and the attacker alone: it needs a relay to the trainers.

        Returns once it has made its first step.
        """
        self.machines.wall_off(NEWCOMER, *range(NUM_TRAINERS))
        self.come(CLIENT).wait_for('"step": ')

    def fail(self) -> Process:
        """Have machines fail; returns another monitor, which has to go on as everybody else.

        Its identity file is empty, its disk is full, and it is hung up on, as is the monitor of the run. Its cable, and
        that of a newcomer, is pulled while they join.
        """
        key = self.folder / "another.pem"
        key.write_bytes(b"")
        command = [
            "manyhands", "monitor", "--run-id", RUN_ID, "--initial-peers", self.address, "--identity", str(key),
            "--listen", f"/ip4/{networks.host(ATTACKER)}/tcp/0", "--events", "/dev/full",
        ]  # fmt: skip
        self.start(ATTACKER, "refused", *command).wait_for("is empty")
        key.unlink()
        monitor = self.start(ATTACKER, "another", *command)
        newcomer = self.come()
        for number, process, joins in ((ATTACKER, monitor, "as peer"), (NEWCOMER, newcomer, "Joined the DHT")):
            process.wait_for(joins)
            self.machines.plug(number, is_in=False)
        time.sleep(CUT_S)
        for number in (ATTACKER, NEWCOMER):
            self.machines.plug(number, is_in=True)
        monitor.wait_for("are dropped meanwhile")
        for process in (monitor, self.monitor):
            process.hang_up()
        return monitor

    def step(self) -> int:
        """The highest that a trainer has reached."""
        return max((fact["step"] for trainer in self.trainers for fact in trainer.facts()[-1:]), default=0)

    def loss(self) -> float:
        """The median of the last batches."""
        return statistics.median(fact["loss"] for trainer in self.trainers for fact in trainer.facts()[-NUM_LOSSES:])

    def watch(self, seconds: float) -> tuple[float, list[float]]:
        """Let time pass; returns the median trainer's steps in a second, and the most memory of each process."""
        watched = [*self.trainers, self.monitor]
        began, most = time.monotonic(), [process.look() for process in watched]
        while time.monotonic() < began + seconds:
            time.sleep(0.5)
            most = [max(one, process.look()) for one, process in zip(most, watched, strict=True)]
        made = sorted(
            len({f["step"] for f in trainer.facts() if f["digest"] and began <= f["at"] < began + seconds})
            for trainer in self.trainers
        )
        return made[len(made) // 2] / seconds, most

    def is_forked(self) -> bool:
        digests: dict[int, set[str]] = {}
        ends = []
        for trainer in [*self.trainers, *([self.newcomer] if self.newcomer else [])]:
            facts = trainer.facts()
            for fact in facts:
                if fact["digest"]:
                    digests.setdefault(fact["step"], set()).add(fact["digest"])
            ends.append(facts[-1]["step"] if facts else 0)
        return any(len(alike) > 1 for alike in digests.values()) or max(ends) - min(ends) > MAX_APART

    def place_sinks(self) -> None:
        """Listen where no peer of the run should dial."""
        for number in range(ATTACKER):
            for host, _ in LOCAL_PLACES:
                self.machines.add_address(number, host)
            places = [f"{host}:{port}" for host, port in [*LOCAL_PLACES, (networks.host(number), SSH_PORT)]]
            self.sinks.append(self.start(number, f"sink{number}", "tests.hostile.sink", *places))
        self.machines.add_address(ATTACKER, THIRD_PARTY[0])
        self.sinks.append(self.start(ATTACKER, "sink", "tests.hostile.sink", "{}:{}".format(*THIRD_PARTY)))
        for sink in self.sinks:
            sink.wait_for("listening")

    def num_dials(self) -> tuple[int, int]:
        """To local networks and to system ports of the own machine, and to the third party."""
        dials = [line.split()[1:] for sink in self.sinks for line in sink.out.read_text().splitlines()[1:]]
        local = {host for host, _ in LOCAL_PLACES}
        num_local = sum(host in local or host == source for host, _, source in dials)
        return num_local, sum(host == THIRD_PARTY[0] for host, _, _ in dials)


@contextlib.contextmanager
def besieged(folder: Path, access: str = "") -> Iterator[Siege]:
    """A run of honest trainers that has made its first steps.

    Args:
        access: of its charter, if it has one: "open", with the manifest that its owner has signed, or "invite".
    """
    with networks.machines(NUM_TRAINERS + 3) as machines, contextlib.ExitStack() as stack:

        def start(number: int, name: str, *arguments: str, python: Sequence[str] = (sys.executable, "-u")) -> Process:
            command = machines.on(number, [*python, "-m", *arguments])
            process = Process(command, folder, name)
            stack.callback(process.close)
            return process

        listen = f"/ip4/{networks.host(MONITOR)}/tcp/{networks.PORT}"
        key = folder / "monitor.pem"  # with it the monitor makes no folder here
        coordinator = Identity.load_or_create(key)
        monitor_id = coordinator.peer_id
        address = place = f"{listen}/p2p/{monitor_id}"
        command = ["manyhands", "monitor", "--run-id", RUN_ID, "--listen", listen, "--identity", str(key)]
        if access:
            charter = signed_charter(access, monitor_id)
            charter.save(folder / "charter")
            command += ["--charter", str(folder / "charter"), "--state-dir", str(folder / "monitor")]
            token = b"" if charter.is_open else invitation(coordinator, charter)
            place = str(Ticket(RUN_ID, [Address.parse(address)], b"", charter.digest, token))
        monitor = start(MONITOR, "monitor", *command)
        monitor.wait_for("as peer")
        trainers = [
            start(number, f"trainer{number}", "tests.hostile.trainer", networks.host(number), place)
            for number in range(NUM_TRAINERS)
        ]
        siege = Siege(machines, trainers, monitor, address, place, folder, start)
        deadline = time.monotonic() + PATIENCE_S
        while min((t.facts()[-1]["step"] if t.facts() else 0) for t in trainers) < WARM_UP_STEPS:
            if time.monotonic() > deadline:
                raise RuntimeError("\n".join(process.log.read_text()[-2000:] for process in siege.members))
            time.sleep(0.2)
        yield siege


def signed_charter(access: Any, coordinator: str) -> SignedCharter:
    owner = Identity.generate()
    manifest = fingerprint() if access == "open" else b""
    return SignedCharter.sign(owner, Charter(RUN_ID, owner.peer_id, access, [coordinator], manifest))


def invitation(coordinator: Identity, charter: SignedCharter) -> bytes:
    """A token for all honest trainers."""
    expires_at = time.time() + 86400.0
    token = Invitation(charter.digest, os.urandom(ID_BYTES), NUM_TRAINERS + 1, expires_at, coordinator.peer_id)
    return SignedInvitation.sign(coordinator, token).signed.encoded()


def measured(name: str, folder: Path, period_s: float) -> dict[str, Any]:
    """One attack, and what became of the run; it is watched for so long before, during and after it."""
    access = "open" if name == FALSE_MANIFESTS else "invite" if name in BY_INVITATION else ""
    with besieged(folder, access) as siege:
        for host in FURTHER_HOSTS:
            siege.machines.add_address(ATTACKER, host)
        if name in (ADDRESSES, PUNCHES):
            siege.place_sinks()
        before, memory = siege.watch(period_s)
        num_facts = [len(trainer.facts()) for trainer in siege.trainers]
        attacker = siege.fail() if name == FAULTS else siege.attack(name)
        loss_before = siege.loss()
        if name == FALSE_MANIFESTS:
            siege.come()
        if name in RELAYS:
            siege.come_behind_a_firewall()
        during, most = siege.watch(period_s)
        loss_during = siege.loss()
        is_attacking = attacker.is_alive
        attacker.close()
        after, later = siege.watch(period_s)
        num_local_dials, num_other_dials = siege.num_dials()
        gained = [max(one, two) - first for first, one, two in zip(memory, most, later, strict=True)]
        facts = [trainer.facts()[number:] for trainer, number in zip(siege.trainers, num_facts, strict=True)]
        last = [trainer.facts()[-1] for trainer in siege.trainers]
        names = [line.split()[1] for line in attacker.out.read_text().splitlines() if line.startswith("identity ")]
        logs = "".join(process.log.read_text() + process.out.read_text() for process in siege.members)
        return {
            "attack": name,
            "steps_per_s_before": round(before, 2),
            "during": round(during, 2),
            "after": round(after, 2),
            "max_step_block_s": round(max((fact["block_s"] for some in facts for fact in some), default=period_s), 2),
            "rss_mb": round(max(gained), 1),
            "forked": siege.is_forked(),
            "loss_before": round(loss_before, 4),
            "loss_during": round(loss_during, 4),
            "loss_after": round(siege.loss(), 4),
            "lost_share": round(sum(f["dropped"] for f in last) / max(sum(f["computed"] for f in last), 1), 4),
            "num_dead": sum(not process.is_alive for process in siege.members),
            "local_dials": num_local_dials,
            "third_party_dials": num_other_dials,
            "attacker_named": any(identity in logs for identity in names),
            "attacked_to_the_end": is_attacking,
        }


def failures_of(result: dict[str, Any]) -> list[str]:
    """What of the promises does not hold."""
    rules = {
        "fewer steps during the attack": result["during"] < MIN_SPEED * result["steps_per_s_before"],
        "too many steps during the attack": result["during"] > MAX_SPEED * result["steps_per_s_before"],
        "the loss did not fall": not all(
            later < (STANDS_STILL if result["attack"] == OUTWEIGHS else 1.0) * earlier or later < LEARNT
            for earlier, later in itertools.pairwise(result[f"loss_{when}"] for when in ("before", "during", "after"))
        ),
        "fewer steps after it": result["after"] < MIN_SPEED * result["steps_per_s_before"],
        "step() was blocked": result["max_step_block_s"] > MAX_BLOCK_S,
        "memory": result["rss_mb"] > MAX_RSS_MB,
        "a fork": result["forked"],
        "samples were lost": result["lost_share"] > MAX_LOST,
        "a process was lost": result["num_dead"] > 0,
        "the attacker is not named": not result["attacker_named"]
        and result["during"] < MIN_UNNAMED * result["steps_per_s_before"]
        and result["attack"] not in {*UNSIGNED, FAULTS},
        "the attacker gave up": not result["attacked_to_the_end"],
        "a dial to a local network": result["local_dials"] > 0,
        "many dials to a third party": result["third_party_dials"] > MAX_DIALS,
    }
    return [rule for rule, is_broken in rules.items() if is_broken]


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """A table of Markdown for docs/figures.md."""
    lines = ["", "| attack | steps/s before | during | after | longest `step()`, s |", "|---|---|---|---|---|"]
    for one in results:
        rates = " | ".join(str(one[when]) for when in ("steps_per_s_before", "during", "after"))
        lines.append(f"| {one['attack']} | {rates} | {one['max_step_block_s']} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if all is as promised."""
    parser = argparse.ArgumentParser(prog="make test-hostile", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", default="", help="only attacks with this in their name")
    parser.add_argument("--target", type=int, default=480, help="samples of a step (default: 480, half a second)")
    parser.add_argument("--keep-logs", type=Path, help="a folder for what all processes print")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args(arguments)
    if not networks.can_be_made():
        print("make test-hostile needs Linux, root and iproute2: each peer gets a network namespace of its own")
        return 2
    os.environ["HOSTILE_TARGET"] = str(options.target)
    period_s = max(PERIOD_S, STEPS_OF_PERIOD * options.target / SAMPLES_PER_S)
    results, num_failed = [], 0
    for name in (name for name in [*ATTACKS, FAULTS] if options.case in name):
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.keep_logs / name.replace(" ", "-") if options.keep_logs else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            result = measured(name, folder, period_s)
        result["failures"] = failures_of(result)
        num_failed += bool(result["failures"])
        results.append(result)
        print(json.dumps(result), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(table_of(results))
    print(f"{len(results) - num_failed} of {len(results)} as promised")
    return int(num_failed > 0 or not results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
