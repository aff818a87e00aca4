"""What local steps cost in quality, and what they save in traffic.

    python benchmarks/local_steps.py [--json FILE] [--quick] [--modes one,sync,...] [--jobs 2]
                                     [--steps N] [--batch N] [--rate R] [--h N] [--text machine]

Four peers train a small ALBERT (masked words) and a tiny GPT on the text that comes with the recipe. They run in one
process on a virtual clock; the networking code is real: DHT, progress records, matchmaking, rounds and codecs. All
modes have the same samples in the same order and the same learning rate after the same samples (AdamW, warm-up, cosine,
gradients clipped to 1; not tuned for any mode), from random parameters:

  one         one process with the batches of all four peers, so the same number of updates as ``sync``
  alone       one of the peers by itself, for as many batches as it has in a run
  rare        one process that steps once in H batches of all four peers, so synchronous steps with as few averages as
              local steps have (H = 30, as the modes below)
  late        one process whose gradients are of parameters that are one step old: delayed steps, if an average takes as
              long as the computing
  sync        synchronous steps: an average of gradients in each batch
  local       H batches of each peer from one average to the next (``target_batch_size`` is H x 4 batches); the outer
              optimizer is SGD(lr=1) up to H = 64, and Nesterov (lr 0.7, momentum 0.9) above
  overlap     the average arrives 5 batches late
  fragments   the parameters are averaged in 4 parts, one after the other, each once in H batches (24, so that it can be
              divided by 4)
  sparse      of each 4096 values of a change the 64 largest, with 14 bits each (SparseLoCo)
  plain, nesterov   both outer optimizers, at H = 16 and 256, and plain at 100

The modes ``arm-...`` are computed in a plain loop without a network, at H = 30 (that this loop computes what peers do
is shown by tests/simulation/test_local_identities.py). They compare what the outer step could be:

  arm-plain, arm-nesterov   as above; arm-mild is (lr 0.28, momentum 0.5), arm-slow (0.1, 0.9), arm-1.4 and arm-2 are
                            rates of SGD
  arm-...-falling           the outer rate falls in the last 30% of the averages
  arm-norm                  the mean of each tensor gets the mean of the peers' norms, except embeddings
  arm-sparse-...            sparse changes, with outer rates, without decay of what is not sent, with 256 values of each
                            4096, and at a rate of 1.4 with vectors and small matrices sent as they are
  arm-overlap-...           plain averages that arrive so many batches late, at most H
  arm-muon, one-muon        Muon as the inner optimizer of the matrices
  arm-unequal               batches of 1, 1, 2 and 4 parts; -squared weighs them by samples squared over steps

The steps are rounded to a whole number of averages (``tokens`` says how many). ``noniid``
gives each peer another part of the text. ``sync`` must have the loss of ``one``.

--quick has 500 steps of models of 0.1 and 0.2 million parameters, which takes minutes. ALBERT then learns little more
than how often each token occurs: masked words need more samples before the loss falls further. So its figures say
little about quality there; the bytes are real. The full table has 800 steps, and 1.3 and 1.9 million parameters.
--steps gives each peer another number of batches, --batch larger ones, --rate another learning rate, and --h the modes
rare and arm-... another H. --text machine takes sources and docs that Debian and PyPI packages have put on this machine
in place of the recipe's text of 173,000 tokens, so that no sample comes twice. It differs from machine to machine:
compare only rows of one.

A row is written as soon as it is there, and rows that are in the file are not computed again. The figures:

  heldout_loss     of the agreed parameters on documents that are held out, in nats for each predicted token
  tokens           of all peers
  bytes_per_peer   sent by one peer in training, on all streams, the mean of the peers; without joining and the download
                   of the state. Includes DHT and progress records: a batch takes 0.5 s of virtual time
  cpu_s            of the process
  clipped          the share of inner steps whose gradient was clipped
  cosine           of two peers' changes, the mean over pairs and averages
  ratio            the norm of the mean change over the mean of the norms; ratio_1 to ratio_3 of the first averages
  peak_mbit_s      the most that any peer sent in one second of virtual time, with lines that do not limit it: with
                   them, a line of so much bandwidth would not slow training down

The table shows the mean over seeds, the loss over that of one process with the same seed, its spread (highest minus
lowest) over the seeds, and how many times fewer bytes than sync. With rows of ``one`` of fewer steps in the file
(--modes one --steps N), it also shows how many tokens more a mode took than one process takes to the same loss.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the simulated worlds of the tests

import torch
from _command_line import Parser, json_path, positive, positive_int, progress_of, run
from _local_arms import MuonBySamples, Rule, Seen, inner_step, train_apart
from _local_tasks import LENGTH, MAX_GRAD_NORM, SIZES, BySamples, Shards, Size, heldout_loss, joined, new_model

from manyhands.averaging import AveragingConfig
from manyhands.averaging.codecs import Sparse
from manyhands.optim.local_steps import LocalSteps, nesterov
from tests.simulation.swarm_of_trainers import Member, Swarm, together

Row = dict[str, Any]

PEERS = 4
BATCH_S = 0.5
OVERLAP_STEPS = 5
OVERLAP_LATENCY_S = 0.75  # a round takes longer than OVERLAP_STEPS batches
MOMENTUM_FROM = 65
SETTLE_S = 0.05
MAX_VIRTUAL_S = 1e5
MEGABIT = 1e6 / 8


def plain(params: Any) -> torch.optim.Optimizer:
    """Averaging of parameters."""
    return torch.optim.SGD(params, lr=1.0)


@dataclass(frozen=True)
class Mode:
    """One row for each model and seed; a further way to train is a further mode.

    Attributes:
        H: batches of a peer between two averages; 0 is one process.
        codec: as in ``AveragingConfig``.
        outer: None chooses it by H.
        rule: computed in one process, without a network.
        peers: number of peers whose batches are taken.
        is_rare: one process with a step in H batches.
        is_late: one process with gradients that are one step old.
    """

    name: str
    H: int
    codec: str = "none"
    shards: str = "iid"
    outer: Callable[[Any], torch.optim.Optimizer] | None = None
    fragments: int = 1
    overlap_steps: int = 0
    sparse: Sparse | None = None
    rule: Rule | None = None
    peers: int = PEERS
    is_rare: bool = False
    is_late: bool = False

    @property
    def is_plain_loop(self) -> bool:
        return not self.H or self.is_rare or self.rule is not None

    def with_h(self, h: int | None) -> Mode:
        """At another H, if it is one of those that are compared with it."""
        return self if not h or not self.H or not self.is_plain_loop else replace(self, H=h)

    def steps(self, wanted: int) -> int:
        """The number of batches: whole averages."""
        return max(1, round(wanted / max(self.H, 1))) * max(self.H, 1)

    def options(self, batch: int) -> dict[str, Any]:
        """Of the optimizer."""
        codec = AveragingConfig.codec if self.sparse is not None else self.codec
        averaging = AveragingConfig(codec=codec, matchmaking_time_s=20.0, averaging_timeout_s=60.0)
        options: dict[str, Any] = {"averaging": averaging, "target_batch_size": self.H * PEERS * batch}
        if self.sparse is not None:
            options["local_steps"] = LocalSteps(sparse=self.sparse)
        elif self.name != "sync":
            outer = self.outer or (nesterov if self.H >= MOMENTUM_FROM else plain)
            options["local_steps"] = LocalSteps(outer, self.fragments, self.overlap_steps)
        return options


MODES = [
    Mode("one", 0),
    Mode("one-muon", 0, rule=Rule(muon=True)),
    Mode("alone", 0, peers=1),
    Mode("rare", 30, is_rare=True),
    Mode("late", 0, is_late=True),
    Mode("sync", 1),
    Mode("sync", 1, "int8"),
    Mode("local", 10),
    Mode("local", 25),
    Mode("local", 100),
    Mode("local", 25, "int8"),
    Mode("local", 25, "int4"),
    Mode("overlap", 25, overlap_steps=OVERLAP_STEPS),
    Mode("fragments", 24, fragments=4),
    Mode("sparse", 30, "sparse", sparse=Sparse()),
    Mode("plain", 16, outer=plain),
    Mode("nesterov", 16, outer=nesterov),
    Mode("plain", 100, outer=plain),
    Mode("plain", 256, outer=plain),
    Mode("nesterov", 256, outer=nesterov),
    Mode("local", 25, shards="noniid"),
    Mode("local", 100, shards="noniid"),
    Mode("arm-plain", 30, rule=Rule()),
    Mode("arm-nesterov", 30, rule=Rule(0.7, 0.9)),
    Mode("arm-mild", 30, rule=Rule(0.28, 0.5)),
    Mode("arm-slow", 30, rule=Rule(0.1, 0.9)),
    Mode("arm-1.4", 30, rule=Rule(1.4)),
    Mode("arm-2", 30, rule=Rule(2.0)),
    Mode("arm-1.4-falling", 30, rule=Rule(1.4, falls_to=0.7)),
    Mode("arm-nesterov-falling", 30, rule=Rule(0.7, 0.9, falls_to=0.3)),
    Mode("arm-norm", 30, rule=Rule(restores_norm=True)),
    Mode("arm-sparse", 30, rule=Rule(sparse=Sparse())),
    Mode("arm-sparse-1.4", 30, rule=Rule(1.4, sparse=Sparse())),
    Mode("arm-sparse-2", 30, rule=Rule(2.0, sparse=Sparse())),
    Mode("arm-sparse-3", 30, rule=Rule(3.0, sparse=Sparse())),
    Mode("arm-sparse-4", 30, rule=Rule(4.0, sparse=Sparse())),
    Mode("arm-sparse-norm", 30, rule=Rule(restores_norm=True, sparse=Sparse())),
    Mode("arm-sparse-keeps", 30, rule=Rule(sparse=Sparse(decay=1.0))),
    Mode("arm-sparse-256", 30, rule=Rule(sparse=Sparse(top=256))),
    Mode("arm-sparse-exact", 30, rule=Rule(1.4, sparse=Sparse(), exact_small=True)),
    Mode("arm-overlap-5", 30, rule=Rule(overlap=5)),
    Mode("arm-overlap-15", 30, rule=Rule(overlap=15)),
    Mode("arm-overlap-30", 30, rule=Rule(overlap=30)),
    Mode("arm-muon", 30, rule=Rule(muon=True)),
    Mode("arm-unequal", 30, rule=Rule(parts=(1, 1, 2, 4))),
    Mode("arm-unequal-squared", 30, rule=Rule(parts=(1, 1, 2, 4), squared=True)),
]
MODELS = ("albert", "gpt")
KEY = ("text", "size", "steps", "batch", "rate", "model", "mode", "H", "codec", "shards", "seed")


@dataclass(frozen=True)
class Case:
    """What one row is about."""

    size: Size
    model: str
    mode: Mode
    seed: int

    def key(self) -> Row:
        mode = self.mode
        size = self.size
        known = (
            size.text,
            size.name,
            size.steps,
            size.batch,
            size.rate,
            self.model,
            mode.name,
            mode.H,
            mode.codec,
            mode.shards,
            self.seed,
        )
        return dict(zip(KEY, known, strict=True))


class Training:
    """The training of one case."""

    def __init__(self, case: Case) -> None:
        self._mode, self._model, self._seed = case.mode, case.model, case.seed
        self._size = size = case.size
        self._num_steps = case.mode.steps(size.steps)
        self.shards = Shards(case.model, case.mode.shards, PEERS, size, case.seed)

    def row(self) -> Row:
        """Train, and return the figures."""
        began_s = time.process_time()
        seen, sent_bytes, peak = Seen(), 0.0, 0.0
        if self._mode.is_plain_loop:
            loss, seen = self._alone()
        else:
            loss, sent_bytes, peak = self._together()
        return {
            "heldout_loss": round(loss, 5),
            "tokens": self._num_steps * self._mode.peers * self._size.batch * LENGTH,
            "bytes_per_peer": round(sent_bytes),
            "peak_mbit_s": round(peak / MEGABIT, 3),
            "cpu_s": round(time.process_time() - began_s, 1),
            **(seen.row() if seen.steps else {}),
        }

    def new_model(self) -> torch.nn.Module:
        return new_model(self._model, self._size, self._seed)

    def _new_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return BySamples(model.parameters(), self._size.rate, self._num_steps)

    def new_inner(self, model: torch.nn.Module) -> BySamples | MuonBySamples:
        num_steps = self._num_steps // self._mode.H if self._mode.is_rare else self._num_steps
        if self._mode.rule is not None and self._mode.rule.muon:
            return MuonBySamples(model, self._size.rate, num_steps)
        return BySamples(model.parameters(), self._size.rate, num_steps)

    def _alone(self) -> tuple[float, Seen]:
        """One process, or all peers in one."""
        if self._mode.H and self._mode.rule is not None:
            model, seen = train_apart(
                self._mode.rule, self._mode.H, self._num_steps, self._size.batch,
                self.new_model, self.new_inner, self.shards.batch,
            )  # fmt: skip
            return heldout_loss(self._model, model, self._size), seen
        model, seen = self.new_model(), Seen()
        inner, each = self.new_inner(model), self._mode.H if self._mode.is_rare else 1
        before = self.new_model() if self._mode.is_late else None
        for first in range(0, self._num_steps, each):
            steps = range(first, first + each)
            batches = [self.shards.batch(peer, step) for step in steps for peer in range(self._mode.peers)]
            inner_step(model, inner, joined(batches), seen, before)
        return heldout_loss(self._model, model, self._size), seen

    def _together(self) -> tuple[float, float, float]:
        mode, sent, losses = self._mode, Sent(), {}
        per_average = mode.H // mode.fragments

        def train(member: Member) -> None:
            peer, optimizer = int(member.name[-1]), member.optimizer
            together(PEERS, member)
            loaded = optimizer.statistics.states_loaded
            sent.begin(member)
            for step in range(self._num_steps):
                member.step(member.model(**self.shards.batch(peer, step)).loss, BATCH_S)
                if (step + 1) % per_average == 0:
                    self._wait(member, (step + 1) // per_average)
            optimizer.settle()
            sent.end(member)
            counts = optimizer.statistics
            if optimizer.global_step != self._num_steps // per_average or counts.states_loaded != loaded:
                raise RuntimeError(f"{member.name} did not make all steps with the others: {counts}")
            if peer == 0:
                with optimizer.agreed_parameters():
                    losses[peer] = heldout_loss(self._model, member.model, self._size)

        swarm = Swarm(self._seed)
        if mode.overlap_steps:
            swarm.world.network.default_link.latency_s = OVERLAP_LATENCY_S
        for peer in range(PEERS):
            swarm.start(
                f"peer{peer}", self.new_model, self._new_optimizer, train,
                batch_size_per_step=self._size.batch, max_grad_norm=MAX_GRAD_NORM, begins_s=float(peer),
                **mode.options(self._size.batch),
            )  # fmt: skip
        swarm.world.start("meter", sent.watch)
        swarm.run(MAX_VIRTUAL_S)
        return losses[0], statistics.mean(sent.totals()), sent.peak

    def _wait(self, member: Member, global_step: int) -> None:
        """Go on when the peers have averaged, or with overlap, when they have begun to."""
        optimizer = member.optimizer
        while optimizer.global_step < global_step and not optimizer.is_stepping:
            member.peer.sleep(SETTLE_S)
            optimizer.step(batch_size=0)


class Sent:
    """The bytes that each peer sends while it trains."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._training: dict[str, Member] = {}
        self._began: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._totals: list[int] = []

    def begin(self, member: Member) -> None:
        self._training[member.name] = member
        self._began[member.name] = self._seen[member.name] = member.peer.endpoint.bytes_sent

    def end(self, member: Member) -> None:
        self._look_at(member)
        del self._training[member.name]
        self._totals.append(self._seen[member.name] - self._began[member.name])

    def totals(self) -> list[int]:
        return self._totals

    async def watch(self, host: object) -> None:
        """Note the highest rate of a peer in each second of virtual time, until all have ended."""
        while len(self._totals) < PEERS:
            await asyncio.sleep(1.0)
            for member in self._training.values():
                self._look_at(member)

    def _look_at(self, member: Member) -> None:
        now = member.peer.endpoint.bytes_sent
        self.peak = max(self.peak, now - self._seen[member.name])
        self._seen[member.name] = now


def computed(case: Case) -> Row:
    """A row, in a process of its own."""
    return case.key() | Training(case).row()


def prepare() -> None:
    """Prepare a process: Ctrl-C is for the main one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_quiet()


def be_quiet() -> None:
    torch.set_num_threads(1)
    for name in ("manyhands", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def rows_of(cases: Sequence[Case], num_jobs: int) -> Iterator[Row]:
    """Compute the rows, in any order."""
    if num_jobs == 1:
        be_quiet()
        yield from map(computed, cases)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs, prepare) as pool:
        yield from pool.imap_unordered(computed, cases)


def kept_rows(path: Path | None) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace the file at once, so that a run that is broken off leaves all its rows."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(rows, indent=2) + "\n")
    beside.replace(path)


def name_of(row: Row) -> Row:
    return {name: row[name] for name in KEY}


def table(rows: Sequence[Row], size: Size, modes: Sequence[Mode]) -> list[str]:
    """Lines of text; a figure without its counterpart is left out."""
    these = [size.text, size.name, size.steps, size.batch, size.rate]
    chosen = {key: row for row in rows if [*(key := tuple(name_of(row).values()))][: len(these)] == these}
    lines = [
        f"{'model':7} {'mode':20} {'H':>3} {'codec':8} {'shards':7} {'loss':>7} {'over one':>9} {'spread':>7} "
        f"{'tokens':>7} {'clipped':>7} {'cosine':>7} {'ratio':>6} {'MB/peer':>9} {'fewer':>7} {'Mbit/s':>8}  seeds"
    ]
    for model in MODELS:
        for mode in modes:
            *this, _ = Case(size, model, mode, 0).key().values()
            shown = [row for (*key, _), row in chosen.items() if key == this]
            if not shown:
                continue
            one = {row["seed"]: chosen.get((*these, model, "one", 0, "none", "iid", row["seed"])) for row in shown}
            over = [
                100 * (row["heldout_loss"] / base["heldout_loss"] - 1) for row in shown if (base := one[row["seed"]])
            ]
            sync = [row for (*key, _), row in chosen.items() if key == [*these, model, "sync", 1, "none", "iid"]]
            mean_bytes = statistics.mean(row["bytes_per_peer"] for row in shown)
            fewer = ""
            if sync and mean_bytes:
                per_token = mean_bytes / shown[0]["tokens"]
                fewer = f"{statistics.mean(row['bytes_per_peer'] / row['tokens'] for row in sync) / per_token:.1f}x"
            lines.append(
                f"{model:7} {mode.name:20} {mode.H:3} {mode.codec:8} {mode.shards:7} "
                f"{statistics.mean(row['heldout_loss'] for row in shown):7.4f} "
                f"{f'{statistics.mean(over):+.2f}%' if over else '':>9} "
                f"{f'{max(over) - min(over):.2f}%' if over else '':>7} "
                f"{f'{extra:+.0%}' if (extra := extra_tokens(shown, rows)) is not None else '':>7} "
                f"{mean_of(shown, 'clipped'):>7} {mean_of(shown, 'cosine'):>7} {mean_of(shown, 'ratio'):>6} "
                f"{mean_bytes / 1e6:9.2f} {fewer:>7} {max(row['peak_mbit_s'] for row in shown):8.2f}  {len(shown)}"
            )
    return lines


def mean_of(rows: Sequence[Row], name: str) -> str:
    """Of a figure that some modes have."""
    values = [row[name] for row in rows if name in row]
    return f"{statistics.mean(values):.2f}" if values else ""


def extra_tokens(shown: Sequence[Row], rows: Sequence[Row]) -> float | None:
    """How many tokens more than one process to the same loss, as a share; None without rows to tell it.

    Between two runs of one process of different lengths, the logarithm of the loss is taken as linear in that of the
    tokens.
    """
    shares = []
    for row in shown:
        alike = {**name_of(row), "mode": "one", "H": 0, "codec": "none", "shards": "iid"}
        ones = sorted(
            (one["tokens"], one["heldout_loss"]) for one in rows if {**name_of(one), "steps": row["steps"]} == alike
        )
        for (fewer, higher), (more, lower) in itertools.pairwise(ones):
            if lower <= row["heldout_loss"] < higher and row["mode"] != "one":
                way = math.log(higher / row["heldout_loss"]) / math.log(higher / lower)
                shares.append(row["tokens"] / (fewer * (more / fewer) ** way) - 1)
    return statistics.mean(shares) if shares and len(shares) == len(shown) else None


def chosen_modes(text: str) -> list[str]:
    """Names of modes, separated by commas."""
    names, known = text.split(","), list(dict.fromkeys(mode.name for mode in MODES))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no mode {unknown[0]!r}; there are {', '.join(known)}")
    return names


def chosen_models(text: str) -> list[str]:
    """Names of models, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise argparse.ArgumentTypeError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    return names


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="rows; those in it are kept")
    parser.add_argument("--quick", action="store_true", help="models of 0.1 million parameters, and one seed")
    parser.add_argument("--modes", type=chosen_modes, help="some of the above, separated by commas (default: all)")
    parser.add_argument("--models", type=chosen_models, default=list(MODELS), help="albert,gpt (default: both)")
    parser.add_argument("--seeds", type=positive_int, help="default: 3, and 1 with --quick")
    parser.add_argument("--jobs", type=positive_int, default=min(2, os.cpu_count() or 1), help="processes (default: 2)")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="batches of each peer (default: see above)")
    parser.add_argument("--batch", type=positive_int, metavar="N", help="samples of a batch of each peer (default: 4)")
    parser.add_argument("--rate", type=positive, metavar="R", help="the highest learning rate (default: 0.002)")
    parser.add_argument("--h", type=positive_int, metavar="N", help="from one average to the next (default: 30)")
    parser.add_argument("--text", choices=["recipe", "machine"], default="recipe", help="(default: recipe)")
    options = parser.parse_args()
    size = SIZES["quick" if options.quick else "full"]
    size = replace(
        size, steps=options.steps or size.steps, batch=options.batch or size.batch, rate=options.rate or size.rate,
        text=options.text,
    )  # fmt: skip
    num_seeds = options.seeds or (1 if options.quick else 3)
    modes = [mode.with_h(options.h) for mode in MODES]
    modes = [mode for mode in modes if mode.rule is None or not 0 < mode.H < mode.rule.overlap]
    rows = kept_rows(options.json)
    known = [name_of(row) for row in rows]
    cases = [
        case
        for seed in range(num_seeds)
        for mode in modes
        for model in options.models
        if options.modes is None or mode.name in options.modes
        if (case := Case(size, model, mode, seed)).key() not in known
    ]
    with progress_of(len(cases)) as shown:
        for number, row in enumerate(rows_of(cases, options.jobs), 1):
            shown.begin(f"{number} of {len(cases)}: {row['model']} {row['mode']} {row['H']}: {row['heldout_loss']:.4f}")
            rows.append(row)
            if options.json is not None:
                write_rows(options.json, rows)
    print("\n".join(table(rows, size, modes)))


if __name__ == "__main__":
    run(main)
