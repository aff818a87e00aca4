"""Rows of live views, which fit the width of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

MIN_BAR = 6


def fitted(parts: Sequence[str], width: int, between: str = ", ") -> str:
    """As many of the parts as fit into a row, at least the first one."""
    fitting = list(parts)
    while len(fitting) > 1 and cell_len(between.join(fitting)) > width:
        fitting.pop()
    return between.join(fitting)


def bar_rows(*rows: tuple[RenderableType, tuple[float, float], RenderableType]) -> Table:
    """Rows of a text, a bar for (part, whole), and a text, as wide as the terminal."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    for before, (part, whole), after in rows:
        bar = ProgressBar(whole, part, style="dim", complete_style="green", finished_style="green")
        grid.add_row(before, bar, after)
    return grid
