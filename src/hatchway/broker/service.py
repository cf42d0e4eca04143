"""The broker's rpc: sources from the control plane, grants from the node; each peer is told by its user, and may do its own part only."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from hatchway.broker import auditing
from hatchway.broker.auditing import AuditSink
from hatchway.broker.config import BrokerConfig
from hatchway.broker.grants import Grants
from hatchway.broker.legs import peer_uid
from hatchway.broker.sources import Sources
from hatchway.domain.errors import HatchwayError
from hatchway.wire import broker as wire
from hatchway.wire.message import Empty, Struct
from hatchway.wire.rpc import Connection, Handler

EXPIRE_EVERY_S = 1.0

P = TypeVar("P", bound=Struct)

log = logging.getLogger(__name__)


class BrokerService:
    """Serves `wire.broker.METHODS`."""

    def __init__(self, config: BrokerConfig, sources: Sources, grants: Grants, audit: AuditSink) -> None:
        self._config = config
        self._sources = sources
        self._grants = grants
        self._audit = audit
        self._connections: set[Connection] = set()
        self._of_control: dict[str, Handler] = {
            "source.put": _typed(wire.Source, self._put),
            "source.delete": _typed(wire.SourceRef, self._delete),
            "source.check": _typed(wire.SourceRef, self._check),
            "store.rotate": _typed(Empty, self._rotate),
        }
        self._of_node: dict[str, Handler] = {
            "grant.put": _typed(wire.Grant, self._grant),
            "grant.revoke": _typed(wire.GrantRef, self._revoke),
            "grant.list": _typed(Empty, self._list),
        }

    async def serve_unix(self, sock: socket.socket) -> asyncio.Server:
        """Serves on a listening Unix socket; others than control plane and node are turned away."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            uid = peer_uid(writer)
            handlers: dict[str, Handler] = {}
            if uid in self._config.control_uids:
                handlers |= self._of_control
            if uid in self._config.node_uids:
                handlers |= self._of_node
            if not handlers:
                log.warning("uid %d may not speak to the broker", uid)
                writer.close()
                return
            connection = Connection(reader, writer, handlers)
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)

        return await asyncio.start_unix_server(accept, sock=sock)

    async def close(self) -> None:
        """Ends every connection."""
        for connection in list(self._connections):
            await connection.close()

    async def expire(self) -> None:
        """Ends for ever what nobody renews."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            for grant in await self._grants.expire():
                self._note(grant.project, grant.sandbox_id, grant.generation, "credential.revoked", "expired")

    async def _put(self, source: wire.Source) -> wire.SourceCheck:
        found = await self._sources.put(source)
        await self._grants.source_changed(source.project, [source.name])
        return found

    async def _delete(self, ref: wire.SourceRef) -> Empty:
        gone = await self._sources.delete(ref.project, ref.name)
        await self._grants.source_changed(ref.project, [*gone, ref.name])
        return Empty()

    async def _check(self, ref: wire.SourceRef) -> wire.SourceCheck:
        found = await self._sources.check(ref.project, ref.name)
        self._grants.tidy()
        return found

    async def _rotate(self, _: Empty) -> wire.Rotated:
        key_id, sealed = await self._sources.rotate()
        return wire.Rotated(key_id=key_id, sealed=sealed)

    async def _grant(self, grant: wire.Grant) -> wire.Granted:
        granted = await self._grants.put(grant)
        lent = sorted({one.credential_id for one in grant.bindings} - granted.unavailable.keys())
        if lent:
            self._note(
                grant.project,
                grant.sandbox_id,
                grant.generation,
                "credential.leased",
                "allowed",
                credentials=lent,
                expires_at=granted.expires_at,
            )
        return granted

    async def _revoke(self, ref: wire.GrantRef) -> Empty:
        if (grant := await self._grants.revoke(ref.sandbox_id, ref.generation)) is not None:
            self._note(grant.project, grant.sandbox_id, grant.generation, "credential.revoked", "revoked")
        return Empty()

    async def _list(self, _: Empty) -> wire.GrantList:
        refs = (wire.GrantRef(sandbox_id=one.sandbox_id, generation=one.generation) for one in self._grants.all())
        return wire.GrantList(grants=tuple(refs))

    def _note(self, project: str, sandbox_id: str, generation: int, kind: str, reason: str, **data: object) -> None:
        """Records what is no use of a secret: it happens also when that is not possible now."""
        decision = "allowed" if kind == "credential.leased" else ""
        try:
            self._audit.record(
                auditing.of_grant(kind, project, sandbox_id, generation, decision, "" if decision else reason, **data)
            )
        except HatchwayError as error:
            log.warning("%s of %s was not recorded: %s", kind, sandbox_id, error.cause)


def _typed(kind: type[P], body: Callable[[P], Awaitable[Struct]]) -> Handler:
    """A handler that reads its request. What cannot be read is told without a word of it: it may have a secret in it."""

    async def handle(_: Connection, params: msgspec.Raw) -> object:
        return await body(msgspec.msgpack.decode(params, type=kind))

    return handle
