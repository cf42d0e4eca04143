"""What E2B says of a file (`EntryInfo`), from an entry of ours."""

import posixpath
import stat
from datetime import UTC, datetime

from hatchway.client import FileEntry

ATTRIBUTES = "e2b."
"""How the names of extended attributes begin that hold a file's metadata, below the namespace `user`."""

_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY"}
_LETTERS = {"dir": "d", "symlink": "L", "fifo": "p", "socket": "S", "char": "Dc", "block": "D"}
_BITS = "rwxrwxrwx"
_LAST_NS = 253_402_300_799 * 10**9
"""The end of the year 9999: no text of a time is later."""


def info(entry: FileEntry) -> dict[str, object]:
    """The entry. Of a symbolic link, type and mode are those of what it leads to, and all else is its own."""
    shown: dict[str, object] = {
        "name": entry.name,
        "type": _TYPES.get(entry.type, "FILE_TYPE_UNSPECIFIED"),
        "path": cleaned(entry.path),
        "size": str(entry.size),
        "mode": entry.mode & 0o777,
        "permissions": permissions(entry),
        "owner": entry.user,
        "group": entry.group,
        "modifiedTime": _time(entry.mtime_ns),
        "metadata": entry.attributes,
    }
    if entry.type == "symlink":
        led = entry.leads_to
        shown["type"] = "FILE_TYPE_UNSPECIFIED" if led is None else _TYPES.get(led.type, "FILE_TYPE_UNSPECIFIED")
        shown["mode"] = 0 if led is None else led.mode & 0o777
        # What leads nowhere is shown as leading to itself.
        shown["symlinkTarget"] = shown["path"] if led is None else led.path
    return {name: as_text(value) if isinstance(value, str) else value for name, value in shown.items()}


def permissions(entry: FileEntry) -> str:
    """The mode as E2B's agent writes it: `-rw-r--r--`, `drwxr-xr-x`, `Lrwxrwxrwx`, `dtrwxrwxrwx`."""
    letters = _LETTERS.get(entry.type, "")
    special = ((stat.S_ISUID, "u"), (stat.S_ISGID, "g"), (stat.S_ISVTX, "t"))
    letters += "".join(letter for bit, letter in special if entry.mode & bit)
    shown = "".join(_BITS[at] if entry.mode & (1 << (8 - at)) else "-" for at in range(9))
    return (letters or "-") + shown


def cleaned(path: str) -> str:
    """A path without `.`, `..` and doubled slashes, by its text alone."""
    return "/" + posixpath.normpath(path).lstrip("/") if path.startswith("/") else posixpath.normpath(path)


def as_text(name: str) -> str:
    """A name that JSON can have: what is no UTF-8 in it becomes replacement characters."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _time(ns: int) -> str:
    ns = max(0, min(ns, _LAST_NS))
    seconds = datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{ns % 10**9:09}Z"
