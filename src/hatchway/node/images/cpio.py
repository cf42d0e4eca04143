"""Writes cpio archives in the "newc" form that the kernel unpacks as its first file system.

The same entries give the same octets: sorted by path, no times, inode numbers counted up.
"""

import stat
from dataclasses import dataclass

MAX_FILE = 0xFFFFFFFF


@dataclass(frozen=True)
class Entry:
    """A file or, without `data`, a folder; `path` is relative, owner is root, `mode` the permission bits."""

    path: str
    mode: int
    data: bytes | None = None


def archive(entries: list[Entry]) -> bytes:
    """Returns the archive; folders that an entry needs are made before it (0755).

    Raises `ValueError` for a path that is absolute, has empty, `.` or `..` parts or a NUL, or occurs twice, and for a file
    larger than `MAX_FILE`.
    """
    all_entries: dict[str, Entry] = {}
    for entry in entries:
        parts = entry.path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in entry.path or entry.path == _END:
            raise ValueError(f"not a path for an archive: {entry.path!r}")
        known = all_entries.get(entry.path)
        if known is not None:
            raise ValueError(f"twice in the archive: {entry.path!r}")
        all_entries[entry.path] = entry
    for path in list(all_entries):
        while "/" in path:
            path = path.rpartition("/")[0]
            parent = all_entries.setdefault(path, Entry(path, 0o755))
            if parent.data is not None:
                raise ValueError(f"a file is in the way: {path!r}")
    # Sorted by parts, so that a folder comes before what is in it.
    ordered = sorted(all_entries.values(), key=lambda entry: entry.path.split("/"))
    pieces = [_record(number, entry) for number, entry in enumerate(ordered, start=1)]
    pieces.append(_header(0, 0, 0, 1, _END))
    return b"".join(pieces)


_END = "TRAILER!!!"


def _record(number: int, entry: Entry) -> bytes:
    if entry.data is None:
        return _header(number, stat.S_IFDIR | entry.mode, 0, 2, entry.path)
    if len(entry.data) > MAX_FILE:
        raise ValueError(f"too large for the archive: {entry.path!r}")
    body = entry.data + bytes(-len(entry.data) % 4)
    return _header(number, stat.S_IFREG | entry.mode, len(entry.data), 1, entry.path) + body


def _header(number: int, mode: int, size: int, links: int, path: str) -> bytes:
    name = path.encode() + b"\0"
    # magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    numbers = (number, mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in numbers) + name
    return header + bytes(-len(header) % 4)
