"""A live snapshot of one machine: what its memory and disk changed since their parents, and its devices' state.

```
memory-base    hard link to the file that the machine's memory was mapped from
memory.diff    the pages that it changed (format: docs/protocols/shim.md)
state          the devices' state
lower.raw, layer-1.qcow2, upper.qcow2, disk.json    its disk; the lower layers are hard links (upper.raw alone where the VMM knows no layers)
capture.json   the conditions for loading it; written last
```
"""

import contextlib
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import manifest, qcow2
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import SnapshotMismatch, VmmError
from hatchway.wire.fault_points import reached
from hatchway.wire.small_files import replace_file

BASE = "memory-base"
DIFF = "memory.diff"
STATE = "state"
RECORD = "capture.json"
MERGED = "memory-merged"
"""Base and changes in one file, made where a VMM can only load whole memory, once for all that are revived from the capture."""
_COPIED = ".memory-copied"
_MAGIC = b"HWCAP1\0\0"
_HEAD = struct.Struct("<8sQQQ")
_RUN = struct.Struct("<QQ")
_MAX_RUNS = 2**20
_PIECE = 1 << 20


def keep_base(folder: Path, memory: Path) -> None:
    """Remembers, in a sandbox's folder, the file that its memory is mapped from; a link keeps it alive.

    Where it cannot be linked (another file system) the machine runs all the same, and cannot be captured. Raises `OSError`.
    """
    base = folder / BASE
    base.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.link(memory, base, follow_symlinks=False)


def create(folder: Path, name: str) -> int:
    """Opens a new file of a capture for writing. The caller closes it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    reached("create", name)
    # Write-only: QEMU takes a descriptor for a file only with exactly the access that it asks for.
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def expected(folder: Path, name: str) -> int:
    """Opens for reading a file that `create` opens for writing, before or after this. The caller closes it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take(folder: Path, sandbox: Path, *, disk: bool, whole: bool = False) -> None:
    """Adds the base, and with `disk` the disk, of the paused machine in `sandbox`. What is in `folder` is no capture before it is sealed.

    `whole`: the base is in `folder` already and holds all of the memory. Raises `VmmError` when the machine's memory base is not known, `OSError`.
    """
    base = (folder if whole else sandbox) / BASE
    if not base.exists():
        raise VmmError(
            "The file that the machine's memory was mapped from is on another file system: it cannot be captured."
        )
    if not whole:
        (folder / BASE).unlink(missing_ok=True)
        os.link(base, folder / BASE, follow_symlinks=False)
    if disk:
        copy_disk(sandbox, folder)


def seal(folder: Path, described: Manifest, *, durable: bool = True) -> None:
    """Fsyncs all, takes the digests and writes the record last; the machine may run on meanwhile. Raises `OSError`.

    One that is not `durable` is for what is revived from it at once and then removed: it has no digests of its own to be checked.
    """
    (folder / MERGED).unlink(missing_ok=True)
    parts: dict[str, tuple[str, int]] = {}
    for name in (DIFF, STATE, *(name for name in (disks.TOP, disks.RAW_TOP) if (folder / name).exists())):
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if durable:
                os.fsync(fd)
            if durable or name == STATE:
                parts[name] = manifest.digest_of_open(fd)
        finally:
            os.close(fd)
    base = folder / BASE
    if durable and base.stat().st_nlink == 1:  # made by this capture, not by a bake
        fd = os.open(base, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sha256, size = parts.pop(STATE)
    complete = msgspec.structs.replace(described, state_sha256=sha256, state_size=size, parts=parts)
    replace_file(folder / RECORD, msgspec.json.encode(complete), durable=durable)


def no_changes(size: int) -> bytes:
    """Returns the capture format's octets for a memory of `size` octets without a change."""
    return _HEAD.pack(_MAGIC, os.sysconf("SC_PAGE_SIZE"), size, 0)


def begin_merged(sandbox: Path, folder: Path) -> None:
    """Copies the base that a capture of the machine in `sandbox` will have, so that `merged_memory` has the changes to write only. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    disks.copy_sparse(sandbox / BASE, folder / _COPIED, durable=False)


def merged_memory(folder: Path, *, durable: bool = True) -> Path:
    """Returns a file with the whole memory of a capture: its base, or, where there are changes, a read-only copy that has them.

    The copy is sparse, and shares blocks with the base where the file system can. Raises `SnapshotMismatch` for a damaged list of changes,
    `OSError` (ENOSPC).
    """
    merged = folder / MERGED
    if merged.exists():
        return merged
    base = folder / BASE
    with (folder / DIFF).open("rb") as diff:
        runs, page = _runs(diff.read(_HEAD.size), diff, base.stat().st_size, folder.name)
        if not runs:
            return base
        # Two may make it at once: of two equal files the later one stays.
        temporary = folder / f".{MERGED}.{threading.get_ident()}"
        temporary.unlink(missing_ok=True)
        try:
            try:
                os.rename(folder / _COPIED, temporary)
            except FileNotFoundError:
                disks.copy_sparse(base, temporary, durable=False)
            os.chmod(temporary, 0o600)
            with temporary.open("r+b") as target:
                for first, pages in runs:
                    _copy(diff.fileno(), target.fileno(), first * page, pages * page, folder.name)
                if durable:
                    os.fsync(target.fileno())
                os.fchmod(target.fileno(), 0o444)
            os.rename(temporary, merged)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return merged


@dataclass(frozen=True)
class Run:
    """Changed octets: where they are in the memory, how many, and where in the list of changes."""

    offset: int
    length: int
    at: int


def changed_runs(diff: BinaryIO, size: int, name: str) -> list[Run]:
    """Reads the list of changes of a memory of `size` octets, in ascending order. Raises `SnapshotMismatch` when it is damaged, `OSError`."""
    runs, page = _runs(diff.read(_HEAD.size), diff, size, name)
    at = _HEAD.size + len(runs) * _RUN.size
    found: list[Run] = []
    for first, pages in runs:
        found.append(Run(first * page, pages * page, at))
        at += pages * page
    found.sort(key=lambda run: run.offset)
    return found


def _runs(head: bytes, diff: BinaryIO, size: int, name: str) -> tuple[list[tuple[int, int]], int]:
    damaged = SnapshotMismatch(f"The list of changed pages of the capture {name} is damaged.")
    if len(head) != _HEAD.size:
        raise damaged
    magic, page, covered, count = _HEAD.unpack(head)
    if magic != _MAGIC or page == 0 or page % 4096 or covered > size or count > _MAX_RUNS:
        raise damaged
    table = diff.read(count * _RUN.size)
    if len(table) != count * _RUN.size:
        raise damaged
    runs = list(_RUN.iter_unpack(table))
    if any((first + pages) * page > covered for first, pages in runs):
        raise damaged
    os.lseek(diff.fileno(), _HEAD.size + len(table), os.SEEK_SET)
    return runs, page


def _copy(source: int, target: int, offset: int, length: int, name: str) -> None:
    while length:
        octets = os.read(source, min(_PIECE, length))
        if not octets:
            raise SnapshotMismatch(f"The changed pages of the capture {name} are incomplete.")
        written = 0
        while written < len(octets):
            written += os.pwrite(target, octets[written:], offset + written)
        offset += len(octets)
        length -= len(octets)


def copy_disk(source: Path, target: Path, *, durable: bool = False) -> disks.Disk:
    """Gives `target` the disk of `source` as it is now: links below, a copy of the topmost layer. Raises `VmmError`, `OSError`.

    Where `target` has a disk over the same lower layers it is replaced in one step: a crash leaves the former one or the new one.
    """
    disk = _link_lower(source, target)
    top = disk.layers[-1].name
    new = target / f".{top}.new"
    new.unlink(missing_ok=True)
    disks.copy_sparse(disk.top, new, durable=durable)
    os.chmod(new, 0o600)
    os.rename(new, target / top)
    replace_file(target / disks.RECORD, msgspec.json.encode(disk.layers), durable=durable)
    return disks.Disk(target, disk.layers)


def stand_in(source: Path, target: Path) -> disks.Disk:
    """Gives `target` a disk like that of `source` whose topmost layer is empty, for a VMM that is started before that one can be copied.

    A VMM that waits for a machine reads the layers anew when it has it: until then `filled` may change them. Before `recorded` `target`
    has no disk. Raises `VmmError`, `OSError`.
    """
    disk = _link_lower(source, target)
    below = disk.layers[-2]
    (target / disk.layers[-1].name).unlink(missing_ok=True)
    qcow2.create(target / disk.layers[-1].name, disk.size(), below.name, below.format)
    return disks.Disk(target, disk.layers)


def filled(source: Path, disk: disks.Disk) -> None:
    """Gives a `stand_in` what the disk in `source` has now. Raises `VmmError`, `OSError`."""
    known = disks.load(source)
    if known is None or known.layers != disk.layers:
        raise VmmError(f"The disk in {source} is not the one that was expected.")
    disks.fill(known.top, disk.top)


def recorded(disk: disks.Disk) -> None:
    """Makes a disk that was `filled` one that is found after a crash of the host: what is recorded is there. Raises `OSError`."""
    fd = os.open(disk.top, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    replace_file(disk.folder / disks.RECORD, msgspec.json.encode(disk.layers))


def _link_lower(source: Path, target: Path) -> disks.Disk:
    """Gives `target` the lower layers of `source`; returns the disk of `source`."""
    disk = disks.load(source)
    if disk is None:
        raise VmmError(f"There is no disk in {source}.")
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for layer in disk.layers[:-1]:
        if not _same_file(source / layer.name, target / layer.name):
            (target / layer.name).unlink(missing_ok=True)
            disks.link_or_copy(source / layer.name, target / layer.name)
    return disk


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(one.lstat(), other.lstat())
    except FileNotFoundError:
        return False


def size_of(folder: Path) -> tuple[int, int]:
    """Octets on the host's disk for memory and for the disk's topmost layer, beside what is shared with the baked snapshot. Raises `OSError`."""
    memory = disk = 0
    for path in folder.iterdir():
        found = path.lstat()
        if path.name in (disks.TOP, disks.RAW_TOP):
            disk += found.st_blocks * 512
        elif found.st_nlink == 1:
            memory += found.st_blocks * 512
    return memory, disk


def verify(folder: Path, expected: Manifest) -> None:
    """Checks that a capture is whole and can be loaded here. Raises `SnapshotMismatch`, `OSError`."""
    manifest.verify_conditions(folder / RECORD, folder.name, expected)
    verify_parts(folder)


def verify_parts(folder: Path) -> Manifest:
    """Checks that a capture is whole, wherever it can be loaded; returns its conditions. Raises `SnapshotMismatch`, `OSError`."""
    found = manifest.read(folder / RECORD, folder.name)
    for name in (BASE, DIFF):
        if not (folder / name).exists():
            raise SnapshotMismatch(f"The capture {folder.name} is incomplete: {name} is missing.")
    manifest.verify_state(folder / RECORD, folder / STATE, folder.name)
    for name, digest in found.parts.items():
        try:
            whole = manifest.digest_of(folder / name) == digest
        except FileNotFoundError:
            whole = False
        if not whole:
            raise SnapshotMismatch(f"The part {name} of the capture {folder.name} is missing or damaged.")
    return found
