"""The archive of a sandbox or a snapshot: one file, signed, compressed, with a manifest of digests.

```
0       "HWARCHIV" | format (u32) | length of the manifest (u32), big-endian
16      manifest, JSON
…       signature (64 octets, Ed25519) over "hatchway archive\\0" and all octets before it
…       zeros up to 65,536
65536   the parts, each one zstd frame, in the order and with the lengths that the manifest states; nothing behind them
```
A reader believes nothing before the signature of a key that it trusts holds, and decompresses nothing whose digest is not the manifest's.
"""

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec
import zstandard
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from hatchway.domain import shapes
from hatchway.domain.lifecycle import SnapshotKind
from hatchway.domain.shapes import Shape
from hatchway.node.artifacts.refusals import altered, invalid, too_new, untrusted
from hatchway.node.images.manifest import is_digest
from hatchway.node.vmm.manifest import Manifest as Conditions
from hatchway.wire.archives import sign, verify

FORMAT = 1
HEADER = 65_536
MAGIC = b"HWARCHIV"
_FIXED = struct.Struct(">8sII")
_SIGNATURE = 64
MAX_MANIFEST = HEADER - _FIXED.size - _SIGNATURE
LEVEL = 3
_PIECE = 1 << 20
_WINDOW_LOG = 27
"""Of what is decompressed: zstd's own bound without long mode, 128 MiB at most; ours has 2 MiB."""

MEMORY, STATE, DISK, SESSIONS = "memory", "state", "disk", "sessions"
TEMPLATE = "template"
"""The manifest of the template's release, where that is included; its parts are `template.kernel`, and so on."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"memory|state|disk|sessions|template(\.[a-z0-9_-]{1,40})?")
OF_SNAPSHOT, PROCESSES = "snapshot", "processes"
"""Labels: the id of the snapshot that an archive is of, null for a sandbox's; and the highest number that a process in it had had, in digits."""
MAX_PARTS = 32
MAX_PLAIN = 64 << 30
"""Octets of a part of a template."""

Octets = Annotated[int, Meta(ge=0, le=1 << 50)]
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part: what it takes in the archive, and what it unpacks to."""

    name: Annotated[str, Meta(max_length=64)]
    stored: Octets
    """Octets in the archive."""
    sha256: Hex
    """Of those octets."""
    size: Octets
    """Octets that they decompress to."""


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The release that the disk lies over."""

    name: Annotated[str, Meta(max_length=63)]
    tag: Annotated[str, Meta(max_length=128)]
    digest: Annotated[str, Meta(max_length=80)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an archive has, and the conditions for using it."""

    kind: SnapshotKind
    """`full`: memory and disk; `disk`."""
    key_id: Annotated[str, Meta(max_length=64)]
    """Of the key that signed it."""
    created_at: float
    source: Annotated[str, Meta(max_length=20)]
    """Id of the sandbox that it was made from."""
    parents: Annotated[tuple[Annotated[str, Meta(max_length=20)], ...], Meta(max_length=16)] = ()
    """Ids of the snapshots that it goes on from, the nearest first."""
    template: Template
    shape: Shape
    hostname: Annotated[str, Meta(max_length=64)]
    env: dict[str, str] = {}
    boot_id: Annotated[str, Meta(max_length=64)] = ""
    """What the guest's kernel called its boot; empty where that is not known."""
    labels: dict[str, Any] = {}
    """Name and metadata, as the control plane gave them along, `OF_SNAPSHOT` and `PROCESSES`."""
    conditions: Conditions | None = None
    """Of `full`: what has to hold where its memory is loaded."""
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()

    @property
    def of_snapshot(self) -> bool:
        """Whether it is of a snapshot. Archives that do not say it tell by the boot id: that of a sandbox is always known, a snapshot's was left out."""
        if OF_SNAPSHOT in self.labels:
            return self.labels[OF_SNAPSHOT] is not None
        return not self.boot_id

    @property
    def processes(self) -> int:
        """The highest number that a process in it had had, 0 where it does not say that."""
        told = self.labels.get(PROCESSES)
        return int(told) if isinstance(told, str) and _NUMBER.fullmatch(told) else 0

    def part(self, name: str) -> Part | None:
        """The part of this name, if there is one."""
        return next((part for part in self.parts if part.name == name), None)


class Writer:
    """Writes an archive to an open file: first the parts, then what says what they are."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = HEADER
        self._parts: list[Part] = []

    def add(self, name: str, chunks: Iterable[bytes]) -> None:
        """Compresses and appends a part. Raises `OSError` (ENOSPC) and what `chunks` raises."""
        stored, size, digest = 0, 0, hashlib.sha256()
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compressobj()

        def put(octets: bytes) -> int:
            digest.update(octets)
            rest = memoryview(octets)
            while rest:
                written = os.pwrite(self._fd, rest, self._at)
                rest, self._at = rest[written:], self._at + written
            return len(octets)

        for chunk in chunks:
            size += len(chunk)
            stored += put(compressor.compress(chunk))
        stored += put(compressor.flush())
        self._parts.append(Part(name=name, stored=stored, sha256=digest.hexdigest(), size=size))

    def finish(self, manifest: Manifest) -> bytes:
        """Makes the head, without its signature, and returns it: what has to be signed, by `signature` or by another process."""
        return head_of(msgspec.structs.replace(manifest, parts=tuple(self._parts)))


def head_of(manifest: Manifest) -> bytes:
    """The octets that are signed. Raises `ValueError` for a manifest that is too large: its labels and environment are."""
    octets = msgspec.json.encode(manifest)
    if len(octets) > MAX_MANIFEST:
        raise ValueError(f"the manifest has {len(octets)} of at most {MAX_MANIFEST} octets")
    return _FIXED.pack(MAGIC, FORMAT, len(octets)) + octets


def signed(key: Ed25519PrivateKey, head: bytes) -> bytes:
    """The signature of a head."""
    return sign(key, head)


def seal(fd: int, head: bytes, signature: bytes) -> None:
    """Puts head and signature in their place: from then on the file is an archive. Raises `OSError`."""
    octets = (head + signature).ljust(HEADER, b"\0")
    if os.pwrite(fd, octets, 0) != HEADER:
        raise OSError("the head was not written")
    os.fsync(fd)


class Archive:
    """An archive whose head was read and found signed by a trusted key. Its parts are checked by `verify`."""

    def __init__(self, fd: int, manifest: Manifest) -> None:
        self._fd = fd
        self.manifest = manifest

    def verify(self) -> None:
        """Reads all parts and compares them with their digests. Raises `altered`, `OSError`."""
        at = HEADER
        for part in self.manifest.parts:
            digest, left = hashlib.sha256(), part.stored
            while left:
                octets = os.pread(self._fd, min(_PIECE, left), at)
                if not octets:
                    raise invalid("it is cut off")
                digest.update(octets)
                at, left = at + len(octets), left - len(octets)
            if digest.hexdigest() != part.sha256:
                raise altered(f"its part {part.name} has another digest")

    def open(self, name: str) -> "PartReader":
        """Reads a part, decompressed. Raises `KeyError` where there is none."""
        at = HEADER
        for part in self.manifest.parts:
            if part.name == name:
                return PartReader(self._fd, at, part)
            at += part.stored
        raise KeyError(name)


class PartReader:
    """The octets of a part, of which there may be as many as the manifest says and no more."""

    def __init__(self, fd: int, at: int, part: Part) -> None:
        self._part = part
        self._left = part.size
        source = _Slice(fd, at, part.stored)
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
        self._reader = decompressor.stream_reader(cast(IO[bytes], source), read_across_frames=False)

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` octets, b"" at the end. Raises `archive_invalid` for another length than was announced."""
        try:
            data: bytes = self._reader.read(size)
        except zstandard.ZstdError as error:
            raise invalid(f"its part {self._part.name} cannot be decompressed: {error}") from error
        self._left -= len(data)
        if self._left < 0 or (not data and size and self._left):
            raise invalid(f"its part {self._part.name} unpacks to another length than the manifest says")
        return data

    def chunks(self) -> Iterator[bytes]:
        """All octets."""
        while data := self.read(_PIECE):
            yield data

    def all(self, bound: int) -> bytes:
        """All octets of a small part. Raises `archive_invalid` where they are more than `bound`."""
        if self._part.size > bound:
            raise invalid(f"its part {self._part.name} has more than {bound} octets")
        return b"".join(self.chunks())


class _Slice:
    def __init__(self, fd: int, at: int, length: int) -> None:
        self._fd, self._at, self._left = fd, at, length

    def read(self, size: int = -1, /) -> bytes:
        data = os.pread(self._fd, min(size if size >= 0 else self._left, self._left), self._at)
        self._at, self._left = self._at + len(data), self._left - len(data)
        return data


def read(fd: int, trusted: Mapping[str, Ed25519PublicKey]) -> Archive:
    """Reads and checks the head of an archive in an open file. Raises `archive_invalid too_new untrusted altered`, `OSError`."""
    head = _pread_all(fd, HEADER)
    size = os.fstat(fd).st_size
    if len(head) < HEADER:
        raise invalid("it is shorter than a head")
    magic, version, length = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise invalid("it does not begin like one")
    if version != FORMAT:
        raise too_new(version, FORMAT) if version > FORMAT else invalid(f"it states the format {version}")
    end = _FIXED.size + length
    if length > MAX_MANIFEST or any(head[end + _SIGNATURE :]):
        raise invalid("its head is malformed")
    octets = head[_FIXED.size : end]
    # The name of the key has to be read before anything is believed: of all the rest nothing is used until the signature holds.
    key_id = _key_id(octets)
    key = trusted.get(key_id)
    if key is None:
        raise untrusted(key_id)
    try:
        verify(key, head[end : end + _SIGNATURE], head[:end])
    except InvalidSignature:
        raise altered("its signature does not hold") from None
    try:
        manifest = msgspec.json.decode(octets, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise invalid(f"its manifest is malformed: {error}") from error
    check(manifest)
    if size != HEADER + sum(part.stored for part in manifest.parts):
        raise invalid(f"it has {size} octets, and its manifest speaks of others")
    return Archive(fd, manifest)


def check(manifest: Manifest) -> None:
    """Holds a manifest to what an archive may be, whoever signed it. Raises `archive_invalid`."""
    names = [part.name for part in manifest.parts]
    full = manifest.kind == SnapshotKind.FULL
    shape, conditions = manifest.shape, manifest.conditions
    memory, disk = shape.memory_mib << 20, shape.disk_mib << 20
    bounds = {
        MEMORY: memory + memory // 1024 + 4096,
        STATE: 64 << 20,
        DISK: disk + disk // 1024 + 4096,
        SESSIONS: 16 << 20,
    }
    needed = {DISK, MEMORY, STATE} if full else {DISK}
    problems = (
        (any(_NAME.fullmatch(name) is None for name in names), "it has a part of a name that is none"),
        (len(set(names)) != len(names), "it has two parts of one name"),
        (not needed <= set(names), "it lacks a part"),
        (not full and bool({MEMORY, STATE, SESSIONS} & set(names)), "it has memory that it does not speak of"),
        (full != (conditions is not None), "its conditions and its kind do not fit"),
        (not shapes.MIN_VCPUS <= shape.vcpus <= shapes.MAX_VCPUS, "its shape is out of range"),
        (not shapes.MIN_MEMORY_MIB <= shape.memory_mib <= shapes.MAX_MEMORY_MIB, "its shape is out of range"),
        (not shapes.MIN_DISK_MIB <= shape.disk_mib <= shapes.MAX_DISK_MIB, "its shape is out of range"),
        (not is_digest(manifest.template.digest), "it names no template"),
        (
            any(part.size > bounds.get(part.name, MAX_PLAIN) for part in manifest.parts),
            "a part is larger than it can be",
        ),
        (
            conditions is not None
            and (conditions.shape.vcpus, conditions.shape.memory_mib) != (shape.vcpus, shape.memory_mib),
            "its conditions are of another shape",
        ),
    )
    for wrong, why in problems:
        if wrong:
            raise invalid(why)


class _KeyName(msgspec.Struct):
    key_id: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


def _key_id(octets: bytes) -> str:
    try:
        return msgspec.json.decode(octets, type=_KeyName).key_id
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        raise invalid("its manifest is malformed") from None


def _pread_all(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.pread(fd, length - len(data), len(data))):
        data += more
    return data


def file_chunks(path: Path) -> Iterator[bytes]:
    """The octets of a file. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        while data := file.read(_PIECE):
            yield data
