"""A node without virtual machines: speaks `wire.rpc` like the real one, keeps its sandboxes in memory, and fails on demand.

It stands in for `hatchway.node` where the control plane is tested alone; the real node has its own tests. What it keeps survives
`die` and `start`, as a node's records survive the node.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from hatchway.domain.errors import Conflict, NotFound
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import ROLLBACK_TARGETS, VERBS, SnapshotKind, State, Verb, admits
from hatchway.wire import node as wire
from hatchway.wire.egress import AskAnswer, Asked
from hatchway.wire.rpc import Connection

Hook = Callable[[Any], Awaitable[None]]

DIGEST = "sha256:" + "5eed" * 16


class NodeDouble:
    """One node. `hooks[method]` is awaited before the method does anything; what it raises is answered."""

    def __init__(self, path: Path, node_id: str = "node-one", isolation: str = "emulated") -> None:
        self.path = path
        self.node_id = node_id
        self.isolation = isolation
        self.attach_url = "http://127.0.0.1:7071"
        self.store = ""
        """The store that it shares; with one, what it suspends can be fetched by others."""
        self.boxes: dict[str, wire.Observed] = {}
        self.specs: dict[str, wire.SandboxSpec] = {}
        self.snapshots: dict[str, wire.Snapshot] = {}
        self.exports: dict[str, wire.ExportRequest] = {}
        self.fetched: dict[str, wire.FetchUpload] = {}
        self.signatures: dict[str, bytes] = {}
        self.uploads: dict[str, wire.UploadDescription] = {}
        """Uploads that are complete, by id."""
        self.sessions: dict[str, wire.SessionStatus] = {}
        self.session_specs: dict[str, wire.SessionSpec] = {}
        self.hooks: dict[str, Hook] = {}
        self.calls: list[str] = []
        self.activity: dict[str, wire.Activity] = {}
        """What is said of a sandbox that is asked after; nothing here: nobody has used it for ages."""
        self.asked_activity = 0
        self.stayed: list[wire.StayRequest] = []
        self.egress: dict[str, wire.EgressSpec] = {}
        """What may leave each sandbox, as was said last."""
        self.rejects: set[int] = set()
        """Revisions that its gateways refuse."""
        self.asks: dict[str, Asked] = {}
        """Requests of sandboxes that its gateways hold."""
        self.answers: list[AskAnswer] = []
        self.vmm = "double"
        self.configured: wire.Configure | None = None
        self.sequence = time.time_ns() // 1000
        self.tls: tuple[str, ssl.SSLContext] | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._listeners: set[Connection] = set()

    # -- its life

    async def start(self) -> None:
        """Listens."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        if self.tls is None:
            self._server = await asyncio.start_unix_server(self._accept, self.path)
        else:
            host, context = self.tls
            self._server = await asyncio.start_server(self._accept, host, self.port, ssl=context)
            self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Is gone from one moment to the next: nothing is answered any more."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection._writer.transport.abort()
            await connection.close()
        self._listeners.clear()
        await self._server.wait_closed()

    async def followed(self) -> None:
        """Returns when a control process listens to what happens here."""
        while not self._listeners:
            await asyncio.sleep(0.01)

    # -- what happens unasked

    def happen(self, sandbox_id: str, state: State, cause: str | None, reason: str) -> None:
        """A sandbox changes by itself; who listens is told."""
        self.sequence += 1
        self.boxes[sandbox_id] = msgspec.structs.replace(
            self.boxes[sandbox_id], state=state, cause=cause, reason=reason, sequence=self.sequence
        )
        self.tell(wire.Event(observed=self.boxes[sandbox_id]))

    def session_becomes(self, session_id: str, **changes: Any) -> None:
        """A session changes; who listens is told."""
        self.sessions[session_id] = msgspec.structs.replace(self.sessions[session_id], **changes)
        self.tell(wire.Event(session=self.sessions[session_id]))

    def ask(self, sandbox_id: str, ask_id: str, **more: Any) -> Asked:
        """A gateway holds a request; who listens, and who will, is told."""
        now = time.time()
        fields: dict[str, Any] = {
            "project": self.boxes[sandbox_id].project,
            "generation": self.boxes[sandbox_id].generation,
            "rule": "writes",
            "host": "index.example",
            "port": 443,
            "protocol": "http",
            "method": "POST",
            "path": "/upload",
            "key": "index.example:443 POST /upload",
            "asked_at": now,
            "expires_at": now + 60.0,
        }
        asked = Asked(ask_id=ask_id, sandbox_id=sandbox_id, **{**fields, **more})
        self.asks[ask_id] = asked
        self.tell(wire.Event(asked=asked))
        return asked

    def tell(self, event: wire.Event) -> None:
        """Sends an event to every control process that subscribed."""
        for connection in self._listeners:
            connection.notify("event", event)

    # -- serving

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def handler(method: str) -> Callable[[Connection, msgspec.Raw], Awaitable[object]]:
            async def handle(connection: Connection, raw: msgspec.Raw) -> object:
                request = msgspec.msgpack.decode(raw, type=wire.METHODS[method][0])
                self.calls.append(method)
                if method in self.hooks:
                    await self.hooks[method](request)
                return self._answer(connection, method, request)

            return handle

        connection = Connection(reader, writer, {method: handler(method) for method in wire.METHODS})
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._listeners.discard(connection)

    def _answer(self, connection: Connection, method: str, request: Any) -> object:
        match method:
            case "node.info":
                return wire.NodeInfo(
                    node_id=self.node_id,
                    version="0",
                    boot_id="boot",
                    attach_url=self.attach_url,
                    port_url="http://{port}-{sandbox}.localhost:7071/",
                    isolation=self.isolation,
                    vmm=self.vmm,
                    store=self.store,
                    cpus=2,
                    memory_mib=4096,
                    disk_mib=100_000,
                )
            case "node.configure":
                self.configured = request
                return wire.Empty()
            case "template.list":
                return wire.TemplateList(templates=(self._release(),))
            case "template.resolve":
                if request.reference not in ("seed", "seed:latest", f"seed@{DIGEST}"):
                    raise NotFound(
                        "unknown_template", f"There is no template {request.reference!r}.", "There is `seed:latest`."
                    )
                return self._release()
            case "sandbox.list":
                return wire.SandboxList(sandboxes=tuple(self.boxes.values()), sequence=self.sequence)
            case "events.subscribe":
                self._listeners.add(connection)
                for asked in self.asks.values():
                    connection.notify("event", wire.Event(asked=asked))
                return wire.Empty()
            case "egress.answer":
                self.answers.append(request)
                self.asks.pop(request.ask_id, None)
                return wire.Empty()
            case "sandbox.create":
                return self._create(request)
            case "sandbox.metrics":
                return self._metrics(request)
            case "sandbox.activity":
                self.asked_activity += 1
                found = (
                    self.activity.get(one, wire.Activity(sandbox_id=one, idle_s=1e9)) for one in request.sandbox_ids
                )
                return wire.Activities(activities=tuple(found))
            case "sandbox.stay":
                self.stayed.append(request)
                return wire.Empty()
            case "sandbox.egress":
                return self._take(self._box(request), request.egress)
            case "sandbox.prepare":
                return self._becomes(self._create(request), State.PAUSED)
            case "sandbox.claim":
                seen = self._box(wire.SandboxRef(sandbox_id=request.sandbox_id, generation=request.generation))
                self.specs[request.sandbox_id] = request
                return self._becomes(self._take(seen, request.egress), State.RUNNING)
            case "sandbox.get":
                return self._box(request)
            case "sandbox.delete":
                seen = self._box(request)
                self.sequence += 1
                self.boxes.pop(request.sandbox_id)
                return msgspec.structs.replace(seen, state=State.DELETED, cause=None, reason="", sequence=self.sequence)
            case (
                "sandbox.start"
                | "sandbox.stop"
                | "sandbox.pause"
                | "sandbox.resume"
                | "sandbox.suspend"
                | "sandbox.restore"
            ):
                return self._move(Verb(method.removeprefix("sandbox.")), request)
            case "sandbox.fork":
                return self._fork(request)
            case "sandbox.rollback":
                return self._rollback(request)
            case "snapshot.create":
                return self._snapshot(request)
            case "snapshot.delete":
                self.snapshots.pop(request.snapshot_id, None)
                return wire.Empty()
            case "snapshot.list":
                return wire.SnapshotList(snapshots=tuple(self.snapshots.values()))
            case "export.make":
                self.exports[request.export_id] = request
                return wire.ExportHead(head=b"head of " + request.export_id.encode())
            case "export.seal":
                self.signatures[request.export_id] = request.signature
                return wire.ExportMade(
                    export_id=request.export_id,
                    size_bytes=4711,
                    digest="sha256:" + "0" * 64,
                    expires_at=time.time() + request.kept_s,
                )
            case "export.delete" | "upload.delete":
                self.exports.pop(request.export_id, None)
                self.uploads.pop(request.export_id, None)
                return wire.Empty()
            case "upload.fetch":
                self.fetched[request.export_id] = request
                return wire.UploadStatus(offset=0, fetching=True)
            case "upload.status":
                if request.export_id not in self.fetched:
                    raise NotFound("unknown_upload", "There is no such upload here.", "")
                return wire.UploadStatus(offset=5, size=10)
            case "upload.describe":
                if request.export_id not in self.uploads:
                    raise NotFound("unknown_upload", "There is no such upload here.", "")
                return self.uploads[request.export_id]
            case "snapshot.import":
                return self._import_snapshot(request)
            case "sandbox.import":
                return self._import(request)
            case "sandbox.fetch":
                self.sequence += 1
                self.boxes[request.sandbox_id] = wire.Observed(
                    sandbox_id=request.sandbox_id,
                    project=request.project,
                    generation=request.generation,
                    state=State.SUSPENDED,
                    boot_id="boot",
                    artifact=request.artifact,
                    sequence=self.sequence,
                )
                self.specs[request.sandbox_id] = request
                return self._take(self.boxes[request.sandbox_id], request.egress)
            case _:
                return self._session(method, request)

    def _import_snapshot(self, request: wire.SnapshotImport) -> wire.Snapshot:
        if request.snapshot_id not in self.snapshots:
            told = self.uploads.pop(request.upload_id)
            self.snapshots[request.snapshot_id] = wire.Snapshot(
                snapshot_id=request.snapshot_id,
                sandbox_id=told.source,
                project=request.project,
                kind=request.kind,
                template_digest=request.template_digest,
                shape=request.shape,
                disk_bytes=10,
                memory_bytes=20 if request.kind == "full" else 0,
                digest=DIGEST,
                created_at=time.time(),
            )
        return self.snapshots[request.snapshot_id]

    def _import(self, request: wire.ImportRequest) -> wire.Observed:
        if request.sandbox_id not in self.boxes:
            self.sequence += 1
            self.uploads.pop(request.upload_id, None)
            self.boxes[request.sandbox_id] = wire.Observed(
                sandbox_id=request.sandbox_id,
                project=request.project,
                generation=request.generation,
                state=State.SUSPENDED if request.memory else State.STOPPED,
                boot_id="boot",
                sequence=self.sequence,
            )
            self.specs[request.sandbox_id] = request
            self._take(self.boxes[request.sandbox_id], request.egress)
        return self.boxes[request.sandbox_id]

    def _take(self, seen: wire.Observed, egress: wire.EgressSpec | None) -> wire.Observed:
        """What may leave a sandbox from now on; an older revision changes nothing."""
        state = seen.egress or wire.EgressState(revision=0)
        if egress is None or egress.revision < state.revision:
            return seen
        if egress.revision in self.rejects:
            state = msgspec.structs.replace(state, conditions={"policy_rejected": f"Revision {egress.revision}."})
        else:
            self.egress[seen.sandbox_id] = egress
            state = wire.EgressState(revision=egress.revision)
        seen = self.boxes[seen.sandbox_id] = msgspec.structs.replace(seen, egress=state)
        return seen

    def _release(self) -> wire.TemplateRelease:
        return wire.TemplateRelease(name="seed", tag="latest", digest=DIGEST, size_bytes=1, created_at=1.0)

    def _box(self, ref: wire.SandboxRef) -> wire.Observed:
        seen = self.boxes.get(ref.sandbox_id)
        if seen is None:
            raise NotFound("unknown_sandbox", f"There is no sandbox {ref.sandbox_id}.", "")
        if ref.generation < seen.generation:
            raise Conflict("stale_generation", "A newer one was here.", "")
        return seen

    def _metrics(self, ref: wire.SandboxRef) -> wire.SandboxMetrics:
        seen = self._box(ref)
        known = wire.SandboxMetrics(
            sandbox_id=seen.sandbox_id, state=seen.state, observed_at=1.0, host=wire.HostUsage(disk_bytes=4096)
        )
        if seen.state != State.RUNNING:
            return msgspec.structs.replace(known, guest_error=f"The sandbox is {seen.state}.")
        guest = wire.GuestUsage(
            uptime_s=2.0,
            cpus=1,
            cpu_user_s=0.5,
            cpu_system_s=0.25,
            load1=0.1,
            processes=7,
            memory_total_bytes=1 << 28,
            memory_available_bytes=1 << 27,
            disk_total_bytes=2**63,
            disk_free_bytes=1,
        )
        return msgspec.structs.replace(known, guest=guest, host=wire.HostUsage(cpu_s=1.5, disk_bytes=4096))

    def _create(self, spec: wire.SandboxSpec) -> wire.Observed:
        seen = self.boxes.get(spec.sandbox_id)
        if seen is not None and seen.state == State.RUNNING:
            return seen
        self.sequence += 1
        self.specs[spec.sandbox_id] = spec
        self.boxes[spec.sandbox_id] = wire.Observed(
            sandbox_id=spec.sandbox_id,
            project=spec.project,
            generation=spec.generation,
            state=State.RUNNING,
            isolation=self.isolation,
            boot_id=new_id(),
            phases_ms={"restore": 1.0},
            egress=wire.EgressState(revision=0),
            sequence=self.sequence,
        )
        return self._take(self.boxes[spec.sandbox_id], spec.egress)

    def _move(self, verb: Verb, ref: wire.SandboxRef) -> wire.Observed:
        seen = self._take(self._box(ref), ref.egress)
        if not admits(verb, State(seen.state)):
            raise Conflict("wrong_state", f"The sandbox is {seen.state}.", "")
        boot_id = new_id() if verb is Verb.START else seen.boot_id
        stored = 1_000_000 if verb is Verb.SUSPEND else None
        artifact = "0" * 64 if verb is Verb.SUSPEND and self.store else None
        return self._becomes(seen, VERBS[verb].target, boot_id=boot_id, stored_bytes=stored, artifact=artifact)

    def _becomes(self, seen: wire.Observed, state: State | None, **changes: Any) -> wire.Observed:
        self.sequence += 1
        seen = self.boxes[seen.sandbox_id] = msgspec.structs.replace(
            seen, state=state or seen.state, cause=None, reason="", sequence=self.sequence, **changes
        )
        return seen

    def _fork(self, request: wire.ForkRequest) -> wire.ForkAnswer:
        source = self._box(request)
        outcomes: list[wire.BranchOutcome] = []
        for branch in request.branches:
            spec = msgspec.structs.replace(
                self.specs[source.sandbox_id],
                sandbox_id=branch.sandbox_id,
                hostname=branch.hostname,
                env=branch.env,
                generation=branch.generation,
                egress=branch.egress,
            )
            outcomes.append(wire.BranchOutcome(sandbox_id=branch.sandbox_id, observed=self._create(spec)))
        return wire.ForkAnswer(source=self._becomes(source, None), branches=tuple(outcomes), source_stopped_ms=1.5)

    def _snapshot(self, request: wire.SnapshotRequest) -> wire.SnapshotMade:
        source = self._box(request)
        if request.snapshot_id not in self.snapshots:
            self.snapshots[request.snapshot_id] = wire.Snapshot(
                snapshot_id=request.snapshot_id,
                sandbox_id=request.sandbox_id,
                project=request.project,
                kind=request.kind,
                template_digest=DIGEST,
                shape=self.specs[request.sandbox_id].shape,
                disk_bytes=10,
                memory_bytes=20 if request.kind == "full" else 0,
                digest=DIGEST,
                created_at=time.time(),
            )
        return wire.SnapshotMade(snapshot=self.snapshots[request.snapshot_id], source=self._becomes(source, None))

    def _rollback(self, request: wire.RollbackRequest) -> wire.Observed:
        kept = self.snapshots.get(request.snapshot_id)
        if kept is None:
            raise NotFound("unknown_snapshot", "There is no such snapshot.", "")
        return self._becomes(self._take(self._box(request), request.egress), ROLLBACK_TARGETS[SnapshotKind(kept.kind)])

    def _session(self, method: str, request: Any) -> object:
        match method:
            case "session.create":
                known = self.session_specs.get(request.session_id)
                if known is not None and known != request:
                    raise Conflict("session_exists", "Another session has this id.", "")
                if known is None:
                    self.session_specs[request.session_id] = request
                    self.sessions[request.session_id] = wire.SessionStatus(
                        session_id=request.session_id, sandbox_id=request.sandbox_id, state="created"
                    )
                return self.sessions[request.session_id]
            case "session.branched":
                return wire.BranchedSessions(sessions=())
            case "session.list":
                found = (one for one in self.sessions.values() if one.sandbox_id == request.sandbox_id)
                return wire.SessionList(sessions=tuple(found))
            case "session.get":
                if request.session_id not in self.sessions:
                    raise NotFound("unknown_session", "There is no such session.", "")
                return self.sessions[request.session_id]
            case "session.delete":
                self.sessions.pop(request.session_id, None)
                return wire.Empty()
        raise AssertionError(method)
