"""``manyhands plan``: predict step times and bytes of a run, and choose its kind of steps."""

from __future__ import annotations

import re
import sys
from json import dumps
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from manyhands.base.errors import ConfigError
from manyhands.base.text import amount_of
from manyhands.planning import Plan, Run, Step, measured_constants, plan_of

TABLE_WIDTH = 80
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt]?)", re.IGNORECASE)


def plan(
    *,
    params: Annotated[str, Parameter(help="Trained parameters of the model: 18M, 1.5B or 110000.")],
    peers: Annotated[int, Parameter(help="Peers that train at the same time.")],
    mbit: Annotated[
        float, Parameter(help="Megabits per second of a peer's line, in its slower direction: usually up.")
    ],
    samples_per_s: Annotated[
        float, Parameter(help="Samples that ONE peer computes in a second, without averaging; not those of all peers.")
    ],
    target_batch_size: Annotated[int, Parameter(help="Samples of all peers in one global step.")],
    rtt_ms: Annotated[
        float, Parameter(help="Milliseconds of a round trip between two peers, as ping shows it.")
    ] = Run.rtt_ms,
    json: Annotated[bool, Parameter(help="Print one JSON object, for programs.")] = False,
) -> None:
    """Predict step times and bytes of a run, and say which kind of steps to choose.

    Nothing is started. For 40 volunteers with lines of 50 Mbit/s, each of whom
    computes 20 samples a second:

        manyhands plan --params 18M --peers 40 --mbit 50 --samples-per-s 20
            --target-batch-size 4096

    "sent" is what one peer sends in a step, and "10% from" the target batch size
    from which averaging takes less than a tenth of the time. Local steps are shown
    at that target, if it is above yours.
    """
    planned = Run(
        params=_count_of(params),
        peers=peers,
        mbit=mbit,
        samples_per_s=samples_per_s,
        target_batch_size=target_batch_size,
        rtt_ms=rtt_ms,
    )
    result = plan_of(planned, measured_constants())
    if json:
        print(dumps({"run": msgspec.to_builtins(planned), **msgspec.to_builtins(result)}))  # noqa: T201
    else:
        _print(result)
    sys.stdout.flush()


def _count_of(text: str) -> int:
    """Read a number such as ``18M``.

    Raises:
        ConfigError: it is none.
    """
    match = COUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    if match is None:
        raise ConfigError(f"--params is {text!r}; it must be a number above 0, for example 18M, 1.5B or 110000")
    return round(float(match[1]) * SUFFIXES[match[2].lower()])


def _print(result: Plan) -> None:
    console = Console(width=TABLE_WIDTH, highlight=False)
    console.print(_table(result))
    choice = result.choice
    console.print(f"\n{choice.why}\n\n    manyhands.Optimizer(\n        ...,", markup=False)
    for argument in choice.arguments:
        console.print(f"        {argument},", markup=False)
    console.print("    )")


def _table(result: Plan) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold", width=TABLE_WIDTH)
    for heading in ("steps", "codec", "target", "step", "averaging", "sent", "a day", "10% from"):
        is_text = heading in ("steps", "codec")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    choice = result.choice
    kind = ""
    for step in result.steps:
        is_chosen = (step.steps, step.codec) == (choice.steps, choice.codec)
        table.add_row(*_cells(step, shows_kind=step.steps != kind), style="green" if is_chosen else None)
        kind = step.steps
    return table


def _cells(step: Step, *, shows_kind: bool) -> tuple[str, ...]:
    return (
        step.steps if shows_kind else "",
        step.codec,
        f"{step.target_batch_size}",
        _seconds(step.step_s),
        f"{step.averaging_share:.1%}",
        amount_of(round(step.bytes_per_step)),
        amount_of(round(step.bytes_per_day)),
        f"{step.target_for_little}",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
