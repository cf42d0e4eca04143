"""A reader of the tar archives that a sandbox packs: octets in, members out, no I/O.

The sandbox is hostile, so this reads what its files program writes (ustar and pax) and nothing more: every length is bounded
before it is waited for, and memory does not depend on what the archive says.
"""

import tarfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from .errors import UnsafeArchive

BLOCK = 512
MAX_PAX = 64 * 1024
MAX_PATH = 4095
MAX_NAME = 255
MAX_DEPTH = 256
_MAX_SIZE = 2**60
_MAX_PADDING = 64 * 1024
_ZEROS = bytes(BLOCK)
_LEFT_OUT = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of an archive: the names that lead to it, none of which is `..` or has a slash."""

    names: tuple[str, ...]
    mode: int
    mtime: float

    @property
    def path(self) -> str:
        """The names as one path, for people."""
        return "/".join(self.names)


class Target(Protocol):
    """What makes the members somewhere."""

    def folder(self, member: Member) -> None:
        """A folder comes."""

    def file(self, member: Member, size: int) -> None:
        """A file of `size` octets comes; they follow by `data`, and `file_end` after the last one."""

    def data(self, piece: bytes) -> None:
        """Octets of the file."""

    def file_end(self) -> None:
        """The file is whole."""

    def symlink(self, member: Member, target: str) -> None:
        """A symbolic link comes."""

    def hardlink(self, member: Member, target: tuple[str, ...]) -> None:
        """Another name of a file that came before."""

    def left_out(self, member: Member) -> None:
        """A device or the like, which is not made."""


def malformed(what: str) -> UnsafeArchive:
    """The error for an archive that is none."""
    return UnsafeArchive(
        "archive_malformed", f"What the sandbox sent is no archive: {what}.", "Nothing of it was put in place."
    )


def unsafe(what: str) -> UnsafeArchive:
    """The error for an archive that would do something elsewhere."""
    return UnsafeArchive(
        "archive_unsafe",
        f"The archive that the sandbox sent is refused: {what}.",
        "Nothing of it was put in place. Something in the sandbox made it up.",
    )


class Reader:
    """Takes an archive, cut anywhere, and hands its members to a target. Raises `UnsafeArchive`, and what the target raises."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._buffer = bytearray()
        self._over = False
        self._padding = 0
        self._top = False
        self._flow = self._read()
        self._want = next(self._flow)

    def feed(self, piece: bytes) -> None:
        """Takes the next octets."""
        if self._over:
            self._behind_the_end(piece)
            return
        buffer = self._buffer
        buffer += piece
        while buffer:
            # What is wanted is so many octets exactly, or, where it is negative, at most so many.
            count = self._want if self._want > 0 else min(-self._want, len(buffer))
            if count > len(buffer):
                return
            octets = bytes(buffer[:count])
            del buffer[:count]
            try:
                self._want = self._flow.send(octets)
            except StopIteration:
                self._over = True
                self._behind_the_end(bytes(buffer))
                return

    def finish(self) -> None:
        """The stream has ended: the archive must have, too."""
        if not self._over:
            raise malformed("it is cut off")

    def _behind_the_end(self, piece: bytes) -> None:
        self._padding += len(piece)
        if piece.strip(b"\0") or self._padding > _MAX_PADDING:
            raise malformed("something follows its end")

    def _read(self) -> Generator[int, bytes, None]:
        pax: dict[str, bytes] = {}
        while True:
            block = yield BLOCK
            if block == _ZEROS:
                if (yield BLOCK) != _ZEROS or pax:
                    raise malformed("its end is none")
                return
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError, OverflowError) as error:
                raise malformed(f"a header is none ({error})") from None
            if header.type == tarfile.XHDTYPE:
                if pax or not 0 < header.size <= MAX_PAX:
                    raise malformed("an extended header is empty, too long or follows another one")
                pax = _records((yield -(-header.size // BLOCK) * BLOCK)[: header.size])
                continue
            yield from self._member(header, pax)
            pax = {}

    def _member(self, header: tarfile.TarInfo, pax: dict[str, bytes]) -> Generator[int, bytes, None]:
        name = pax["path"].decode("utf-8", "surrogateescape") if "path" in pax else header.name
        link = pax["linkpath"].decode("utf-8", "surrogateescape") if "linkpath" in pax else header.linkname
        size = _number(pax["size"]) if "size" in pax else header.size
        mtime = _time(pax["mtime"]) if "mtime" in pax else float(header.mtime)
        if not 0 <= size <= _MAX_SIZE:
            raise malformed("a size is none")
        member = Member(split(name), header.mode & 0o777, mtime)
        if header.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            if not member.names:
                raise unsafe("a file has no name")
            yield from self._file(member, size)
            return
        if size and header.type != tarfile.LNKTYPE:
            raise malformed(f"{member.path!r} has octets, but is no file")
        if header.type == tarfile.DIRTYPE:
            if member.names:
                self._target.folder(member)
            elif self._top:
                raise malformed("it has the folder itself twice")
            else:
                self._top = True
        elif not member.names:
            raise unsafe("a link has no name")
        elif header.type == tarfile.SYMTYPE:
            if not link or "\0" in link or len(link.encode("utf-8", "surrogateescape")) > MAX_PATH:
                raise malformed(f"the link {member.path!r} leads nowhere")
            self._target.symlink(member, link)
        elif header.type == tarfile.LNKTYPE and not size:
            self._target.hardlink(member, split(link))
        elif header.type in _LEFT_OUT:
            self._target.left_out(member)
        else:
            raise malformed(f"{member.path!r} is of a kind that is not known")

    def _file(self, member: Member, size: int) -> Generator[int, bytes, None]:
        target = self._target
        target.file(member, size)
        left = size
        while left:
            piece = yield -left
            left -= len(piece)
            target.data(piece)
        target.file_end()
        if size % BLOCK:
            yield BLOCK - size % BLOCK


def split(path: str) -> tuple[str, ...]:
    """The names of a path in an archive. Raises `UnsafeArchive` for one that is absolute, has `..`, or cannot be a file's."""
    if path.startswith("/") or "\0" in path:
        raise unsafe(f"the name {path[:200]!r} is absolute, or none")
    names = tuple(name for name in path.split("/") if name not in ("", "."))
    octets = [len(name.encode("utf-8", "surrogateescape")) for name in names]
    if ".." in names:
        raise unsafe(f"the name {path[:200]!r} leads out of the folder")
    if len(names) > MAX_DEPTH or any(size > MAX_NAME for size in octets) or sum(octets) + len(octets) > MAX_PATH:
        raise unsafe(f"the name {path[:200]!r} is too long or too deep")
    return names


def stays_inside(depth: int, target: str) -> bool:
    """Whether a symbolic link `depth` folders below the top leads to something below the top.

    Steps upwards count at the beginning only: behind a name, which may be a link itself, nobody knows where they lead.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    upwards = 0
    while upwards < len(steps) and steps[upwards] == "..":
        upwards += 1
    return not target.startswith("/") and upwards <= depth and ".." not in steps[upwards:]


def _records(data: bytes) -> dict[str, bytes]:
    """Reads the records of an extended header: `LENGTH KEY=VALUE` and a line feed each."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 8].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 :].partition(b"=")
        if len(record) != length or not record.endswith(b"\n") or not equals or not key:
            raise malformed("an extended header is none")
        if key.startswith(b"GNU.sparse"):
            raise malformed("it has sparse files")
        found[key.decode("utf-8", "replace")] = value[:-1]
        at += length
    return found


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise malformed("a size is none")
    return int(text)


def _time(text: bytes) -> float:
    try:
        return float(text[:40])
    except ValueError:
        raise malformed("a time is none") from None
