"""Share of the time in which peers compute, by the bandwidth of their lines, for synchronous and for local steps.

    python benchmarks/utilization_sim.py --json FILE [--params 1e9] [--step-s 0.1] [--h 100] [--peers 2]

A calculation, as table 4 of Streaming DiLoCo (Douillard et al., arXiv:2501.18512), with its defaults: 1B parameters, a
step of 0.1 s, an average in 100 steps. A peer computes, and stalls for the part of an average that is not hidden behind
its computing. An average takes the bytes of the codec, times 2 (P - 1) / P, over the bandwidth of a line, plus the
overhead of a round.

Modes ``paper: ...`` check the calculation with the paper's assumptions: bfloat16 (or 4 bits), 8 fragments, an overlap
of 1 step, no overhead, and transfers that are also hidden behind the backward pass, two thirds of a step. The paper
tells 222, 23.3, 16.0, 9.1 and 2.0 Gbit/s for 95%, on a coarse grid of bandwidths.

Other modes are ours: bytes by our codecs, nothing hidden behind a backward pass, and the overhead of each round:
``--overhead-s``, by default what four peers with 100 ms round trips wait longer than their lines take (measured in
virtual time with ``--measure``: from the last batch until the parameters are there, with lines that do not limit).

JSON: a list of ``{mode, mbit_s, utilisation}``. Prints for each mode the bandwidth for 50%, 80%, 90%, 95% and 99%, in
Gbit/s; ``-`` where the overhead alone is too much.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the simulated worlds of the tests

import torch
from _command_line import Parser, json_path, positive, positive_int, run, write_json

from manyhands.averaging.codecs import plan_of
from manyhands.averaging.codecs.plan import codec_named
from manyhands.optim.local_steps import LocalSteps
from tests.simulation.swarm_of_trainers import BATCH_S, Member, Swarm, together

BACKWARD_SHARE = 2 / 3
OVERHEAD_S = 0.4
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
BITS = 8
GIGA = 1e9
MEGA = 1e6
GRID = [10 ** (power / 8) for power in range(8, 49)]
"""Megabits per second: 10 to 1,000,000, eight in a decade."""
MEASURED_ROUNDS = 6
LATENCY_S = 0.05


@dataclass(frozen=True)
class Setting:
    """The run.

    Attributes:
        numel: parameters.
        step_s: of a batch.
        H: batches from one average to the next, of modes with local steps.
        overhead_s: of a round of ours.
    """

    numel: float
    step_s: float
    H: int
    num_peers: int
    overhead_s: float


@dataclass(frozen=True)
class Mode:
    """A way to average.

    Attributes:
        value_bytes: of a parameter in the round.
        is_local: averages once in H steps.
        hidden_steps: steps that are computed during an average.
        is_paper: without our overhead.
    """

    name: str
    value_bytes: float
    is_local: bool = True
    fragments: int = 1
    hidden_steps: float = 0.0
    is_paper: bool = False

    def utilisation(self, setting: Setting, bytes_per_s: float) -> float:
        """Share of the time spent computing."""
        computing_s = setting.step_s * (setting.H if self.is_local else 1)
        sent = 2 * (setting.num_peers - 1) / setting.num_peers * setting.numel * self.value_bytes / self.fragments
        average_s = sent / bytes_per_s + (0.0 if self.is_paper else setting.overhead_s)
        return computing_s / (computing_s + self.fragments * max(0.0, average_s - self.hidden_steps * setting.step_s))

    def bytes_per_s_for(self, setting: Setting, share: float) -> float:
        """The bandwidth for a share of computing; infinite if there is none."""
        if self.utilisation(setting, math.inf) < share:
            return math.inf
        low, high = 1.0, 1e15
        while high / low > 1.0001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.utilisation(setting, middle) >= share else (middle, high)
        return high


def modes() -> list[Mode]:
    """Those of the paper and ours; a further codec or overlap is a further line."""
    made = [
        Mode("paper: data-parallel", 2.0, is_local=False, hidden_steps=BACKWARD_SHARE, is_paper=True),
        Mode("paper: DiLoCo", 2.0, hidden_steps=BACKWARD_SHARE, is_paper=True),
        Mode("paper: streaming", 2.0, fragments=8, hidden_steps=BACKWARD_SHARE, is_paper=True),
        Mode("paper: streaming, overlap 1", 2.0, fragments=8, hidden_steps=1 + BACKWARD_SHARE, is_paper=True),
        Mode("paper: the same with 4 bits", 0.5, fragments=8, hidden_steps=1 + BACKWARD_SHARE, is_paper=True),
    ]
    for codec in ("none", "int8", "int4"):
        value_bytes = bytes_of(codec)
        made += [
            Mode(f"sync, {codec}", value_bytes, is_local=False),
            Mode(f"local, {codec}", value_bytes),
            Mode(f"local, {codec}, 4 fragments", value_bytes, fragments=4),
            Mode(f"local, {codec}, overlap 5", value_bytes, hidden_steps=5),
            Mode(f"local, {codec}, overlap 10", value_bytes, hidden_steps=10),
            Mode(f"local, {codec}, 4 fragments, overlap 10", value_bytes, fragments=4, hidden_steps=10),
        ]
    return made


def bytes_of(codec: str) -> float:
    """Bytes of a value on the line."""
    numel = 1 << 24
    return plan_of([(1, numel)], codec_named(codec)).num_bytes(0, numel) / numel


def quadratic(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def measured_overhead_s() -> float:
    """What a round adds to a peer's batches, in virtual time, the median of some after the first."""
    num_peers, num_batches, waits = 4, 20, []

    def train(member: Member) -> None:
        together(num_peers, member)
        for number in range(1, MEASURED_ROUNDS + 1):
            for _ in range(num_batches - 1):
                member.step(quadratic(member.model))
            began = member.peer.time()
            member.step(quadratic(member.model))
            while member.optimizer.global_step < number:
                member.peer.sleep(0.01)
                member.optimizer.step(batch_size=0)
            if number > 1:
                waits.append(member.peer.time() - began - BATCH_S)

    swarm = Swarm()
    swarm.world.network.default_link.latency_s = LATENCY_S
    for number in range(num_peers):
        swarm.start(
            f"peer{number}", lambda: torch.nn.Linear(64, 64),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.01), train,
            target_batch_size=num_peers * num_batches, batch_size_per_step=1, begins_s=float(number),
            local_steps=LocalSteps(),
        )  # fmt: skip
    swarm.run(1000.0)
    return statistics.median(waits)


def line_of(mode: Mode, setting: Setting) -> str:
    figures = [mode.bytes_per_s_for(setting, share) * BITS / GIGA for share in SHARES]
    return f"{mode.name:38}" + "".join(f"{figure:10.2f}" if figure < math.inf else f"{'-':>10}" for figure in figures)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--params", type=positive, default=1e9, help="default: 1e9")
    parser.add_argument("--step-s", type=positive, default=0.1, help="of a batch (default: 0.1)")
    parser.add_argument("--h", type=positive_int, default=100, help="batches between two averages (default: 100)")
    parser.add_argument("--peers", type=positive_int, default=2, help="default: 2, as in the paper")
    parser.add_argument("--overhead-s", type=positive, default=OVERHEAD_S, help=f"of a round (default: {OVERHEAD_S})")
    parser.add_argument("--measure", action="store_true", help="measure it instead")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    overhead_s = measured_overhead_s() if options.measure else options.overhead_s
    setting = Setting(options.params, options.step_s, options.h, options.peers, overhead_s)
    rows: list[dict[str, Any]] = [
        {
            "mode": mode.name,
            "mbit_s": round(mbit_s, 1),
            "utilisation": round(mode.utilisation(setting, mbit_s * MEGA / BITS), 4),
        }
        for mode in modes()
        for mbit_s in GRID
    ]
    print(f"overhead of a round: {overhead_s:.2f} s; Gbit/s for a share of computing:")
    print(f"{'mode':38}" + "".join(f"{share:>10.0%}" for share in SHARES))
    for mode in modes():
        print(line_of(mode, setting))
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
