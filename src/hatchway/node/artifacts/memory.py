"""The whole memory of a capture as extents: its base with its changes over it, without what is zero."""

import os
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from hatchway.node.artifacts.extents import Extent, grains
from hatchway.node.vmm import captures
from hatchway.node.vmm.seam import SnapshotMismatch

_WINDOW = 4 << 20


def whole(folder: Path, size: int) -> Iterator[Extent]:
    """Yields the memory, of `size` octets, of the capture in `folder`.

    Constant memory, but for the list of changed runs. Raises `SnapshotMismatch` for a damaged list of changes, `OSError`.
    """
    with (folder / captures.BASE).open("rb", buffering=0) as base, (folder / captures.DIFF).open("rb") as diff:
        runs = captures.changed_runs(diff, os.fstat(base.fileno()).st_size, folder.name)
        starts = [run.offset for run in runs]
        for start in range(0, size, _WINDOW):
            end = min(start + _WINDOW, size)
            window = _base(base.fileno(), start, end)
            first = max(0, bisect_right(starts, start) - 1)
            for run in runs[first:]:
                if run.offset >= end:
                    break
                begin, stop = max(run.offset, start), min(run.offset + run.length, end)
                if begin < stop:
                    window = window or bytearray(end - start)
                    octets = os.pread(diff.fileno(), stop - begin, run.at + begin - run.offset)
                    if len(octets) != stop - begin:
                        raise SnapshotMismatch(f"The changed pages of the capture {folder.name} are incomplete.")
                    window[begin - start : stop - start] = octets
            if window is not None:
                yield from grains(start, bytes(window), zeros=False)


def _base(fd: int, start: int, end: int) -> bytearray | None:
    """The base's octets; None where it has only a hole."""
    try:
        if os.lseek(fd, start, os.SEEK_DATA) >= end:
            return None
    except OSError:
        return None
    window = bytearray(end - start)
    read = 0
    while read < len(window):
        octets = os.pread(fd, len(window) - read, start + read)
        if not octets:
            break
        window[read : read + len(octets)] = octets
        read += len(octets)
    return window
