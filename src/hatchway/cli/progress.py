"""How far something is, on a terminal; nothing is shown elsewhere."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .front import Front, note


def shown(name: str) -> str:
    """A name as it can be shown: names come from sandboxes, and may hold what a terminal would obey."""
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@contextmanager
def meter(front: Front, total: int | None) -> Iterator[Callable[[int, str], None] | None]:
    """Yields what is told how far it is, None where nobody looks."""
    if front.json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.fields[name]}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, name="")

        def tell(done: int, name: str) -> None:
            progress.update(task, completed=done, name=shown(name)[-40:])

        yield tell


@contextmanager
def patience(text: str, after_s: float = 3.0) -> Iterator[None]:
    """Says `text` to whoever has waited for `after_s` seconds at a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(after_s, note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


BEING_MADE = (
    "the sandbox is being made; the first one of a size takes longer, because a snapshot for all others is baked"
)
"""What whoever waits for a sandbox is told."""
