"""From the files of a stopped or suspended sandbox, or of a snapshot, to an archive; and back."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.node.artifacts import archive, extents, layers, memory
from hatchway.node.artifacts.archive import DISK, MEMORY, SESSIONS, STATE, TEMPLATE, Archive, Manifest, Writer
from hatchway.node.artifacts.extents import Extent, ExtentError
from hatchway.node.artifacts.refusals import invalid
from hatchway.node.images.manifest import MANIFEST_FILE, MAX_MANIFEST
from hatchway.node.images.manifest import Manifest as TemplateManifest
from hatchway.node.images.store import Images, Release
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import manifest as conditions
from hatchway.node.vmm.seam import VmmError
from hatchway.wire.small_files import replace_file, sync_folder

Progress = Callable[[float], None]
"""How far it is, from 0 to 1. What it raises ends the work."""
_MAX_STATE = 64 << 20
_MAX_SESSIONS = 16 << 20


@dataclass(frozen=True)
class Parts:
    """Where the parts of what is packed lie: `capture` has its memory, None where there is none."""

    disk: Path
    release: Release
    capture: Path | None = None
    sessions: bytes | None = None
    include_template: bool = False


def pack(fd: int, parts: Parts, described: Manifest, progress: Progress) -> bytes:
    """Writes an archive to an open file; returns the head that is to be signed. Blocks, for as long as it takes.

    Constant memory. Raises `VmmError` for a damaged disk, `SnapshotMismatch` for a damaged capture, `OSError` (ENOSPC), `ValueError` for a
    manifest that is too large, and what `progress` raises.
    """
    writer = Writer(fd)
    disk = disks.load(parts.disk)
    if disk is None:
        raise VmmError("There is no disk to be packed.")
    size = disk.size()
    described = msgspec.structs.replace(
        described, shape=msgspec.structs.replace(described.shape, disk_mib=-(-size // 2**20))
    )
    share = 0.5 if parts.capture is not None else 1.0
    if disk.layers[-1].format == "raw":
        flat = layers.flattened_raw(disk.top, parts.release.part("upper"))
    else:
        flat = layers.flattened(disk)
    writer.add(DISK, extents.encode(_told(flat, size, lambda done: progress(share * done)), size))
    if parts.capture is not None:
        octets = described.shape.memory_mib << 20
        whole = _told(memory.whole(parts.capture, octets), octets, lambda done: progress(share + (1 - share) * done))
        writer.add(MEMORY, extents.encode(whole, octets))
        writer.add(STATE, archive.file_chunks(parts.capture / captures.STATE))
        found = conditions.read(parts.capture / captures.RECORD, parts.capture.name)
        described = msgspec.structs.replace(described, conditions=msgspec.structs.replace(found, parts={}))
        if parts.sessions is not None:
            writer.add(SESSIONS, [parts.sessions])
    if parts.include_template:
        release = parts.release
        writer.add(TEMPLATE, archive.file_chunks(release.folder / MANIFEST_FILE))
        for name in sorted(release.manifest.parts):
            progress(1.0)
            writer.add(f"{TEMPLATE}.{name}", archive.file_chunks(release.part(name)))
    return writer.finish(described)


def unpack_disk(found: Archive, folder: Path, lowest: Path, *, raw: bool, progress: Progress) -> None:
    """Makes the disk in `folder`, over the empty file system `lowest`. Raises `archive_invalid`, `OSError` (ENOSPC)."""
    size = found.manifest.shape.disk_mib << 20
    said = _told(_decoded(found, DISK, size), size, progress)
    if raw:
        layers.write_raw(folder / disks.RAW_TOP, lowest, size, said)
        names: tuple[disks.LayerFile, ...] = (disks.LayerFile(disks.RAW_TOP, "raw"),)
    else:
        disks.link_or_copy(lowest, folder / disks.LOWEST)
        layers.write_layer(folder / disks.TOP, size, said)
        names = (disks.LayerFile(disks.LOWEST, "raw"), disks.LayerFile(disks.TOP, "qcow2"))
    replace_file(folder / disks.RECORD, msgspec.json.encode(names))


def unpack_memory(found: Archive, folder: Path, progress: Progress) -> None:
    """Makes a capture in `folder`, with the disk that may lie there. Raises `archive_invalid`, `OSError` (ENOSPC)."""
    described = found.manifest.conditions
    assert described is not None
    size = found.manifest.shape.memory_mib << 20
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(folder / captures.BASE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        extents.write_sparse(fd, _told(_decoded(found, MEMORY, size), size, progress))
        os.fsync(fd)
        os.fchmod(fd, 0o444)
    finally:
        os.close(fd)
    (folder / captures.DIFF).write_bytes(captures.no_changes(size))
    (folder / captures.STATE).write_bytes(found.open(STATE).all(_MAX_STATE))
    captures.seal(folder, described)


def sessions_of(found: Archive) -> bytes:
    """The sessions whose processes are in the memory, as they were packed; b"" where there are none. Raises `archive_invalid`."""
    if found.manifest.part(SESSIONS) is None:
        return b""
    return found.open(SESSIONS).all(_MAX_SESSIONS)


def template_of(found: Archive, images: Images, work: Path) -> Release:
    """The release that an archive lies over: the one that is here, or the one that it brings, which then is here, too.

    Raises `template_missing`, `archive_invalid`, `OSError`.
    """
    digest = found.manifest.template.digest
    try:
        return images.resolve_digest(digest)
    except HatchwayError as error:
        if error.code != "unknown_template":
            raise
    if found.manifest.part(TEMPLATE) is None:
        named = found.manifest.template
        raise Unprocessable(
            "template_missing",
            f"The archive needs the template {named.name}:{named.tag} ({digest}), which is not here and not in it.",
            "Bring the template here, or export again with the template included.",
        )
    work.mkdir(mode=0o700)
    octets = found.open(TEMPLATE).all(MAX_MANIFEST)
    try:
        described = msgspec.json.decode(octets, type=TemplateManifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise invalid(f"the manifest of its template is malformed: {error}") from error
    if described.digest() != digest:
        raise invalid("its template is another than it says")
    replace_file(work / MANIFEST_FILE, octets)
    for name, part in described.parts.items():
        held = found.manifest.part(f"{TEMPLATE}.{name}")
        if held is None or held.size != part.size_bytes:
            raise invalid(f"the part {name[:40]} of its template is missing, or of another size")
        path = images.part_path(work, part.file)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            at = 0
            for chunk in found.open(f"{TEMPLATE}.{name}").chunks():
                extents.write_all(fd, chunk, at)
                at += len(chunk)
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(work)
    return images.bring(work, digest)


def _decoded(found: Archive, name: str, size: int) -> Iterator[Extent]:
    try:
        yield from extents.decode(found.open(name), size, size)
    except ExtentError as error:
        raise invalid(f"its part {name} is malformed: {error}") from error


def _told(said: Iterable[Extent], size: int, progress: Progress) -> Iterator[Extent]:
    told = 0.0
    progress(0.0)
    for extent in said:
        done = (extent.offset + extent.length) / size
        if done - told > 0.01:
            told = done
            progress(done)
        yield extent
