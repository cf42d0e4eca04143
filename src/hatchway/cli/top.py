"""`hatchway top`: which sandboxes use what, those that use most CPU first."""

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .front import Front
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import SandboxInfo, SandboxMetrics

AT_ONCE = 8
"""Sandboxes that are asked for at the same time."""
HEADINGS = ("SANDBOX", "NAME", "STATE", "CPU %", "MEMORY", "IN GUEST", "DISK", "PROCS", "LOAD")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("top")(top)


@dataclass(frozen=True)
class Row:
    """One sandbox; `cpu` is the share of one CPU in percent since the round before, None in its first round."""

    info: "SandboxInfo"
    metrics: "SandboxMetrics | None"
    cpu: float | None


class Rounds:
    """Asks again and again; remembers what each machine had used of the CPU."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._before: dict[str, tuple[float, float]] = {}

    def next(self) -> list[Row]:
        """One round."""
        infos = list(self._front.client.sandboxes.list())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(self._ask, infos))
        rows = [Row(info, metrics, self._share(metrics)) for info, metrics in zip(infos, found, strict=True)]
        seen = [metrics for metrics in found if metrics is not None]
        self._before = {one.sandbox_id: (one.observed_at, one.host.cpu_s) for one in seen}
        return sorted(rows, key=lambda row: (-(row.cpu or 0.0), row.info.id))

    def _ask(self, info: "SandboxInfo") -> "SandboxMetrics | None":
        from hatchway.client import HatchwayError

        try:
            return self._front.client.sandboxes.metrics(info.id)
        except HatchwayError:  # it is being made or deleted, or its node is away: it has its row without numbers
            return None

    def _share(self, metrics: "SandboxMetrics | None") -> float | None:
        before = None if metrics is None else self._before.get(metrics.sandbox_id)
        if metrics is None or before is None or metrics.observed_at <= before[0]:
            return None
        # A machine that was started anew since then has used less than it had.
        return max(0.0, (metrics.host.cpu_s - before[1]) / (metrics.observed_at - before[0]) * 100)


@with_front
def top(
    front: Front,
    once: Annotated[bool, typer.Option("--once", help="Show one table, measured over one interval, and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600, help="Seconds from one to the next.")
    ] = 2.0,
) -> None:
    """Show what the sandboxes use, those that use most CPU first, until Ctrl-C."""
    rounds = Rounds(front)
    rounds.next()
    if not once and not front.json and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):
            _live(rounds, interval)
        return
    with contextlib.suppress(KeyboardInterrupt):
        for rows in _each(rounds, interval, once):
            _print(rows, front.json)


def _each(rounds: Rounds, interval: float, once: bool) -> Iterator[list[Row]]:
    while True:
        time.sleep(interval)
        yield rounds.next()
        if once:
            return


def _live(rounds: Rounds, interval: float) -> None:
    from rich.live import Live

    from .output import table

    with Live(table(HEADINGS, []), screen=True, auto_refresh=False) as live:
        for rows in _each(rounds, interval, once=False):
            live.update(table(HEADINGS, [_cells(row) for row in rows]), refresh=True)


def _print(rows: list[Row], json: bool) -> None:
    from .output import print_json, print_table

    if not json:
        print_table(HEADINGS, [_cells(row) for row in rows])
        return
    shown: list[dict[str, Any]] = []
    for row in rows:
        one: dict[str, Any] = {
            "id": row.info.id,
            "name": row.info.name,
            "state": row.info.state,
            "cpu_percent": row.cpu,
        }
        if row.metrics is not None:
            one |= {"guest": row.metrics.guest, "guest_error": row.metrics.guest_error, "host": row.metrics.host}
        shown.append(one)
    print_json({"at": time.time(), "sandboxes": shown})


def _cells(row: Row) -> tuple[object, ...]:
    cells: tuple[object, ...] = (row.info.id, row.info.name, row.info.state)
    if row.metrics is None:
        return (*cells, *[None] * (len(HEADINGS) - len(cells)))
    guest, host = row.metrics.guest, row.metrics.host
    inside = (
        guest and f"{_mib(guest.memory_total_bytes - guest.memory_available_bytes)} of {_mib(guest.memory_total_bytes)}"
    )
    return (
        *cells,
        None if row.cpu is None else f"{row.cpu:.1f}",
        _mib(host.memory_private_bytes) if host.memory_private_bytes else None,
        inside,
        _mib(host.disk_bytes),
        guest and guest.processes,
        guest and f"{guest.load1:.2f}",
    )


def _mib(octets: int) -> str:
    return f"{octets / 2**20:.0f} MiB"
