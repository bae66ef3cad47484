"""Text tables for reports."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 160
"""Columns of a report: fixed, so that the same report is the same text in a file, a log and a terminal."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A titled table as plain text; cells that do not fit are wrapped, never cut."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
