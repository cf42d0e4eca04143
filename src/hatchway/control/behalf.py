"""Requests of the E2B wrapper on behalf of a sandbox: which listener admits them, which sandboxes, and what for. See `wire.behalf`."""

import asyncio
import os
import socket
import struct
from typing import Any

from starlette.requests import Request

from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Endpoint
from hatchway.control.plane import Plane
from hatchway.domain.errors import Forbidden, NotFound
from hatchway.domain.ids import is_id
from hatchway.domain.lifecycle import State
from hatchway.storage import operations, outbox, sandboxes, sessions
from hatchway.storage.rows import KeyRow, SandboxRow
from hatchway.wire import tracing
from hatchway.wire.behalf import ALL, ANNOTATION, HEADER, KEY_ID
from hatchway.wire.http_head import BoundedHead

SCOPES = ("read", "exec", "write")

_OF_SANDBOX = frozenset(
    {
        ("GET", "/v1/sandboxes/{id}"),
        ("GET", "/v1/sandboxes/{id}/metrics"),
        ("POST", "/v1/sandboxes/{id}/wake"),
        ("POST", "/v1/sandboxes/{id}/extend"),
        ("GET", "/v1/sandboxes/{id}/sessions"),
        ("POST", "/v1/sandboxes/{id}/sessions"),
        ("POST", "/v1/sandboxes/{id}/tokens"),
    }
)
_OF_SESSION = frozenset(
    {("GET", "/v1/sessions/{id}"), ("DELETE", "/v1/sessions/{id}"), ("POST", "/v1/sessions/{id}/token")}
)
_OF_OPERATION = frozenset({("GET", "/v1/operations/{id}")})
_OF_ALL = frozenset({("GET", "/v1/events")})


async def key_of(plane: Plane, request: Request, endpoint: Endpoint, *, admitted: bool) -> KeyRow | None:
    """The key that a request on behalf of a sandbox counts as having; None for a request that is on nobody's behalf.

    `admitted` tells whether it came over the wrapper's socket. Raises `Forbidden` (`on_behalf_refused` on any other listener, and for
    what is not the sandbox's own; `scope_missing`), `NotFound("unknown_sandbox")` for one that is not the wrapper's.
    """
    sandbox_id = request.headers.get(HEADER)
    if sandbox_id is None:
        return None
    if not admitted or "authorization" in request.headers:
        raise _refused("Nobody asks on behalf of a sandbox here.", f"Leave `{HEADER}` out, and send a key.")
    if sandbox_id == ALL:
        if (endpoint.method, endpoint.path) not in _OF_ALL:
            raise _refused("This is not asked on behalf of all sandboxes.", "Name one of them.")
        return _key(outbox.INSTALLATION, ("read",), 0.0)
    row = await plane.database.read(sandboxes.find, sandbox_id) if is_id(sandbox_id) else None
    if row is None or row.pool is not None or row.state is State.DELETED or ANNOTATION not in (row.annotations or {}):
        raise NotFound("unknown_sandbox", f"There is no sandbox {sandbox_id[:64]!r} to be spoken for.", "Create one.")
    tracing.bind(project=row.project, key_id=KEY_ID, sandbox_id=row.id)
    if not await _own(plane, request, endpoint, row):
        raise _refused(
            f"This is not for the sandbox {row.id} to ask.",
            "Name the sandbox itself, one of its sessions or operations.",
        )
    key = _key(row.project, SCOPES, row.created_at)
    if endpoint.scope is not None:
        require_scope(key, endpoint.scope)
    return key


async def _own(plane: Plane, request: Request, endpoint: Endpoint, row: SandboxRow) -> bool:
    """Whether what a request names is the sandbox, or of it."""
    what, named = (endpoint.method, endpoint.path), str(request.path_params.get("id", ""))
    if what in _OF_SANDBOX:
        return named == row.id
    try:
        if what in _OF_SESSION:
            return (await plane.database.read(sessions.get, row.project, named)).sandbox_id == row.id
        if what in _OF_OPERATION:
            return (await plane.database.read(operations.get, row.project, named)).target == row.id
    except NotFound:
        return False
    return False


def _key(project: str, scopes: tuple[str, ...], created_at: float) -> KeyRow:
    return KeyRow(
        id=KEY_ID,
        project=project,
        name=KEY_ID,
        prefix="",
        scopes=scopes,
        created_at=created_at,
        expires_at=None,
        last_used_at=None,
        revoked_at=None,
        development=False,
    )


def _refused(cause: str, remedy: str) -> Forbidden:
    return Forbidden("on_behalf_refused", cause, remedy)


def protocol(uid: int) -> type[BoundedHead]:
    """HTTP for connections of the user `uid`, of ours and of root; others are cut off without an answer."""
    admitted = {uid, os.geteuid(), 0}

    class OfPeer(BoundedHead):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
            super().connection_made(transport)
            if _peer_uid(transport) not in admitted:
                transport.abort()

    return OfPeer


def _peer_uid(transport: asyncio.BaseTransport) -> int:
    sock: Any = transport.get_extra_info("socket")
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
