"""Exports: archives of suspended and stopped sandboxes and of snapshots, made here, signed by the control plane, fetched by clients."""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec

from hatchway.domain.errors import NotFound, Unprocessable
from hatchway.domain.ids import is_id
from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.node.artifacts import archive, packing, sealed
from hatchway.node.artifacts.archive import Manifest, Template
from hatchway.node.artifacts.packing import Parts
from hatchway.node.artifacts.spool import Entry, Spool
from hatchway.node.context import Context
from hatchway.node.faults import explained
from hatchway.node.sandbox import SUSPENDED, Sandbox
from hatchway.node.snapshots import SESSIONS, Snapshots, damaged
from hatchway.node.suspension import memory_lost
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import SnapshotMismatch
from hatchway.wire.node import ExportHead, ExportMade, ExportRequest, ExportSeal

log = logging.getLogger(__name__)


class Exports:
    """Makes and keeps the exports of this node."""

    def __init__(self, context: Context, snapshots: Snapshots, spool: Spool) -> None:
        self._context = context
        self._snapshots = snapshots
        self.spool = spool
        self._heads: dict[str, bytes] = {}
        """Of exports that wait for their signature."""
        self._projects: dict[str, str] = {}

    async def make(self, request: ExportRequest, sandbox: Sandbox | None) -> ExportHead:
        """Writes an archive; asked again it answers as before. Raises `HatchwayError`; nothing is left then."""
        if not is_id(request.export_id):
            raise NotFound("unknown_export", "This is no id of an export.", "Ids have 20 characters of [a-z0-9].")
        if self.spool.find(request.export_id) is not None:
            return ExportHead(head=b"")
        known = self._heads.get(request.export_id)
        if known is not None:
            return ExportHead(head=known)
        if request.snapshot_id is not None:
            parts, described = self._of_snapshot(request, request.snapshot_id)
            self._heads[request.export_id] = await self._pack(request, parts, described, lambda _: None)
        else:
            assert sandbox is not None

            async def body() -> None:
                sandbox.require(Verb.EXPORT)
                parts, described = await self._of_sandbox(request, sandbox)
                self._heads[request.export_id] = await self._pack(
                    request, parts, described, lambda done: sandbox.progress("packing", done)
                )

            await sandbox.do(Verb.EXPORT, body)
            if request.export_id not in self._heads:  # it joined another export of the sandbox
                return await self.make(request, sandbox)
        return ExportHead(head=self._heads[request.export_id])

    async def seal(self, request: ExportSeal) -> ExportMade:
        """Puts the signature in its place: from then on it can be fetched. Raises `NotFound("unknown_export")`, `HostExhausted`."""
        head = self._heads.get(request.export_id)
        if head is not None:
            await asyncio.to_thread(self._seal, request, head)
            self._forget(request.export_id)
        path, entry = self.spool.get(request.export_id, "export")
        return ExportMade(
            export_id=request.export_id,
            size_bytes=path.stat().st_size,
            digest=entry.digest,
            expires_at=entry.expires_at,
        )

    async def delete(self, export_id: str) -> None:
        """Removes an export, whole or not. Idempotent."""
        self._forget(export_id)
        await asyncio.to_thread(self.spool.remove, export_id)

    def _forget(self, export_id: str) -> None:
        self._heads.pop(export_id, None)
        self._projects.pop(export_id, None)

    def _seal(self, request: ExportSeal, head: bytes) -> None:
        fd = os.open(self.spool.path(request.export_id, ".new"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            archive.seal(fd, head, request.signature)
        finally:
            os.close(fd)
        entry = Entry(
            project=self._projects[request.export_id],
            expires_at=time.time() + request.kept_s,
            salt=os.urandom(sealed.SALT),
            digest=f"sha256:{hashlib.sha256(head).hexdigest()}",
        )
        self.spool.finish(request.export_id, entry)

    async def _of_sandbox(self, request: ExportRequest, sandbox: Sandbox) -> tuple[Parts, Manifest]:
        record, folder = sandbox.record, sandbox.folder
        full = record.state == State.SUSPENDED
        suspended = folder / SUSPENDED
        standing = b""
        if full:
            try:
                await asyncio.to_thread(captures.verify_parts, suspended)
            except SnapshotMismatch as error:
                raise memory_lost(str(error)) from error
            standing = msgspec.json.encode(self._context.sessions.standing(record.sandbox_id))
        release = self._context.images.resolve_digest(record.template_digest)
        parts = Parts(
            # A disk that could not be frozen has gone on since: its memory's own is beside that.
            disk=suspended if full and (suspended / disks.RECORD).exists() else folder,
            release=release,
            capture=suspended if full else None,
            sessions=standing or None,
            include_template=request.include_template,
        )
        described = Manifest(
            kind=SnapshotKind.FULL if full else SnapshotKind.DISK,
            key_id=request.key_id,
            created_at=time.time(),
            source=record.sandbox_id,
            parents=request.parents,
            template=Template(name=release.manifest.name, tag=release.manifest.tag, digest=release.digest),
            shape=record.shape,
            hostname=record.hostname,
            env={name: value for name, value in record.env.items() if name != "HATCHWAY_SANDBOX_ID"},
            boot_id=record.boot_id or "",
            labels={**request.labels, archive.OF_SNAPSHOT: None},
        )
        return parts, described

    def _of_snapshot(self, request: ExportRequest, snapshot_id: str) -> tuple[Parts, Manifest]:
        snapshot, folder = self._snapshots.get(snapshot_id), self._snapshots.folder_of(snapshot_id)
        full = snapshot.kind == SnapshotKind.FULL
        release = self._context.images.resolve_digest(snapshot.template_digest)
        sessions = (folder / SESSIONS).read_bytes() if full and (folder / SESSIONS).exists() else None
        parts = Parts(
            disk=folder,
            release=release,
            capture=folder if full else None,
            sessions=sessions,
            include_template=request.include_template,
        )
        described = Manifest(
            kind=SnapshotKind(snapshot.kind),
            key_id=request.key_id,
            created_at=time.time(),
            source=snapshot.sandbox_id,
            parents=request.parents,
            template=Template(name=release.manifest.name, tag=release.manifest.tag, digest=release.digest),
            shape=snapshot.shape,
            hostname=snapshot.sandbox_id,
            labels={**request.labels, archive.OF_SNAPSHOT: snapshot_id},
        )
        return parts, described

    async def _pack(
        self, request: ExportRequest, parts: Parts, described: Manifest, tell: Callable[[float], None]
    ) -> bytes:
        if request.snapshot_id is not None:
            await asyncio.to_thread(self._verify_snapshot, request.snapshot_id, parts)
        path, given_up = self.spool.path(request.export_id, ".new"), threading.Event()
        loop = asyncio.get_running_loop()

        def progress(done: float) -> None:
            if given_up.is_set():
                raise _GivenUp
            loop.call_soon_threadsafe(tell, done)

        def work() -> bytes:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                return packing.pack(fd, parts, described, progress)
            finally:
                os.close(fd)

        self._projects[request.export_id] = request.project
        packed = loop.run_in_executor(None, work)
        try:
            return await asyncio.shield(packed)
        except BaseException as error:
            given_up.set()
            await asyncio.wait([packed])
            self._projects.pop(request.export_id, None)
            await asyncio.to_thread(self.spool.remove, request.export_id)
            if isinstance(error, ValueError):
                raise Unprocessable(
                    "export_too_large", f"It cannot be packed: {error}.", "Keep fewer metadata and less environment."
                ) from error
            if isinstance(error, Exception):
                raise explained(error) from error
            raise

    def _verify_snapshot(self, snapshot_id: str, parts: Parts) -> None:
        try:
            if parts.capture is None:
                self._snapshots.verify(snapshot_id)
            else:
                captures.verify_parts(parts.capture)
        except SnapshotMismatch as error:
            raise damaged(snapshot_id, str(error)) from error


class _GivenUp(Exception):
    """Nobody waits for it any more."""
