"""What the guest's `files` program may say (docs/protocols/guest-files.md): lines of JSON, strictly decoded, none of it believed.

What a guest sends beside the known members is dropped; a client gets what was decoded, encoded anew.
"""

import base64
import binascii
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hatchway.domain.errors import BadGateway

MAX_LINE = 96 * 1024
"""Octets of one line."""
MAX_SIZE = 2**63 - 1

Size = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
Number = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Text = str | UnsetType
T = TypeVar("T", bound=msgspec.Struct)


class LeadsTo(msgspec.Struct, frozen=True, kw_only=True):
    """What a symbolic link leads to in the end."""

    path: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]
    mode: Annotated[int, Meta(ge=0, le=0o7777)]
    path_base64: Text = UNSET


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, folder or other thing in a sandbox. A `…_base64` is exact where the readable text cannot be."""

    path: str
    name: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block"]
    size: Size
    mode: Annotated[int, Meta(ge=0, le=0o7777)]
    uid: Number
    gid: Number
    user: Annotated[str, Meta(max_length=256)]
    group: Annotated[str, Meta(max_length=256)]
    mtime_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    target: Text = UNSET
    path_base64: Text = UNSET
    name_base64: Text = UNSET
    target_base64: Text = UNSET
    leads_to: LeadsTo | UnsetType = UNSET
    attributes: dict[str, str] | UnsetType = UNSET
    attributes_left_out: Size | UnsetType = UNSET


class ReadHead(msgspec.Struct, frozen=True, kw_only=True):
    """`read`: `length` octets will come from `offset` on; None: nobody knows how many."""

    entry: Entry
    offset: Size
    length: Size | None


class WatchHead(msgspec.Struct, frozen=True, kw_only=True):
    """`watch`: how many folders are watched, and how many cannot be."""

    entry: Entry
    watches: Size
    unreadable: Size


class PackHead(msgspec.Struct, frozen=True, kw_only=True):
    """`pack`: what is packed."""

    entry: Entry


class StatDone(msgspec.Struct, frozen=True, kw_only=True):
    """`stat`, `move`."""

    entry: Entry


class ReadDone(msgspec.Struct, frozen=True, kw_only=True):
    """`read`."""

    bytes: Size


class WriteDone(msgspec.Struct, frozen=True, kw_only=True):
    """`write`."""

    entry: Entry
    bytes: Size
    created: bool


class ListDone(msgspec.Struct, frozen=True, kw_only=True):
    """`list`: `next` is where the next page begins; there is none on the last one."""

    entries: Size
    skipped: Size
    next: Text = UNSET
    next_base64: Text = UNSET


class MkdirDone(msgspec.Struct, frozen=True, kw_only=True):
    """`mkdir`."""

    entry: Entry
    created: bool


class RemoveDone(msgspec.Struct, frozen=True, kw_only=True):
    """`remove`."""

    removed: Size


class ChmodDone(msgspec.Struct, frozen=True, kw_only=True):
    """`chmod`."""

    entry: Entry
    changed: Size


class WatchDone(msgspec.Struct, frozen=True, kw_only=True):
    """`watch`: what was watched is gone."""

    ended: Literal["removed", "moved"]


class PackDone(msgspec.Struct, frozen=True, kw_only=True):
    """`pack`."""

    files: Size
    bytes: Size
    skipped: Size
    changed: Size


class UnpackDone(msgspec.Struct, frozen=True, kw_only=True):
    """`unpack`."""

    files: Size
    dirs: Size
    links: Size
    bytes: Size
    skipped: Size


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a watch."""

    event: Literal["create", "modify", "remove", "rename", "chmod"]
    path: str
    name: str
    dir: bool
    from_: Text = msgspec.field(name="from", default=UNSET)
    moved: bool | UnsetType = UNSET
    entry: Entry | UnsetType = UNSET
    path_base64: Text = UNSET
    name_base64: Text = UNSET
    from_base64: Text = UNSET


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """All that had happened when it was asked for has been told."""

    event: Literal["mark"]


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """Changes may be missing."""

    event: Literal["overflow"]
    reason: Literal["queue", "watches", "unreadable"]
    path: str
    path_base64: Text = UNSET


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error line; the counters tell how far the operation came."""

    errno: Annotated[int, Meta(ge=1, le=4095)]
    code: Annotated[str, Meta(max_length=64)]
    message: str
    bytes: Size | UnsetType = UNSET
    files: Size | UnsetType = UNSET
    dirs: Size | UnsetType = UNSET
    links: Size | UnsetType = UNSET
    removed: Size | UnsetType = UNSET
    changed: Size | UnsetType = UNSET


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of descriptor 2: exactly one of a head, an end, an error."""

    head: msgspec.Raw | UnsetType = UNSET
    ok: msgspec.Raw | UnsetType = UNSET
    errno: msgspec.Raw | UnsetType = UNSET


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Which event a line of a watch is."""

    event: str


def decode(line: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Reads what a guest sent. Raises `BadGateway("guest_bad_answer")`."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_answer(str(error)[:200]) from None


def exact(text: Text, encoded: Text) -> bytes | None:
    """The octets of a name that is given readable and, where that is not exact, in base64; None when there is none."""
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise bad_answer("a name that is not in base64") from None
    return text.encode() if isinstance(text, str) else None


def bad_answer(what: str) -> BadGateway:
    """The guest's program, or what took its place, said what it may not."""
    return BadGateway(
        "guest_bad_answer",
        f"The sandbox's file program gave an answer that cannot be: {what}.",
        "Try again; if it stays so, something in the sandbox interferes with its agent.",
    )


def no_answer(seconds: float) -> BadGateway:
    """Nothing came, or nothing was taken, for too long."""
    return BadGateway(
        "guest_no_answer",
        f"The sandbox's file program did not go on for {seconds:g} s.",
        "Try again; look at what the sandbox is busy with, and at its state.",
    )
