"""Imports: what was uploaded becomes a sandbox or a snapshot of this node, or leaves nothing.

A sandbox is made in a folder beside the sandboxes, and is one of them in the moment in which that is renamed. A snapshot is one in the moment
in which its record is written (node/snapshots.py).
"""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from hatchway.domain.errors import Conflict, HatchwayError, NotFound
from hatchway.domain.ids import is_id
from hatchway.domain.lifecycle import SnapshotKind, State
from hatchway.node import record as records
from hatchway.node.artifacts import archive, packing
from hatchway.node.artifacts.archive import Archive
from hatchway.node.artifacts.fetching import Fetches
from hatchway.node.artifacts.keeper import Kept, owner_of
from hatchway.node.artifacts.refusals import invalid
from hatchway.node.artifacts.spool import Spool
from hatchway.node.capacity import Holding
from hatchway.node.context import Context
from hatchway.node.faults import explained
from hatchway.node.sandbox import SUSPENDED, Sandbox, new_record
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.sessions.seam import Standing
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.wire.node import (
    Configure,
    FetchRequest,
    ImportRequest,
    Observed,
    SandboxSpec,
    Snapshot,
    SnapshotImport,
    UploadDescription,
)
from hatchway.wire.small_files import replace_file, sync_folder

IMPORTS = ".imports"
"""Below the sandboxes' folder: what is being made of uploads."""

UNKNOWN_BOOT = "imported"
"""In the place of a boot id, for what an archive of a snapshot does not say: there was one."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Imports:
    """Takes uploads in."""

    def __init__(self, context: Context, sandboxes: Sandboxes, uploads: Spool, fetches: Fetches | None = None) -> None:
        self._context = context
        self._sandboxes = sandboxes
        self.uploads = uploads
        self.fetches = fetches or Fetches(uploads)
        self._trusted: Mapping[str, Ed25519PublicKey] = {}
        self._running: dict[str, asyncio.Task[Observed]] = {}
        self._snapshots: dict[str, asyncio.Task[Snapshot]] = {}

    def configure(self, message: Configure) -> None:
        """Takes over the keys whose archives are trusted."""
        self._trusted = {key.key_id: Ed25519PublicKey.from_public_bytes(key.public) for key in message.archive_keys}

    def clear(self) -> None:
        """Removes what was not finished; called once at the start, before any sandbox is looked for."""
        for half in (self._context.root / IMPORTS).glob(f"*/{SUSPENDED}"):
            if self._context.keeper is not None:
                self._context.keeper.forget(half)
        shutil.rmtree(self._context.root / IMPORTS, ignore_errors=True)

    async def describe(self, upload_id: str, project: str) -> UploadDescription:
        """What an upload says of itself. Raises `NotFound("unknown_upload")` and what is wrong with its head."""
        path = self._path(upload_id, project)
        return await asyncio.to_thread(self._describe, path)

    async def take_in(self, request: ImportRequest) -> Observed:
        """Makes the sandbox; asked again it answers as before. Raises `HatchwayError`, and nothing is left then."""
        known = self._known(request)
        if known is not None:
            return known.observed()
        return await _once(self._running, request.sandbox_id, "import", lambda: self._take_in(request))

    async def take_in_snapshot(self, request: SnapshotImport) -> Snapshot:
        """Makes a snapshot; asked again it answers as before. Raises `HatchwayError`, and nothing is left then."""
        if not is_id(request.snapshot_id):
            raise NotFound("unknown_snapshot", "This is no id of a snapshot.", "Ids have 20 characters of [a-z0-9].")
        try:
            made = self._sandboxes.snapshots.get(request.snapshot_id)
        except NotFound:
            return await _once(self._snapshots, request.snapshot_id, "import", lambda: self._take_in_snapshot(request))
        await asyncio.to_thread(self.uploads.remove, request.upload_id)  # it may have died between the two
        return made

    async def fetch(self, request: FetchRequest) -> Observed:
        """Takes over what another node suspended, from the store; asked again it answers as before. Raises `HatchwayError`; nothing is left then."""
        known = self._known(request)
        if known is not None:
            return known.observed()
        return await _once(self._running, request.sandbox_id, "fetch", lambda: self._fetch(request))

    async def _fetch(self, request: FetchRequest) -> Observed:
        context, work = self._context, self._context.root / IMPORTS / request.sandbox_id
        keeper = context.keeper
        if keeper is None or not is_id(request.sandbox_id):
            raise NotFound(
                "unknown_sandbox", "This node has no store to fetch it from.", "Configure the same store for all."
            )
        try:
            context.capacity.check_import(
                request.shape, True, context.driver.overhead_mib(request.shape), self._sandboxes.holdings()
            )
            release = context.images.resolve_digest(request.template_digest)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            owner = owner_of(request.sandbox_id, request.generation)
            kept = await keeper.fetch(request.artifact, owner, work, SUSPENDED)
            lowest = disks.own(release.part("upper"), context.root.parent / "disks")
            record = await asyncio.to_thread(self._finish_fetched, request, kept, work, lowest)
            await context.sessions.branch(request.sandbox_id, request.project, _standing(bytes(kept.sessions)))
            folder = context.root / request.sandbox_id
            os.rename(work, folder)
            sync_folder(context.root)
        except BaseException as error:
            await context.sessions.sandbox_deleted(request.sandbox_id)
            await asyncio.to_thread(keeper.forget, work / SUSPENDED)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            if isinstance(error, Exception):
                raise explained(error) from error
            raise
        return self._sandboxes.adopt_imported(folder, record, request.egress).observed()

    def _finish_fetched(self, request: FetchRequest, kept: Kept, work: Path, lowest: Path) -> records.Record:
        if any(layer.name == disks.LOWEST for layer in kept.disk):
            disks.link_or_copy(lowest, work / disks.LOWEST)
        replace_file(work / disks.RECORD, msgspec.json.encode(kept.disk))
        record = new_record(request, self._context.host_boot_id)
        record.state = str(State.SUSPENDED)
        record.isolation = self._context.driver.isolation
        record.boot_id = kept.boot_id or UNKNOWN_BOOT
        record.stored_bytes = captures.size_of(work / SUSPENDED)[0]
        record.artifact = request.artifact
        records.write(work, record)
        return record

    async def abandon(self, name: str) -> None:
        """Ends the import of a sandbox or a snapshot that a deletion has overtaken; nothing is left of it."""
        for task in (self._running.get(name), self._snapshots.get(name)):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    def _known(self, request: SandboxSpec) -> Sandbox | None:
        try:
            return self._sandboxes.get(request.sandbox_id, request.generation)
        except NotFound:
            return None

    async def _take_in(self, request: ImportRequest) -> Observed:
        if not is_id(request.sandbox_id):
            raise NotFound("unknown_sandbox", "This is no id of a sandbox.", "Ids have 20 characters of [a-z0-9].")
        path = self._path(request.upload_id, request.project)
        work = self._context.root / IMPORTS / request.sandbox_id
        events, holdings = self._context.events, self._sandboxes.holdings()
        try:
            standing = await self._in_thread(
                lambda stop: self._build(path, work, request, holdings, stop),
                lambda done: events.progress(request.sandbox_id, "unpacking", done),
            )
            await self._context.sessions.branch(request.sandbox_id, request.project, standing)
            # From here on it is a sandbox: no await until it is known as one.
            folder = self._context.root / request.sandbox_id
            record = records.read(work)
            os.rename(work, folder)
            sync_folder(self._context.root)
        except BaseException as error:
            await self._context.sessions.sandbox_deleted(request.sandbox_id)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            if isinstance(error, Exception):
                raise explained(error) from error
            raise
        sandbox = self._sandboxes.adopt_imported(folder, record, request.egress)
        await asyncio.to_thread(self.uploads.remove, request.upload_id)
        return sandbox.observed()

    async def _in_thread(self, work: Callable[[packing.Progress], T], tell: Callable[[float], None]) -> T:
        """Has `work` done in a thread, which ends with us: it is given what ends it, and tells how far it is."""
        given_up, loop = threading.Event(), asyncio.get_running_loop()

        def progress(done: float) -> None:
            if given_up.is_set():
                raise _GivenUp
            loop.call_soon_threadsafe(tell, done)

        task = loop.run_in_executor(None, work, progress)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait([task])
            task.exception()
            raise

    async def _take_in_snapshot(self, request: SnapshotImport) -> Snapshot:
        path = self._path(request.upload_id, request.project)
        events, holdings = self._context.events, self._sandboxes.holdings()
        with self._opened(path) as found:
            source = found.manifest.source
        described = Snapshot(
            snapshot_id=request.snapshot_id,
            sandbox_id=source,
            project=request.project,
            kind=request.kind,
            template_digest=request.template_digest,
            shape=request.shape,
        )

        async def unpack(folder: Path) -> tuple[Standing, ...]:
            return await self._in_thread(
                lambda stop: self._unpack_snapshot(path, folder, request, holdings, stop),
                lambda done: events.progress(request.snapshot_id, "unpacking", done),
            )

        try:
            made = await self._sandboxes.snapshots.take_in(described, unpack)
        except Exception as error:
            raise explained(error) from error
        await asyncio.to_thread(self.uploads.remove, request.upload_id)
        return made

    def _unpack_snapshot(
        self, path: Path, folder: Path, request: SnapshotImport, holdings: list[Holding], stop: packing.Progress
    ) -> tuple[Standing, ...]:
        with self._opened(path) as found:
            memory = request.kind == SnapshotKind.FULL
            if not found.manifest.of_snapshot or (memory and found.manifest.kind != SnapshotKind.FULL):
                raise _changed()
            return self._unpack(found, folder, folder, request, memory, holdings, stop)

    def _unpack(
        self,
        found: Archive,
        folder: Path,
        capture: Path,
        wanted: SandboxSpec | SnapshotImport,
        memory: bool,
        holdings: list[Holding],
        stop: packing.Progress,
    ) -> tuple[Standing, ...]:
        """Verifies an archive, then makes its disk in `folder` and, with `memory`, its capture in `capture`; returns the sessions in that."""
        context, shape = self._context, found.manifest.shape
        found.verify()
        stop(0.0)
        if (wanted.template_digest, wanted.shape) != (found.manifest.template.digest, shape):
            raise _changed()
        context.capacity.check_import(shape, memory, context.driver.overhead_mib(shape), holdings)
        if memory and (problem := self._memory_problem(found)):
            raise not_here(problem)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        release = packing.template_of(found, context.images, folder / ".template")
        raw = context.driver.disk_format == "raw"
        lowest = release.part("upper") if raw else disks.own(release.part("upper"), context.root.parent / "disks")
        share = 0.5 if memory else 1.0
        packing.unpack_disk(found, folder, lowest, raw=raw, progress=lambda done: stop(share * done))
        if not memory:
            return ()
        packing.unpack_memory(found, capture, lambda done: stop(share + (1 - share) * done))
        return _standing(packing.sessions_of(found))

    def _build(
        self, path: Path, work: Path, request: ImportRequest, holdings: list[Holding], stop: packing.Progress
    ) -> tuple[Standing, ...]:
        context = self._context
        shutil.rmtree(work, ignore_errors=True)
        with self._opened(path) as found:
            manifest = found.manifest
            memory = request.memory and manifest.kind == SnapshotKind.FULL
            standing = self._unpack(found, work, work / SUSPENDED, request, memory, holdings, stop)
        record = new_record(request, context.host_boot_id)
        record.state = str(State.SUSPENDED if memory else State.STOPPED)
        record.isolation = context.driver.isolation
        record.boot_id = manifest.boot_id or UNKNOWN_BOOT
        record.stored_bytes = captures.size_of(work / SUSPENDED)[0] if memory else None
        records.write(work, record)
        return standing

    def _describe(self, path: Path) -> UploadDescription:
        with self._opened(path) as found:
            manifest = found.manifest
            name, metadata = manifest.labels.get("name"), manifest.labels.get("metadata")
            snapshot = manifest.labels.get(archive.OF_SNAPSHOT)
            return UploadDescription(
                kind=manifest.kind,
                source=manifest.source,
                template=f"{manifest.template.name}:{manifest.template.tag}",
                template_digest=manifest.template.digest,
                shape=manifest.shape,
                hostname=manifest.hostname,
                env=manifest.env,
                name=name if isinstance(name, str) else None,
                metadata={str(key): str(value) for key, value in metadata.items()}
                if isinstance(metadata, dict)
                else {},
                size_bytes=path.stat().st_size,
                memory_problem=self._memory_problem(found),
                of_snapshot=manifest.of_snapshot,
                snapshot=snapshot if isinstance(snapshot, str) and is_id(snapshot) else None,
                key_id=manifest.key_id,
                processes=manifest.processes,
            )

    def _memory_problem(self, found: Archive) -> str:
        """Why the memory cannot be loaded here; empty where it can, or there is none."""
        told = found.manifest.conditions
        if told is None:
            return ""
        wanted = self._context.driver.conditions(found.manifest.shape, network=self._context.network).conditions()
        for condition, value in told.conditions().items():
            if value != wanted[condition]:
                return f"It was made for another {condition}: {value}, and here it is {wanted[condition]}."
        return ""

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Archive]:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield archive.read(fd, self._trusted)
        finally:
            os.close(fd)

    def _path(self, upload_id: str, project: str) -> Path:
        path, entry = self.uploads.get(upload_id, "upload")
        if entry.project != project:
            raise NotFound("unknown_upload", "There is no such upload here.", "It may be over: upload again.")
        self.fetches.require_whole(upload_id)
        return path


class _GivenUp(Exception):
    """Nobody waits for it any more."""


async def _once(
    running: dict[str, asyncio.Task[T]], name: str, what: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> T:
    """Joins what is being made under this name, or begins it; it goes on when nobody waits for it any more."""

    def forget(done: asyncio.Task[T]) -> None:
        running.pop(name, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("%s: it was not imported: %s", name, error)

    task = running.get(name)
    if task is None:
        task = running[name] = asyncio.get_running_loop().create_task(work(), name=f"{what} {name}")
        task.add_done_callback(forget)
    return await asyncio.shield(task)


def _changed() -> HatchwayError:
    return Conflict("archive_changed", "Another archive was uploaded meanwhile.", "Import it again.")


def not_here(problem: str) -> HatchwayError:
    """The error of an archive whose memory cannot be loaded here."""
    return Conflict(
        "memory_lost",
        f"The archive's memory cannot be loaded here. {problem}",
        "Its disk can be taken in without it: import with `memory` false.",
    )


def _standing(octets: bytes) -> tuple[Standing, ...]:
    if not octets:
        return ()
    try:
        return msgspec.json.decode(octets, type=tuple[Standing, ...])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise invalid(f"its sessions are malformed: {error}") from error
