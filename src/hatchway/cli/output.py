"""How results are printed: tables for people, JSON for programs, octets as they are."""

import os
import select
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.table import Table


def to_json(value: Any) -> str:
    """Returns `value`, records included, as JSON with sorted members on one line."""
    return msgspec.json.encode(value, order="sorted").decode()


def print_json(value: Any) -> None:
    """Prints `value` as JSON on one line."""
    print(to_json(value), flush=True)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> "Table":
    """A table for a terminal. Empty cells show as a dash."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        drawn.add_column(heading, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text("-" if cell is None or cell == "" else str(cell)) for cell in row))
    return drawn


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table: drawn for a terminal, plain columns for a pipe. Empty cells show as a dash."""
    cells = [["-" if cell is None or cell == "" else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(table(headings, cells))
        return
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    for row in [list(headings), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_fields(fields: dict[str, Any]) -> None:
    """Prints the fields of one object, a line each; what is empty is left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", {}, [], ())}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        text = when(value) if name.endswith(("_at", "_until")) and isinstance(value, int | float) else value
        print(f"{name.ljust(width)}  {to_json(text) if isinstance(text, dict | list | tuple) else text}")


def when(seconds: float | None) -> str:
    """Returns a Unix time as local date and time, a dash for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def write_octets(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, byte for byte; waits where the other side made the descriptor non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
