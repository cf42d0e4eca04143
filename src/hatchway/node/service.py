"""Answers the control plane: the methods of `wire.node`, over a Unix socket or mutual TLS."""

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from hatchway import __version__
from hatchway.domain.errors import NotFound, Unavailable
from hatchway.domain.lifecycle import State
from hatchway.node import capacity, metrics, pausing, pooling, suspension, usage
from hatchway.node.activity import Uses
from hatchway.node.context import Context
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.exports import Exports
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.imports import Imports
from hatchway.node.sandbox import Sandbox
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.waking import Waker
from hatchway.wire import node as wire
from hatchway.wire.fault_points import reached
from hatchway.wire.rpc import Connection, Handler

log = logging.getLogger(__name__)


class NodeService:
    """Serves control processes; each method's request and answer are named in `wire.node.METHODS`."""

    def __init__(
        self,
        context: Context,
        sandboxes: Sandboxes,
        tokens: TokenChecker,
        node_id: str,
        attach_url: str,
        port_url: str = "",
        *,
        exports: Exports,
        imports: Imports,
        uses: Uses | None = None,
        waker: Waker | None = None,
    ) -> None:
        self._context = context
        self._uses = uses or Uses()
        self._waker = waker or Waker(context.events, sandboxes.is_awake, sandboxes.is_asleep)
        self._sandboxes = sandboxes
        self._tokens = tokens
        self._node_id = node_id
        self._attach_url = attach_url
        self._port_url = port_url
        self._exports = exports
        self._imports = imports
        self._connections: set[asyncio.Task[None]] = set()
        methods: dict[str, Callable[[Connection, Any], Awaitable[object]]] = {
            "node.info": self._info,
            "node.configure": self._configure,
            "node.drain": self._drain,
            "template.list": self._template_list,
            "template.resolve": self._template_resolve,
            "sandbox.create": self._create,
            "sandbox.start": self._start,
            "sandbox.stop": self._stop,
            "sandbox.pause": self._pause,
            "sandbox.resume": self._resume,
            "sandbox.suspend": self._suspend,
            "sandbox.restore": self._restore,
            "sandbox.fork": self._fork,
            "sandbox.rollback": self._rollback,
            "snapshot.create": self._snapshot_create,
            "snapshot.delete": self._snapshot_delete,
            "snapshot.import": self._snapshot_import,
            "snapshot.list": self._snapshot_list,
            "export.make": self._export_make,
            "export.seal": self._export_seal,
            "export.delete": self._export_delete,
            "upload.fetch": self._upload_fetch,
            "upload.status": self._upload_status,
            "upload.describe": self._upload_describe,
            "upload.delete": self._upload_delete,
            "sandbox.import": self._import,
            "sandbox.fetch": self._fetch,
            "sandbox.delete": self._delete,
            "sandbox.get": self._get,
            "sandbox.list": self._list,
            "sandbox.metrics": self._metrics,
            "session.create": self._session_create,
            "session.get": self._session_get,
            "session.list": self._session_list,
            "session.delete": self._session_delete,
            "session.branched": self._session_branched,
            "sandbox.activity": self._activity,
            "sandbox.stay": self._stay,
            "sandbox.egress": self._egress,
            "egress.answer": self._egress_answer,
            "sandbox.prepare": self._prepare,
            "sandbox.claim": self._claim,
            "events.subscribe": self._subscribe,
        }
        self._handlers: dict[str, Handler] = {
            name: _decoding(name, wire.METHODS[name][0], method) for name, method in methods.items()
        }

    async def serve_unix(self, sock: socket.socket, allowed_uids: frozenset[int]) -> asyncio.Server:
        """Serves peers of these uids on a listening Unix socket."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
            )
            _, uid, _ = struct.unpack("3i", peer)
            if uid not in allowed_uids:
                log.warning("uid %d may not speak to the node", uid)
                writer.close()
                return
            await self._serve(reader, writer)

        return await asyncio.start_unix_server(accept, sock=sock)

    async def serve_tls(self, host: str, port: int, certificate: Path, key: Path, client_ca: Path) -> asyncio.Server:
        """Serves control processes on other hosts; only certificates of `client_ca` are let in."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(client_ca)
        return await asyncio.start_server(self._serve, host, port, ssl=context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(reader, writer, self._handlers).run()

    # -- node

    async def _info(self, _: Connection, __: object) -> wire.NodeInfo:
        driver = self._context.driver
        return wire.NodeInfo(
            node_id=self._node_id,
            version=__version__,
            boot_id=self._context.host_boot_id,
            attach_url=self._attach_url,
            port_url=self._port_url,
            isolation=driver.isolation,
            vmm=f"{driver.name} {driver.version}",
            cpus=capacity.max_vcpus(),
            memory_mib=capacity.total_memory_mib(),
            disk_mib=shutil.disk_usage(self._context.root).total // 2**20,
            store="" if self._context.keeper is None else self._context.keeper.store_id,
            warnings=self._sandboxes.warnings(),
        )

    async def _configure(self, _: Connection, request: wire.Configure) -> wire.Empty:
        self._tokens.configure(request)
        self._imports.configure(request)
        return wire.Empty()

    async def _drain(self, _: Connection, __: object) -> wire.Empty:
        await self._sandboxes.drain()
        return wire.Empty()

    # -- templates

    async def _template_list(self, _: Connection, __: object) -> wire.TemplateList:
        return wire.TemplateList(templates=self._context.images.list())

    async def _template_resolve(self, _: Connection, request: wire.ResolveTemplate) -> wire.TemplateRelease:
        return self._context.images.resolve(request.reference).release

    # -- sandboxes

    async def _create(self, _: Connection, request: wire.SandboxSpec) -> wire.Observed:
        observed = await self._sandboxes.create(request)
        self._tokens.require_generation(request.sandbox_id, request.generation)
        return observed

    async def _start(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return await self._sandboxes.start(await self._with_policy(request))

    async def _stop(self, _: Connection, request: wire.StopRequest) -> wire.Observed:
        return await self._sandboxes.get(request.sandbox_id, request.generation).stop(request.reason, request.grace_s)

    async def _pause(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return await pausing.pause(self._sandboxes.get(request.sandbox_id, request.generation))

    async def _resume(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return await pausing.resume(await self._with_policy(request))

    async def _suspend(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return await suspension.suspend(self._sandboxes.get(request.sandbox_id, request.generation))

    async def _restore(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return await self._sandboxes.restore(await self._with_policy(request))

    async def _fork(self, _: Connection, request: wire.ForkRequest) -> wire.ForkAnswer:
        source = self._sandboxes.get(request.sandbox_id, request.generation)
        return await self._sandboxes.fork(source, request.branches)

    async def _rollback(self, _: Connection, request: wire.RollbackRequest) -> wire.Observed:
        sandbox = await self._with_policy(request)
        return await self._sandboxes.rollback(sandbox, request.snapshot_id)

    async def _import(self, _: Connection, request: wire.ImportRequest) -> wire.Observed:
        observed = await self._imports.take_in(request)
        self._tokens.require_generation(request.sandbox_id, request.generation)
        return observed

    async def _fetch(self, _: Connection, request: wire.FetchRequest) -> wire.Observed:
        observed = await self._imports.fetch(request)
        self._tokens.require_generation(request.sandbox_id, request.generation)
        return observed

    async def _delete(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        await self._imports.abandon(request.sandbox_id)
        try:
            sandbox = self._sandboxes.get(request.sandbox_id, request.generation)
        except NotFound:  # gone already, or never made: that is what was asked for
            return wire.Observed(
                sandbox_id=request.sandbox_id,
                project="",
                generation=request.generation,
                state=State.DELETED,
                sequence=self._context.events.next_sequence(),
            )
        observed = await sandbox.delete()
        self._uses.forget(request.sandbox_id)
        self._tokens.require_generation(request.sandbox_id, 0)
        return observed

    async def _get(self, _: Connection, request: wire.SandboxRef) -> wire.Observed:
        return self._sandboxes.get(request.sandbox_id).observed()

    async def _list(self, _: Connection, __: object) -> wire.SandboxList:
        return wire.SandboxList(
            sandboxes=tuple(sandbox.observed() for sandbox in self._sandboxes.all()),
            sequence=self._context.events.sequence,
        )

    async def _metrics(self, _: Connection, request: wire.SandboxRef) -> wire.SandboxMetrics:
        sandbox = self._sandboxes.get(request.sandbox_id, request.generation)
        return await usage.of(sandbox.holding(), sandbox.observed().state, sandbox.link, self._context.launcher)

    async def _activity(self, _: Connection, request: wire.ActivityRequest) -> wire.Activities:
        here = {sandbox.record.sandbox_id for sandbox in self._sandboxes.all()}
        return wire.Activities(activities=tuple(self._uses.of(one) for one in request.sandbox_ids if one in here))

    async def _stay(self, _: Connection, request: wire.StayRequest) -> wire.Empty:
        self._waker.stay(request.sandbox_id, request.error)
        return wire.Empty()

    async def _prepare(self, _: Connection, request: wire.SandboxSpec) -> wire.Observed:
        return await pooling.prepare(self._sandboxes, request)

    async def _claim(self, _: Connection, request: wire.SandboxSpec) -> wire.Observed:
        observed = await pooling.claim(self._sandboxes.get(request.sandbox_id, request.generation), request)
        self._uses.note(request.sandbox_id)
        self._tokens.require_generation(request.sandbox_id, request.generation)
        return observed

    # -- what leaves them

    async def _with_policy(self, request: wire.SandboxRef) -> Sandbox:
        """The sandbox that a request names, with the policy that came along. A gateway that cannot be told now is told when it is there."""
        sandbox = self._sandboxes.get(request.sandbox_id, request.generation)
        with contextlib.suppress(Unavailable):
            await sandbox.gateway.take(request.egress)
        return sandbox

    async def _egress(self, _: Connection, request: wire.EgressChange) -> wire.Observed:
        sandbox = self._sandboxes.get(request.sandbox_id, request.generation)
        await sandbox.gateway.take(request.egress)
        try:
            await sandbox.deliver_trust()
        except (LinkLost, GuestError) as error:
            # It is tried again with the next change, and when the machine is made to run again.
            log.warning("%s: the guest has not got what its policy needs: %s", request.sandbox_id, error)
        return sandbox.observed()

    async def _egress_answer(self, _: Connection, request: wire.AskAnswer) -> wire.Empty:
        await self._context.gateways.answer(request)
        return wire.Empty()

    # -- snapshots

    async def _snapshot_create(self, _: Connection, request: wire.SnapshotRequest) -> wire.SnapshotMade:
        source = self._sandboxes.get(request.sandbox_id, request.generation)
        return await self._sandboxes.snapshots.make(source, request)

    async def _snapshot_delete(self, _: Connection, request: wire.SnapshotRef) -> wire.Empty:
        await self._imports.abandon(request.snapshot_id)
        await self._sandboxes.snapshots.delete(request.snapshot_id)
        return wire.Empty()

    async def _snapshot_import(self, _: Connection, request: wire.SnapshotImport) -> wire.Snapshot:
        return await self._imports.take_in_snapshot(request)

    async def _snapshot_list(self, _: Connection, __: object) -> wire.SnapshotList:
        return wire.SnapshotList(snapshots=self._sandboxes.snapshots.all())

    # -- archives

    async def _export_make(self, _: Connection, request: wire.ExportRequest) -> wire.ExportHead:
        if request.snapshot_id is not None:
            return await self._exports.make(request, None)
        sandbox = self._sandboxes.get(request.sandbox_id, request.generation)
        return await self._exports.make(request, sandbox)

    async def _export_seal(self, _: Connection, request: wire.ExportSeal) -> wire.ExportMade:
        return await self._exports.seal(request)

    async def _export_delete(self, _: Connection, request: wire.ExportRef) -> wire.Empty:
        await self._exports.delete(request.export_id)
        return wire.Empty()

    async def _upload_fetch(self, _: Connection, request: wire.FetchUpload) -> wire.UploadStatus:
        return await self._imports.fetches.begin(request.export_id, request.project, request.url)

    async def _upload_status(self, _: Connection, request: wire.ExportRef) -> wire.UploadStatus:
        entry = await asyncio.to_thread(self._imports.uploads.find, request.export_id)
        if entry is None or entry.project != request.project:
            raise NotFound("unknown_upload", "There is no such upload here.", "It may be over: upload again.")
        return self._imports.fetches.status(request.export_id)

    async def _upload_describe(self, _: Connection, request: wire.ExportRef) -> wire.UploadDescription:
        return await self._imports.describe(request.export_id, request.project)

    async def _upload_delete(self, _: Connection, request: wire.ExportRef) -> wire.Empty:
        await self._imports.fetches.end(request.export_id)
        await asyncio.to_thread(self._imports.uploads.remove, request.export_id)
        return wire.Empty()

    # -- sessions

    async def _session_create(self, _: Connection, request: wire.SessionSpec) -> wire.SessionStatus:
        if self._sandboxes.get(request.sandbox_id).record.state in ("deleting", State.DELETED):
            # Its sessions are being removed: a new one would stay for good.
            raise NotFound("unknown_sandbox", "The sandbox is being deleted.", "Create a new one.")
        self._uses.note(request.sandbox_id)
        return await self._context.sessions.create(request)

    async def _session_get(self, _: Connection, request: wire.SessionRef) -> wire.SessionStatus:
        return self._context.sessions.get(request.session_id)

    async def _session_list(self, _: Connection, request: wire.SandboxSessions) -> wire.SessionList:
        return wire.SessionList(sessions=self._context.sessions.of_sandbox(request.sandbox_id))

    async def _session_delete(self, _: Connection, request: wire.SessionRef) -> wire.Empty:
        await self._context.sessions.delete(request.session_id)
        return wire.Empty()

    async def _session_branched(self, _: Connection, request: wire.SandboxSessions) -> wire.BranchedSessions:
        return wire.BranchedSessions(sessions=self._context.sessions.branched(request.sandbox_id))

    # -- events

    async def _subscribe(self, connection: Connection, request: wire.Subscribe) -> wire.Empty:
        end = self._context.events.subscribe(lambda event: connection.notify("event", event), request.sequence)
        for asked in self._context.gateways.asks():
            connection.notify("event", wire.Event(asked=asked))

        async def end_when_closed() -> None:
            await connection.closed.wait()
            end()

        task = asyncio.get_running_loop().create_task(end_when_closed())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        return wire.Empty()


def _decoding(
    name: str, request_type: type[wire.Struct], method: Callable[[Connection, Any], Awaitable[object]]
) -> Handler:
    decoder = msgspec.msgpack.Decoder(request_type)
    # What only looks is not written down: a table that is refreshed would fill the log.
    told = name.rpartition(".")[2] not in (
        "info",
        "get",
        "list",
        "resolve",
        "metrics",
        "branched",
        "status",
        "subscribe",
    )

    async def handle(connection: Connection, params: msgspec.Raw) -> object:
        began = time.perf_counter()
        with metrics.timed(metrics.VERBS, name):
            reached("asked", name)
            result = await method(connection, decoder.decode(params))
            reached("done", name)
        if told:
            log.info("%s", name, extra={"ms": round((time.perf_counter() - began) * 1e3, 1)})
        return result

    return handle
