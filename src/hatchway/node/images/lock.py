"""One builder at a time per folder; whoever waits sees what the other is doing."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hatchway.domain.errors import Unavailable
from hatchway.node.images.progress import BuildProgress, Report

_POLL_S = 0.2


class _Holder(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    progress: BuildProgress


@contextlib.contextmanager
def exclusive(folder: Path, report: Report, *, within_s: float) -> Iterator[Report]:
    """Holds the folder's lock; the kernel drops it when the process dies.

    Yields the function to report progress with from then on: it shows the steps to those who wait too. They get events of
    phase `waiting`, one per step of the holder. Raises `Unavailable("build_busy")` after `within_s` seconds.
    """
    status = folder / ".building"
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait(descriptor, status, report, within_s)

        def shared(event: BuildProgress) -> None:
            holder = _Holder(pid=os.getpid(), progress=event)
            temporary = status.with_suffix(".new")
            temporary.write_bytes(msgspec.json.encode(holder))
            temporary.replace(status)
            report(event)

        try:
            yield shared
        finally:
            status.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, status: Path, report: Report, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    shown: BuildProgress | None = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return
        holder = _holder(status)
        event = BuildProgress(phase="waiting", message="Another build of this folder is running.")
        if holder is not None:
            event = BuildProgress(
                phase="waiting",
                fraction=holder.progress.fraction,
                message=f"Process {holder.pid} is building: {holder.progress.phase}: {holder.progress.message}",
            )
        if event != shown:
            report(event)
            shown = event
        if time.monotonic() > deadline:
            raise Unavailable(
                "build_busy",
                f"{event.message} It did not end within {within_s:.0f} s.",
                "Wait for it, or end that process, then try again.",
            )
        time.sleep(_POLL_S)


def _holder(status: Path) -> _Holder | None:
    try:
        return msgspec.json.decode(status.read_bytes(), type=_Holder)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
