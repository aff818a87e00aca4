"""Cost of the collaborative optimizer in a local step, in time and memory.

    python benchmarks/optimizer_overhead.py [--batches 60] [--batch-size 8] [--memory-mb 192]
        [--cases idle,busy,local] [--json FILE]

A small ALBERT (that of ``manyhands train``: 1.5 million parameters, batches of samples of 64 tokens, one thread) runs
forward and backward, with plain torch and with ``manyhands.Optimizer`` in the same process, batch by batch in turns.
Plain torch does nothing else but in ``local``, so adding gradients up is part of the overhead. The figures:

  idle_overhead        additional time of a local step without a round, over the plain one's; 0.02 is 2%. The first
                       decile of each kind is used, since other load on the machine only adds to it
  busy_overhead        the same while a round is averaged in the background (``delay="gradients"``) with a peer in
                       another process; needs a second, idle core
  local_overhead       additional time of an inner step with ``local_steps``, without a round, over a plain batch with
                       its step of AdamW: both make the same update
  idle_overhead_less_core_wait, busy_overhead_less_core_wait, local_overhead_less_core_wait
                       the same without the time in which the training thread was ready, but no core was free: the cost
                       of Python's lock and our own work, on a busy machine too. Linux only
  plain_step_s         duration of the plain local step; the time added to it hardly depends on it. The optimizer
                       advises 0.2 to 2 s
  peak_extra_x_params  peak memory beyond that of plain AdamW over a few global steps with another peer, in multiples
                       of the parameters (float32): synchronous steps, ``delay="gradients"``, ``offload`` alone, and
                       ``local_steps`` with Nesterov's momentum; Linux only. The model is on the host here, so the
                       figure includes the copies of delay, offload and local steps, and what would be in the device's
                       memory. Freed tensors go back to the system at once: otherwise what malloc keeps of plain
                       torch's differs by a third from run to run.

An overhead below 0 is noise. Other load disturbs busy_overhead most, which needs two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _command_line import Parser, json_path, positive_int, progress_of, run
from _memory import free_at_once, peak_own_bytes, start_peak
from _worker import Worker

import manyhands
from manyhands.averaging import AveragingConfig
from manyhands.optim import ProgressConfig
from manyhands.optim.local_steps import nesterov

MEGA = 1_000_000
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
NEVER = 10**9
BATCH_SIZE = 8
SEQ_LENGTH = 64
VOCABULARY = 4096
AVERAGING = AveragingConfig(codec="none", matchmaking_time_s=10.0)
EAGER = ProgressConfig(min_refresh_s=0.02, max_refresh_s=0.1, ttl_s=10.0)
MEMORY_TENSORS = 16
MEMORY_STEPS = 4
WARM_UP_BATCHES = 8
PARTNER_PERIOD_S = 0.005
MAX_TRIES = 100
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # running, waiting for a core, time slices
OVERHEADS = ("idle", "busy", "local")
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "delay": {"delay": "gradients"},
    "offload": {"offload": True},
    "local": {"local_steps": manyhands.LocalSteps(nesterov)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "idle": {},
    "busy": {"delay": "gradients", "progress": EAGER},
    "local": {"local_steps": manyhands.LocalSteps(nesterov)},
}
"""Of the optimizer, for each overhead."""


def small_albert() -> torch.nn.Module:
    """The default model of the recipe."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=128, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=SEQ_LENGTH, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model: torch.nn.Module = transformers.AlbertForPreTraining(config)
    return model


def large_vectors(num_bytes: int) -> torch.nn.Module:
    """Parameters of this size together, with gradients that take no other memory."""
    size = num_bytes // 4 // MEMORY_TENSORS
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for _ in range(MEMORY_TENSORS)])


class Local:
    """One model and a plain optimizer."""

    def __init__(self, optimizer: Any, model: torch.nn.Module, batch_size: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batch_size = batch_size
        self._generator = torch.Generator().manual_seed(1)

    def batch(self) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, VOCABULARY, (self.batch_size, SEQ_LENGTH), generator=self._generator)
        return {"input_ids": ids, "labels": ids, "sentence_order_label": ids[:, 0] % 2}

    def compute(self) -> None:
        """Run forward and backward."""
        self.model(**self.batch()).loss.backward()


class Beside:
    """Plain torch and the collaborative optimizer in one process."""

    def __init__(self, initial_peers: list[str], case: str, batch_size: int) -> None:
        torch.set_num_threads(1)
        model = small_albert()
        self._plain = Local(torch.optim.AdamW(model.parameters(), lr=1e-3), model, batch_size)
        model = small_albert()
        self._peer = manyhands.Peer(initial_peers, listen=LISTEN)
        self._is_busy, self._steps = case == "busy", case == "local"
        optimizer = new_optimizer(self._peer, model, 2 if self._is_busy else NEVER, **OPTIONS[case])
        self._ours = Local(optimizer, model, batch_size)

    def address(self) -> list[str]:
        return self._peer.addresses

    def overheads(self, num_batches: int) -> list[float]:
        """Seconds of a fast plain batch, and what ours add to it, with and without the wait for a core."""
        for _ in range(WARM_UP_BATCHES):
            self._plain_step()
            self._our_step()
        ours, plain = [], []
        for _ in range(num_batches):
            if self._is_busy:
                self._begin_round()
            ours.append(self._our_step())
            self._ours.optimizer.settle()
            plain.append(self._plain_step())
        fast = [undisturbed_s([times[kind] for times in plain]) for kind in range(len(plain[0]))]
        shares = [undisturbed_s([times[kind] for times in ours]) / fast_s - 1 for kind, fast_s in enumerate(fast)]
        return [fast[0], *shares]

    def _begin_round(self) -> None:
        for _ in range(MAX_TRIES):
            self._our_step()
            if self._ours.optimizer.is_stepping:
                return
        raise RuntimeError(f"no round begins: {self._ours.optimizer.statistics}")

    def _plain_step(self) -> tuple[float, ...]:
        def step() -> None:
            self._plain.compute()
            if self._steps:
                self._plain.optimizer.step()

        taken_s = taken_by(step)
        self._plain.optimizer.zero_grad()
        return taken_s

    def _our_step(self) -> tuple[float, ...]:
        def step() -> None:
            self._ours.compute()
            self._ours.optimizer.step(batch_size=self._ours.batch_size)

        taken_s = taken_by(step)
        self._ours.optimizer.zero_grad()
        return taken_s

    def close(self) -> None:
        self._peer.close()


def taken_by(work: Callable[[], object]) -> tuple[float, ...]:
    """Seconds of the call and, on Linux, those without this thread's wait for a core."""
    started, waited = time.perf_counter(), core_wait_s()
    work()
    taken_s, waited_s = time.perf_counter() - started, core_wait_s() - waited
    return (taken_s, taken_s - waited_s) if SCHEDSTAT.exists() else (taken_s,)


def core_wait_s() -> float:
    """Seconds for which this thread was ready, but no core was free; Linux only."""
    return int(SCHEDSTAT.read_text().split()[1]) / 1e9 if SCHEDSTAT.exists() else 0.0


def undisturbed_s(seconds: Sequence[float]) -> float:
    """The first decile."""
    return sorted(seconds)[len(seconds) // 10]


def new_optimizer(peer: manyhands.Peer, model: torch.nn.Module, target: int, **options: Any) -> manyhands.Optimizer:
    """A collaborative AdamW."""
    return manyhands.Optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), peer=peer, run_id="overhead", target_batch_size=target,
        averaging=AVERAGING, **options,
    )  # fmt: skip


class Partner:
    """Another peer, which comes to every round at once and keeps its core idle otherwise."""

    def __init__(self, initial_peers: list[str], memory_bytes: int, target: int, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._peer = manyhands.Peer(initial_peers, listen=LISTEN)
        model = large_vectors(memory_bytes) if memory_bytes else small_albert()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._optimizer = new_optimizer(self._peer, model, target, progress=EAGER, **options)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        with contextlib.suppress(manyhands.ManyhandsError):  # the other peer has left
            while not self._is_over.wait(PARTNER_PERIOD_S):
                self._optimizer.step(batch_size=0 if self._optimizer.samples_accumulated else 1)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(0.5)
        self._peer.close()  # ends a round that the other peer does not join any more
        self._thread.join(5.0)


class MemoryUse:
    """Makes a few steps with large parameters."""

    def __init__(self, num_bytes: int, mode: str | None) -> None:
        torch.set_num_threads(1)
        free_at_once()
        self._peer = manyhands.Peer(listen=LISTEN)
        self._model = large_vectors(num_bytes)
        self._mode = mode

    def address(self) -> list[str]:
        return self._peer.addresses

    def join(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        if self._mode is None:
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        else:
            self._optimizer = new_optimizer(self._peer, self._model, 2, progress=EAGER, **MODES[self._mode])

    def peak_bytes(self) -> int:
        """Own memory at its peak, over the steps after the first."""
        self._steps(1)
        gc.collect()
        start_peak(os.getpid())
        self._steps(MEMORY_STEPS)
        return peak_own_bytes(os.getpid())

    def _steps(self, num_steps: int) -> None:
        if self._mode is None:
            for _ in range(num_steps):
                self._optimizer.step()
            return
        goal = self._optimizer.statistics.rounds_committed + num_steps
        deadline = time.monotonic() + 50
        while self._optimizer.num_peers < 2 and time.monotonic() < deadline:
            self._optimizer.step(batch_size=0)
            time.sleep(0.01)
        while self._optimizer.statistics.rounds_committed < goal:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rounds are made: {self._optimizer.statistics}")
            self._optimizer.step(batch_size=1)
            time.sleep(0.01)
        self._optimizer.settle()

    def close(self) -> None:
        self._peer.close()


def overheads(case: str, num_batches: int, batch_size: int) -> list[float]:
    """Seconds of a plain step, and what ours add to it, in one case."""
    with contextlib.ExitStack() as stack:
        subject = Worker(Beside, [], case, batch_size)
        stack.callback(subject.close)
        addresses = subject.call("address")
        if case == "busy":
            partner = Worker(Partner, addresses, 0, 2, {})
            stack.callback(partner.close)
        shares: list[float] = subject.call("overheads", num_batches, timeout_s=550.0)
        return shares


def peak_bytes(num_bytes: int, mode: str | None) -> int:
    """Peak memory in one case."""
    with contextlib.ExitStack() as stack:
        subject = Worker(MemoryUse, num_bytes, mode)
        stack.callback(subject.close)
        addresses = subject.call("address")
        subject.call("join")
        if mode is not None:
            shared = {name: option for name, option in MODES[mode].items() if name == "local_steps"}
            partner = Worker(Partner, addresses, num_bytes, 2, shared)
            stack.callback(partner.close)
        peak: int = subject.call("peak_bytes", timeout_s=120.0)
        return peak


def measure(cases: list[str], num_batches: int, batch_size: int, num_bytes: int) -> dict[str, Any]:
    """The figures of the given cases."""
    result: dict[str, Any] = {}
    with progress_of(len(cases) + 1) as steps:
        for case in [case for case in OVERHEADS if case in cases]:
            steps.begin(f"overhead: {case}")
            names = (f"{case}_overhead", f"{case}_overhead_less_core_wait")
            result["plain_step_s"], *shares = overheads(case, num_batches, batch_size)
            result.update(zip(names, shares, strict=False))
        modes = [mode for mode in MODES if mode in cases] if sys.platform == "linux" else []
        if modes:
            steps.begin("memory of plain torch")
            plain, extra = peak_bytes(num_bytes, None), {}
            for mode in modes:
                steps.begin(f"memory: {mode}")
                extra[mode] = (peak_bytes(num_bytes, mode) - plain) / num_bytes
            result["peak_extra_x_params"] = extra
    return result


def cases_of(text: str) -> list[str]:
    """Case names, separated by commas."""
    cases = text.split(",")
    if unknown := set(cases) - {*OVERHEADS, *MODES}:
        known = ", ".join(dict.fromkeys([*OVERHEADS, *MODES]))
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {known}")
    return cases


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batches", type=positive_int, default=60, help="pairs of local steps, for each overhead")
    parser.add_argument("--batch-size", type=positive_int, default=BATCH_SIZE, help="samples of a local step")
    parser.add_argument("--memory-mb", type=positive_int, default=192, help="of parameters, for the memory")
    parser.add_argument(
        "--cases", type=cases_of, default=[*OVERHEADS, *MODES], help="some of idle,busy,local,sync,delay,offload"
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures to a file")
    options = parser.parse_args()
    result = measure(options.cases, options.batches, options.batch_size, options.memory_mb * MEGA)
    if "plain_step_s" in result:
        print(f"plain_step_s                  {result['plain_step_s']:.3f}")
    for name, share in result.items():
        if "_overhead" in name:
            print(f"{name:29} {share:+.1%}")
    for mode, times in result.get("peak_extra_x_params", {}).items():
        print(f"peak_extra_x_params  {mode:8} {times:.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run(main)
