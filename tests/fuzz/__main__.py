"""``make fuzz``: feed all decoders with bad input for a while, and say how much they were given.

::

    python -m tests.fuzz --seconds 60               all targets
    python -m tests.fuzz --target frames --seed 7   one of them, with other inputs
    python -m tests.fuzz --target frames --replay build/fuzz/frames-0123456789ab.bin
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.fuzz.runner import Session
from tests.fuzz.target import Target, fault_in
from tests.fuzz.targets import TARGETS

FOUND = Path("build/fuzz")
SLICE_S = 0.1


def main(arguments: list[str] | None = None, targets: dict[str, Target] | None = None, found: Path = FOUND) -> int:
    """Returns 1 when a target failed."""
    targets = TARGETS if targets is None else targets
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Feed all decoders with bad input.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together (default: 60)")
    parser.add_argument("--target", action="append", choices=sorted(targets), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="of the mutations (default: another one each time)")
    parser.add_argument("--replay", type=Path, help="try the bytes of this file only; with one --target")
    options = parser.parse_args(arguments)
    chosen = [targets[name] for name in options.target or targets]
    console = Console(highlight=False)
    if options.replay is not None:
        if len(chosen) != 1:
            parser.error("--replay needs one --target")
        return _replay(chosen[0], options.replay.read_bytes(), console)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    sessions = [Session(target, seed) for target in chosen]
    _run(sessions, options.seconds, console)
    return _report(sessions, seed, found, console)


def _run(sessions: list[Session], seconds: float, console: Console) -> None:
    began = time.monotonic()
    slice_s = min(SLICE_S, seconds / len(sessions))
    columns = (TextColumn("fuzzing"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[what]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=seconds, what="")
        while time.monotonic() - began < seconds and not all(session.finding for session in sessions):
            for session in sessions:
                until = min(time.monotonic() + slice_s, began + seconds)
                while time.monotonic() < until and session.finding is None:
                    session.feed(1)
                num_inputs = sum(other.num_inputs for other in sessions)
                what = f"{num_inputs} inputs, now {session.target.name}"
                progress.update(bar, completed=time.monotonic() - began, what=what)


def _report(sessions: list[Session], seed: int, found: Path, console: Console) -> int:
    table = Table("target", "inputs tried", "", title=f"seed {seed}")
    table.columns[1].justify = "right"
    for session in sessions:
        outcome = "ok" if session.finding is None else "[red]failed[/red]"
        table.add_row(escape(session.target.name), f"{session.num_inputs}", outcome)
    table.add_section()
    table.add_row("all", f"{sum(session.num_inputs for session in sessions)}", "")
    console.print(table)
    findings = [session.finding for session in sessions if session.finding is not None]
    for finding in findings:
        path = finding.save(found)
        console.print(f"{finding.target}: {finding.fault}", markup=False)
        console.print(f"  {len(finding.data)} bytes, {finding.data[:60]!r}", markup=False)
        console.print(f"  python -m tests.fuzz --target {finding.target} --replay {path}", markup=False, soft_wrap=True)
    return 1 if findings else 0


def _replay(target: Target, data: bytes, console: Console) -> int:
    faults = [fault for traced in (False, True) if (fault := fault_in(target, data, traced=traced)) is not None]
    if not faults:
        console.print("it is taken as it should be", markup=False)
        return 0
    console.print(faults[0], markup=False)
    try:
        target.run(data)
    except Exception:  # noqa: BLE001 (to show it)
        console.print(traceback.format_exc(), markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
