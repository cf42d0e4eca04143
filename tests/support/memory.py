"""What a process has in its memory: searched as root, page by page, without making it have more."""

import struct
from collections.abc import Mapping

PAGE = 4096
PIECE = 4096
"""Pages that are looked at at once."""
_THERE = 1 << 63 | 1 << 62
"""Of an entry of `pagemap`: the page is present, or swapped."""


def found_in(pid: int, wanted: Mapping[str, tuple[bytes, ...]]) -> set[str]:
    """The names of what is in a process's memory in any of its forms. Raises `OSError` when it cannot be read, and where nothing was."""
    found: set[str] = set()
    longest = max(len(form) for forms in wanted.values() for form in forms)
    seen = 0
    with (
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "rb", 0) as mem,
        open(f"/proc/{pid}/pagemap", "rb", 0) as pagemap,
    ):
        for line in maps:
            addresses, mode, *_ = line.split()
            if "r" not in mode or "[v" in line:
                continue
            begin, end = (int(text, 16) for text in addresses.split("-"))
            tail = b""
            for first, count in _runs(pagemap, begin // PAGE, end // PAGE):
                try:
                    mem.seek(first * PAGE)
                    octets = tail + mem.read(count * PAGE)
                except OSError:  # it went away meanwhile
                    continue
                seen += count
                found |= {name for name, forms in wanted.items() if any(form in octets for form in forms)}
                tail = octets[-longest:]
    if seen == 0:
        raise OSError(f"nothing of the memory of {pid} could be read")
    return found


def _runs(pagemap: object, first: int, end: int) -> list[tuple[int, int]]:
    """Runs of pages that are there: the first one of each and how many."""
    runs: list[tuple[int, int]] = []
    pagemap.seek(first * 8)  # type: ignore[attr-defined]
    octets = pagemap.read((end - first) * 8)  # type: ignore[attr-defined]
    for number, (entry,) in enumerate(struct.iter_unpack("Q", octets), first):
        if not entry & _THERE:
            continue
        if runs and sum(runs[-1]) == number and runs[-1][1] < PIECE:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
