"""Snapshots of this node's sandboxes, and those that archives brought: made, listed, gone back to, removed.

```
FOLDER/ID/    of a `disk` snapshot the disk, of a `full` one a capture (node/vmm/captures.py)
              sessions.json: the sessions whose processes are in a full one
              snapshot.json: what it is, with the digests of its parts; written last
```
A folder without `snapshot.json` was never finished, and is removed when the node starts.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.ids import is_id
from hatchway.domain.lifecycle import SnapshotKind, State, Verb
from hatchway.node import branching, suspension
from hatchway.node.creation import boot, bring_up, cause_of
from hatchway.node.greeting import RESTORE_WITHIN_S, Greeting
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.phases import Phases
from hatchway.node.sandbox import Sandbox
from hatchway.node.sessions.seam import Standing
from hatchway.node.vmm import captures, manifest
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import SnapshotMismatch, Vm
from hatchway.wire.node import Observed, Snapshot, SnapshotMade, SnapshotRequest
from hatchway.wire.small_files import replace_file, sync_folder

RECORD = "snapshot.json"
SESSIONS = "sessions.json"
FREEZE_MS = 30_000
FREEZE_WITHIN_S = 10.0

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    snapshot: Snapshot
    parts: dict[str, tuple[str, int]]
    """Name, SHA-256 in hex and size in octets of each file of a `disk` snapshot that is its own."""


class Snapshots:
    """All snapshots of this node, in `folder`, which is ours alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[str, _Kept] = {}

    def load(self) -> None:
        """Reads back what there is. What was not finished is removed; what cannot be read is left alone, and not shown."""
        if not self._folder.exists():
            return
        for folder in sorted(self._folder.iterdir()):
            if not is_id(folder.name) or not (folder / RECORD).exists():
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                self._kept[folder.name] = msgspec.json.decode((folder / RECORD).read_bytes(), type=_Kept)
            except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
                log.error("the snapshot %s cannot be read: %s", folder, error)

    def all(self) -> tuple[Snapshot, ...]:
        """Every snapshot that is whole."""
        return tuple(kept.snapshot for kept in self._kept.values())

    def folder_of(self, snapshot_id: str) -> Path:
        """Where a snapshot is, or will be."""
        return self._folder / snapshot_id

    def get(self, snapshot_id: str) -> Snapshot:
        """Raises `NotFound("unknown_snapshot")`."""
        kept = self._kept.get(snapshot_id)
        if kept is None:
            raise NotFound("unknown_snapshot", f"This node has no snapshot {snapshot_id}.", "List the snapshots.")
        return kept.snapshot

    async def delete(self, snapshot_id: str) -> None:
        """Removes a snapshot; sandboxes that were made from it keep what they need. Idempotent."""
        self._kept.pop(snapshot_id, None)
        folder = self.folder_of(snapshot_id)
        if is_id(snapshot_id) and folder.exists():
            await asyncio.to_thread(_remove, folder)

    async def make(self, source: Sandbox, request: SnapshotRequest) -> SnapshotMade:
        """Keeps a sandbox as it is. Asked again it answers what there is. Raises `HatchwayError`; nothing is left of it then."""
        if not is_id(request.snapshot_id):
            raise NotFound("unknown_snapshot", "This is no id of a snapshot.", "Ids have 20 characters of [a-z0-9].")
        stopped: list[float] = []
        if request.snapshot_id not in self._kept:
            await source.do(Verb.SNAPSHOT, lambda: self._make(source, request, stopped))
        return SnapshotMade(
            snapshot=self.get(request.snapshot_id), source=source.observed(), source_stopped_ms=round(sum(stopped), 2)
        )

    async def take_in(self, described: Snapshot, unpack: Callable[[Path], Awaitable[Sequence[Standing]]]) -> Snapshot:
        """Keeps as a snapshot what `unpack` brings into an empty folder: a disk, or a capture with the sessions that it returns.

        Sizes and digest are those of what is there then. Asked again it answers what there is. Raises what `unpack` does, `OSError`; nothing is left then.
        """
        if described.snapshot_id not in self._kept:
            folder = self.folder_of(described.snapshot_id)
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            try:
                folder.mkdir(mode=0o700)
                standing = await unpack(folder)
                self._kept[described.snapshot_id] = await asyncio.to_thread(_seal, folder, described, standing)
            except BaseException:
                await asyncio.to_thread(_remove, folder)
                raise
        return self.get(described.snapshot_id)

    def standing(self, snapshot_id: str) -> tuple[Standing, ...]:
        """The sessions whose processes are in a full snapshot."""
        try:
            return msgspec.json.decode((self.folder_of(snapshot_id) / SESSIONS).read_bytes(), type=tuple[Standing, ...])
        except FileNotFoundError:
            return ()

    def verify(self, snapshot_id: str) -> None:
        """Compares a `disk` snapshot with its digests; a full one is verified when it is loaded. Raises `Conflict("snapshot_damaged")`."""
        kept = self._kept[snapshot_id]
        for name, digest in kept.parts.items():
            try:
                whole = manifest.digest_of(self.folder_of(snapshot_id) / name) == digest
            except OSError:
                whole = False
            if not whole:
                raise damaged(snapshot_id, f"its part {name} is missing or not what was written.")

    async def _make(self, source: Sandbox, request: SnapshotRequest, stopped: list[float]) -> None:
        source.require(Verb.SNAPSHOT)
        folder = self.folder_of(request.snapshot_id)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        standing: Sequence[Standing] = ()
        try:
            if request.kind == SnapshotKind.FULL:
                taken = await branching.capture(source, folder, durable=True)
                standing, milliseconds = taken.standing, taken.stopped_ms
            else:
                milliseconds = await _copy_disk(source, folder)
            stopped.append(milliseconds)
            kept = await asyncio.to_thread(_seal, folder, _described(source, request), standing)
        except BaseException:
            await asyncio.to_thread(_remove, folder)
            raise
        self._kept[request.snapshot_id] = kept


def damaged(snapshot_id: str, why: str) -> Conflict:
    """The error of a snapshot that cannot be used."""
    return Conflict(
        "snapshot_damaged",
        f"The snapshot {snapshot_id} cannot be used: {why}",
        "Use another snapshot; delete this one.",
    )


async def create(sandbox: Sandbox, snapshots: Snapshots, snapshot_id: str) -> Observed:
    """Makes a new sandbox from a snapshot: a full one goes on where it stood, a disk one boots. Raises as `creation.create`."""
    if sandbox.record.state == State.RUNNING:
        return sandbox.observed()
    snapshot, folder = snapshots.get(snapshot_id), snapshots.folder_of(snapshot_id)
    if snapshot.kind == SnapshotKind.FULL:
        standing = snapshots.standing(snapshot_id)
        return await sandbox.do(
            Verb.CREATE,
            lambda: branching.revive(sandbox, folder, lambda: standing, shared=True, grow_from=snapshot.shape.disk_mib),
        )

    async def on_its_disk() -> None:
        await asyncio.to_thread(snapshots.verify, snapshot_id)
        await asyncio.to_thread(captures.copy_disk, folder, sandbox.folder)
        await boot(sandbox, "creating")

    return await sandbox.do(Verb.CREATE, on_its_disk)


async def rollback(sandbox: Sandbox, snapshots: Snapshots, snapshot_id: str) -> Observed:
    """Goes back to one of its own snapshots. Raises `NotFound`, `Conflict` (`snapshot_damaged memory_lost`) with everything as it was."""
    snapshot = snapshots.get(snapshot_id)
    if snapshot.sandbox_id != sandbox.record.sandbox_id:
        raise NotFound(
            "unknown_snapshot", f"The snapshot {snapshot_id} is another sandbox's.", "Create a sandbox from it instead."
        )
    return await sandbox.do(Verb.ROLLBACK, lambda: _rollback(sandbox, snapshots, snapshot))


async def _rollback(sandbox: Sandbox, snapshots: Snapshots, snapshot: Snapshot) -> None:
    sandbox.require(Verb.ROLLBACK)
    folder, phases = snapshots.folder_of(snapshot.snapshot_id), Phases()
    full = snapshot.kind == SnapshotKind.FULL
    try:
        if full:
            await asyncio.to_thread(sandbox.context.driver.verify, folder, sandbox.vm_spec())
        else:
            await asyncio.to_thread(snapshots.verify, snapshot.snapshot_id)
    except SnapshotMismatch as error:
        raise damaged(snapshot.snapshot_id, str(error)) from error
    phases.done("verify")
    # From here on what was is given up.
    sandbox.save_in_hand("rolling_back")
    sandbox.unwatch()
    await sandbox.clear_vm()
    sandbox.context.sessions.rolled_back(sandbox.record.sandbox_id)
    await suspension.drop(sandbox)
    await asyncio.to_thread(captures.copy_disk, folder, sandbox.folder, durable=True)
    phases.done("disk")
    sandbox.record.cause, sandbox.record.reason = None, ""
    if full:
        await _revive(sandbox, folder, snapshots.standing(snapshot.snapshot_id), phases)
    else:
        sandbox.ended_as(State.STOPPED, None, "")
    sandbox.phases = phases.ms


async def _revive(sandbox: Sandbox, folder: Path, standing: Sequence[Standing], phases: Phases) -> None:
    greeting = Greeting(sandbox.setup(anew=True), fresh=True, within=RESTORE_WITHIN_S, complete=sandbox.open_way_out)
    try:
        vm = await sandbox.context.driver.revive(folder, sandbox.vm_spec(), greeting.begin, shared=True)
        sandbox.take(vm)
        phases.done("load")
        await sandbox.context.sessions.branch(sandbox.record.sandbox_id, sandbox.record.project, standing)
        await vm.resume()
        await bring_up(sandbox, vm, phases, greeting, thaw=True)
    except BaseException as error:
        # Its disk is the snapshot's: it can be started from there, or rolled back again.
        await greeting.give_up()
        cause = await cause_of(sandbox, error)
        await sandbox.clear_vm()
        await asyncio.to_thread(captures.copy_disk, folder, sandbox.folder, durable=True)
        sandbox.ended_as(State.FAILED, cause, f"It was rolled back, and its machine did not come up: {error}")
        raise


async def _copy_disk(source: Sandbox, folder: Path) -> float:
    """The disk as it is, with nothing of the guest's on its way to it; returns how long the source stood still, in milliseconds."""
    vm = source.require_vm() if source.record.state in (State.RUNNING, State.PAUSED) else None
    if vm is None or source.record.state == State.PAUSED:
        await asyncio.to_thread(captures.copy_disk, source.folder, folder)
        return 0.0
    await _freeze(source)
    began = time.perf_counter()
    try:
        await vm.pause()
        await asyncio.to_thread(captures.copy_disk, source.folder, folder)
    finally:
        stopped_ms = await asyncio.shield(_thaw(source, vm, began))
    return stopped_ms


async def _freeze(source: Sandbox) -> None:
    """Raises `GuestError`, `LinkLost`, `TimeoutError` where the guest does not do it: half-written files are no snapshot."""
    if source.link is None:
        raise LinkLost("the guest agent cannot be asked")
    async with asyncio.timeout(FREEZE_WITHIN_S):
        await source.link.freeze(FREEZE_MS)


async def _thaw(source: Sandbox, vm: Vm, began: float) -> float:
    await vm.resume()
    stopped_ms = (time.perf_counter() - began) * 1e3
    with contextlib.suppress(GuestError, LinkLost):  # it thaws by itself; what became of the machine the watcher tells
        if source.link is not None:
            await source.link.setup(time_ns=time.time_ns())
            await source.link.thaw()
    return stopped_ms


def _described(source: Sandbox, request: SnapshotRequest) -> Snapshot:
    return Snapshot(
        snapshot_id=request.snapshot_id,
        sandbox_id=source.record.sandbox_id,
        project=request.project,
        kind=request.kind,
        template_digest=source.record.template_digest,
        shape=source.record.shape,
    )


def _seal(folder: Path, described: Snapshot, standing: Sequence[Standing]) -> _Kept:
    parts: dict[str, tuple[str, int]] = {}
    if described.kind == SnapshotKind.DISK:
        for name in (disks.TOP, disks.RAW_TOP):
            if (folder / name).exists():
                fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.fsync(fd)
                    parts[name] = manifest.digest_of_open(fd)
                finally:
                    os.close(fd)
        manifested = (folder / disks.RECORD).read_bytes()
    else:
        replace_file(folder / SESSIONS, msgspec.json.encode(tuple(standing)))
        manifested = (folder / captures.RECORD).read_bytes()
    memory, disk = captures.size_of(folder)
    kept = _Kept(
        snapshot=msgspec.structs.replace(
            described,
            disk_bytes=disk,
            memory_bytes=memory if described.kind == SnapshotKind.FULL else 0,
            digest="sha256:" + hashlib.sha256(manifested + msgspec.json.encode(sorted(parts.items()))).hexdigest(),
            created_at=time.time(),
        ),
        parts=parts,
    )
    replace_file(folder / RECORD, msgspec.json.encode(kept))
    sync_folder(folder.parent)
    return kept


def _remove(folder: Path) -> None:
    """The record first: a half-removed snapshot is then known to be on its way out."""
    (folder / RECORD).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
