"""Tokens of a sandbox: the right to reach its files, ports and sessions on its node, for a while, without a key."""

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.nodes import unreachable
from hatchway.domain.errors import NotFound
from hatchway.domain.ids import new_id
from hatchway.storage import sandboxes, tokens
from hatchway.storage.database import Connection
from hatchway.storage.rows import SandboxRow
from hatchway.storage.tokens import TokenRow
from hatchway.wire.tokens import SCOPES

MAX_TTL_S = tokens.LIVES_S

TokenScope = Literal["sessions", "files", "ports"]


class CreateToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new token of one sandbox: what it is good for, and for how long."""

    scopes: Annotated[tuple[TokenScope, ...], Meta(min_length=1, max_length=3)]
    ttl_s: Annotated[float, Meta(ge=1, le=MAX_TTL_S)] = 3600.0


class Token(views.View, frozen=True, kw_only=True):
    """A token of a sandbox that is good now, without the token itself. `key_id` is the API key that asked for it."""

    id: str
    sandbox_id: str
    key_id: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float


class TokenPage(views.View, frozen=True, kw_only=True):
    """The sandbox's tokens that are good now, newest first, the newest thousand."""

    tokens: tuple[Token, ...]
    next_cursor: str | None


async def create(call: Call[CreateToken]) -> Response:
    """Signs a token; it ends with the key that asked for it. What is stored of it is who may do what, not the token."""
    plane, body = call.plane, call.body
    scopes = tuple(scope for scope in SCOPES if scope in body.scopes)
    sandbox_id = _id(call, "sandbox")
    # Looked at before the transaction, so that an unknown sandbox is told first.
    node_id = (await plane.database.read(sandboxes.get_alive, call.project, sandbox_id)).node_id
    link = plane.nodes.find(node_id)
    if link is None or link.info is None:
        raise unreachable(node_id)
    now = time.time()
    ends = min(now + body.ttl_s, call.key.expires_at or now + body.ttl_s)
    row = TokenRow(
        id=new_id(),
        project=call.project,
        sandbox_id=sandbox_id,
        key_id=call.key.id,
        scopes=scopes,
        created_at=now,
        expires_at=float(int(ends)),
        revoked_at=None,
    )
    sandbox = await plane.database.write(_store, row)
    token = plane.signer.sign(
        token_id=row.id,
        project=row.project,
        sandbox_id=row.sandbox_id,
        generation=sandbox.generation,
        expires_at=row.expires_at,
        scopes=frozenset(scopes),
        key_id=row.key_id,
    )
    shown = views.SandboxToken(
        token=token,
        token_id=row.id,
        expires_at=row.expires_at,
        scopes=scopes,
        sandbox_id=sandbox.id,
        data_plane_url=link.info.attach_url.rstrip("/"),
        port_url=link.info.port_url.replace("{sandbox}", sandbox.id),
    )
    return answer(shown, 201)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the tokens of a sandbox."""
    rows = await call.plane.database.read(tokens.list_of, call.project, _id(call, "sandbox"))
    shown = (msgspec.convert(row, Token, from_attributes=True) for row in rows)
    return answer(TokenPage(tokens=tuple(shown), next_cursor=None))


async def revoke(call: Call[NoBody]) -> Response:
    """Revokes one token. The nodes that are connected know it when this is answered, and have ended what was open by it."""
    await call.plane.database.write(tokens.revoke, call.project, _id(call, "token"))
    await call.plane.nodes.configure_all()
    return answer(None, 204)


async def revoke_all(call: Call[NoBody]) -> Response:
    """Revokes every token of a sandbox, those of its sessions too; their owners may ask for new ones at once."""
    await call.plane.database.write(tokens.revoke_of_sandbox, call.project, _id(call, "sandbox"))
    await call.plane.nodes.configure_all()
    return answer(None, 204)


def _store(connection: Connection, row: TokenRow) -> SandboxRow:
    sandbox = sandboxes.get_alive(connection, row.project, row.sandbox_id)
    tokens.create(connection, row)
    return sandbox


def _id(call: Call[Any], what: str) -> str:
    return requests.check_id(call.path["id"], what, NotFound)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/tokens",
        create,
        "Make a data-plane token of a sandbox",
        {201: views.SandboxToken},
        "sandboxes",
        scope="exec",
        body=CreateToken,
        errors=(404, 410, 503),
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}/tokens",
        list_,
        "List the tokens of a sandbox that are good now",
        {200: TokenPage},
        "sandboxes",
        errors=(404,),
    ),
    Endpoint(
        "DELETE",
        "/v1/sandboxes/{id}/tokens",
        revoke_all,
        "Revoke every token of a sandbox and of its sessions",
        {204: None},
        "sandboxes",
        scope="exec",
        body=NoBody,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/tokens/{id}/revoke",
        revoke,
        "Revoke a token of a sandbox",
        {204: None},
        "sandboxes",
        scope="exec",
        body=NoBody,
        errors=(404,),
    ),
)
