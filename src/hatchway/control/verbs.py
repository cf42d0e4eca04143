"""What each verb asks of a node, and how its answer is written: one function per kind of verb.

Every one returns the transaction that ends the operation; a transaction of its own is never begun before the node has answered.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from hatchway.control import archive_keys
from hatchway.control.nodes import LOST_CODES, NodeLink
from hatchway.domain.errors import Conflict, HatchwayError, Internal, NotFound, Unavailable
from hatchway.domain.lifecycle import State, Verb
from hatchway.domain.shapes import Shape
from hatchway.storage import branches, ending, exports, policies, pools, sessions, snapshot_imports, snapshots
from hatchway.storage.database import Connection, Database
from hatchway.storage.ending import Finished
from hatchway.storage.rows import OperationRow, SandboxRow
from hatchway.wire.archives import sign
from hatchway.wire.node import (
    Branch,
    BranchedSession,
    BranchedSessions,
    EgressSpec,
    ExportHead,
    ExportMade,
    ExportRequest,
    ExportSeal,
    FetchRequest,
    ForkAnswer,
    ForkRequest,
    ImportRequest,
    Observed,
    RollbackRequest,
    SandboxRef,
    SandboxSessions,
    SandboxSpec,
    Snapshot,
    SnapshotImport,
    SnapshotMade,
    SnapshotRequest,
    StopRequest,
)

VERB_WITHIN_S = 120.0
CREATE_WITHIN_S = 600.0
"""The first creation of a shape bakes it: a cold boot and more, on a host that may be busy."""
COPY_WITHIN_S = 600.0
"""A hundred branches, or gigabytes of memory onto a slow disk."""
LOOK_WITHIN_S = 10.0

log = logging.getLogger(__name__)

Ending = Callable[[Connection, float], Finished | None]
"""Ends the operation, given when it began (Unix seconds)."""


async def carry_out(link: NodeLink, database: Database, operation: OperationRow, sandbox: SandboxRow) -> Ending:
    """Has the node do the operation's verb, as often as it takes: every request is idempotent.

    Raises what the node answers, `TimeoutError`, and `Internal("unexpected_state")` when the sandbox is not in the state that was
    desired afterwards.
    """
    match operation.kind:
        case Verb.FORK:
            return await _fork(link, database, operation, sandbox)
        case Verb.SNAPSHOT:
            return await _snapshot(link, operation, sandbox)
        case Verb.ROLLBACK:
            return await _rollback(link, operation, sandbox, await database.read(policies.effective, sandbox.id))
        case Verb.CREATE:
            return await _create(link, operation, sandbox, await database.read(policies.effective, sandbox.id))
        case Verb.EXPORT:
            return await _export(link, database, operation, sandbox)
        case Verb.IMPORT if operation.of_snapshot:
            return await _import_snapshot(link, operation, sandbox)
        case Verb.IMPORT:
            return await _import(link, operation, sandbox, await database.read(policies.effective, sandbox.id))
    egress = await database.read(policies.effective, sandbox.id)
    if operation.kind in (Verb.START, Verb.WAKE) and sandbox.boot_id is None:
        if sandbox.forked_from is not None:
            raise Conflict(
                "branch_never_made",
                "The branch was never made, and its source has gone on since: there is nothing to start.",
                "Delete it, and fork again.",
            )
        # A sandbox that never ran has no disk to boot from: its start is its creation.
        return await _create(link, operation, sandbox, egress)
    seen = await _plain(link, operation.kind, sandbox, egress)
    _require(operation, sandbox, seen)
    begun = await _begun(link, sandbox) if sandbox.artifact is not None and sandbox.generation > 1 else ()
    return _with_sessions(operation, sandbox, seen, begun)


def _with_sessions(
    operation: OperationRow, sandbox: SandboxRow, seen: Observed, begun: Sequence[BranchedSession]
) -> Ending:
    """Ends an operation after which a sandbox has sessions that its node gave it."""

    def end(connection: Connection, started_at: float) -> Finished | None:
        finished = ending.succeed(connection, operation, seen, started_at)
        if finished is not None:
            for one in begun:
                sessions.branched(connection, sandbox.project, one)
        return finished

    return end


async def _create(link: NodeLink, operation: OperationRow, sandbox: SandboxRow, egress: EgressSpec | None) -> Ending:
    pool = operation.arguments.get(pools.CLAIM)
    if pool is not None:
        return await _claim(link, operation, spec_of(sandbox, egress), sandbox, pool)
    if pools.POOL in operation.arguments:  # nothing leaves it until it is somebody's
        method, spec = "sandbox.prepare", spec_of(sandbox, None)
    else:
        method, spec = "sandbox.create", spec_of(sandbox, egress)
    seen = await link.call(method, spec, Observed, within=CREATE_WITHIN_S)
    _require(operation, sandbox, seen)
    begun = await _begun(link, sandbox) if sandbox.snapshot_id is not None else ()
    return _with_sessions(operation, sandbox, seen, begun)


async def _claim(link: NodeLink, operation: OperationRow, spec: SandboxSpec, sandbox: SandboxRow, pool: str) -> Ending:
    """A member of a pool becomes the sandbox; one that cannot go on is made anew, as if there had been none."""
    result = {"pool": pool}
    try:
        seen = await link.call("sandbox.claim", spec, Observed, within=VERB_WITHIN_S)
    except (HatchwayError, TimeoutError) as error:
        if isinstance(error, Unavailable) and error.code in LOST_CODES:
            raise
        log.warning("%s cannot be claimed from its pool and is made anew: %s", sandbox.id, error)
        result = {}
        ref = SandboxRef(sandbox_id=sandbox.id, generation=sandbox.generation)
        await link.call("sandbox.delete", ref, Observed, within=VERB_WITHIN_S)
        seen = await link.call("sandbox.create", spec, Observed, within=CREATE_WITHIN_S)
    _require(operation, sandbox, seen)
    return lambda connection, started_at: ending.succeed(connection, operation, seen, started_at, result)


async def _begun(link: NodeLink, sandbox: SandboxRow) -> tuple[BranchedSession, ...]:
    """The sessions of the processes that were in the memory which a machine was made from."""
    ref = SandboxSessions(sandbox_id=sandbox.id)
    return (await link.call("session.branched", ref, BranchedSessions, within=LOOK_WITHIN_S)).sessions


async def _plain(link: NodeLink, verb: Verb, sandbox: SandboxRow, egress: EgressSpec | None) -> Observed:
    runs = verb in (Verb.START, Verb.RESUME, Verb.RESTORE, Verb.WAKE)
    ref = SandboxRef(sandbox_id=sandbox.id, generation=sandbox.generation, egress=egress if runs else None)
    if verb is Verb.STOP:
        request = StopRequest(sandbox_id=sandbox.id, generation=sandbox.generation)
        try:
            return await link.call("sandbox.stop", request, Observed, within=VERB_WITHIN_S)
        except NotFound:
            if sandbox.boot_id is not None:
                raise
            # It never ran: nothing of it is there to be stopped, and a start makes it anew.
            return _as_asked(sandbox, State.STOPPED)
    if verb is Verb.WAKE:
        verb = {State.PAUSED: Verb.RESUME, State.SUSPENDED: Verb.RESTORE}.get(sandbox.state, Verb.START)
    try:
        within = COPY_WITHIN_S if verb in (Verb.SUSPEND, Verb.RESTORE) else VERB_WITHIN_S
        return await link.call(f"sandbox.{verb}", ref, Observed, within=within)
    except NotFound:
        if verb is Verb.RESTORE and sandbox.artifact is not None:
            # It was another node's: what that one kept is in the store that they share.
            wanted = FetchRequest(**msgspec.structs.asdict(spec_of(sandbox, egress)), artifact=sandbox.artifact)
            await link.call("sandbox.fetch", wanted, Observed, within=COPY_WITHIN_S)
            return await link.call("sandbox.restore", ref, Observed, within=COPY_WITHIN_S)
        if verb is not Verb.DELETE:
            raise
        # The node never made it, or has forgotten it after an earlier attempt: nothing is left to delete.
        return _as_asked(sandbox, State.DELETED)


def _as_asked(sandbox: SandboxRow, state: State) -> Observed:
    """What is to be said of a sandbox of which its node has nothing that would have to change."""
    return Observed(
        sandbox_id=sandbox.id,
        project=sandbox.project,
        generation=sandbox.generation,
        state=state,
        isolation=sandbox.isolation or "emulated",
        sequence=sandbox.observed_sequence,
    )


async def _fork(link: NodeLink, database: Database, operation: OperationRow, sandbox: SandboxRow) -> Ending:
    # Read before every attempt: a branch that was deleted meanwhile must not be made.
    wanted = await database.read(_open_branches, operation)
    request = ForkRequest(
        sandbox_id=sandbox.id,
        generation=sandbox.generation,
        branches=tuple(
            Branch(sandbox_id=one.id, generation=one.generation, hostname=hostname_of(one), env=one.env, egress=egress)
            for one, egress in wanted
        ),
    )
    answer = await link.call("sandbox.fork", request, ForkAnswer, within=COPY_WITHIN_S)
    return lambda connection, started_at: branches.made(connection, operation, answer, started_at)


def _open_branches(connection: Connection, operation: OperationRow) -> list[tuple[SandboxRow, EgressSpec]]:
    found = branches.open_branches(connection, operation)
    return [(one, policies.effective_of(connection, one)) for one in found]


async def _snapshot(link: NodeLink, operation: OperationRow, sandbox: SandboxRow) -> Ending:
    request = SnapshotRequest(
        sandbox_id=sandbox.id,
        generation=sandbox.generation,
        project=sandbox.project,
        snapshot_id=str(operation.arguments["snapshot"]),
        kind=str(operation.arguments["kind"]),
    )
    answer = await link.call("snapshot.create", request, SnapshotMade, within=COPY_WITHIN_S)
    _require(operation, sandbox, answer.source)
    return lambda connection, started_at: snapshots.made(connection, operation, answer, started_at)


async def _export(link: NodeLink, database: Database, operation: OperationRow, sandbox: SandboxRow) -> Ending:
    key_id, _ = await database.read(archive_keys.own)
    request = ExportRequest(
        sandbox_id=sandbox.id,
        generation=sandbox.generation,
        export_id=str(operation.arguments["export"]),
        project=sandbox.project,
        key_id=key_id,
        include_template=bool(operation.arguments["include_template"]),
        parents=() if sandbox.head_snapshot_id is None else (sandbox.head_snapshot_id,),
        labels={"name": sandbox.name, "metadata": sandbox.metadata, "processes": str(sandbox.last_process_id)},
    )
    made = await signed_export(link, database, request)
    ref = SandboxRef(sandbox_id=sandbox.id, generation=sandbox.generation)
    seen = await link.call("sandbox.get", ref, Observed, within=LOOK_WITHIN_S)
    _require(operation, sandbox, seen)
    return lambda connection, started_at: exports.made(connection, operation, made, seen, started_at)


async def signed_export(link: NodeLink, database: Database, request: ExportRequest) -> ExportMade:
    """Has a node make an archive, and signs it. The node never has the key. Raises what the node answers, and `TimeoutError`."""
    written = await link.call("export.make", request, ExportHead, within=COPY_WITHIN_S)
    _, key = await database.read(archive_keys.own)
    signature = sign(key, written.head) if written.head else b""
    kept_s = await database.read(exports.kept_s, request.project)
    seal = ExportSeal(export_id=request.export_id, signature=signature, kept_s=kept_s)
    return await link.call("export.seal", seal, ExportMade, within=LOOK_WITHIN_S)


async def _import(link: NodeLink, operation: OperationRow, sandbox: SandboxRow, egress: EgressSpec | None) -> Ending:
    request = ImportRequest(
        **msgspec.structs.asdict(spec_of(sandbox, egress)),
        upload_id=str(operation.arguments["upload"]),
        memory=bool(operation.arguments["memory"]),
    )
    seen = await link.call("sandbox.import", request, Observed, within=COPY_WITHIN_S)
    _require(operation, sandbox, seen)
    return _with_sessions(operation, sandbox, seen, await _begun(link, sandbox))


async def _import_snapshot(link: NodeLink, operation: OperationRow, stand_in: SandboxRow) -> Ending:
    request = SnapshotImport(
        snapshot_id=operation.target,
        project=operation.project,
        upload_id=str(operation.arguments["upload"]),
        kind=str(operation.arguments["kind"]),
        template_digest=stand_in.template_digest,
        shape=shape_of(stand_in),
    )
    answer = await link.call("snapshot.import", request, Snapshot, within=COPY_WITHIN_S)
    return lambda connection, started_at: snapshot_imports.made(connection, operation, answer, started_at)


async def _rollback(link: NodeLink, operation: OperationRow, sandbox: SandboxRow, egress: EgressSpec | None) -> Ending:
    request = RollbackRequest(
        sandbox_id=sandbox.id,
        generation=sandbox.generation,
        egress=egress,
        snapshot_id=str(operation.arguments["snapshot"]),
    )
    seen = await link.call("sandbox.rollback", request, Observed, within=COPY_WITHIN_S)
    _require(operation, sandbox, seen)
    begun = await _begun(link, sandbox)

    def end(connection: Connection, started_at: float) -> Finished | None:
        finished = snapshots.rolled_back(connection, operation, seen, started_at)
        if finished is not None:
            for one in begun:
                sessions.branched(connection, sandbox.project, one)
        return finished

    return end


def _require(operation: OperationRow, sandbox: SandboxRow, seen: Observed) -> None:
    if seen.state != sandbox.desired:
        cause = f"After the {operation.kind} the sandbox is {seen.state}. {seen.reason}".strip()
        raise Internal("unexpected_state", cause, "Try again.")


def spec_of(sandbox: SandboxRow, egress: EgressSpec | None) -> SandboxSpec:
    """What a node is told to make a sandbox, and of what may leave it."""
    return SandboxSpec(
        sandbox_id=sandbox.id,
        project=sandbox.project,
        generation=sandbox.generation,
        template_digest=sandbox.template_digest,
        shape=shape_of(sandbox),
        hostname=hostname_of(sandbox),
        env=sandbox.env,
        require_isolation=sandbox.require_isolation,
        snapshot_id=sandbox.snapshot_id,
        egress=egress,
    )


def shape_of(sandbox: SandboxRow) -> Shape:
    """How large it is."""
    return Shape(vcpus=sandbox.vcpus, memory_mib=sandbox.memory_mib, disk_mib=sandbox.disk_mib)


def hostname_of(sandbox: SandboxRow) -> str:
    """The guest's host name: the sandbox's name where that makes a DNS label, else its id."""
    label = (sandbox.name or "").lower().replace("_", "-").replace(".", "-").strip("-")[:63].strip("-")
    return label or sandbox.id
