"""Tokens of a sandbox: the right to reach its files, ports and sessions on its node, for a while, without a key."""

import time
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, answer
from hatchway.domain.errors import NotFound, Unavailable
from hatchway.domain.ids import new_id
from hatchway.storage import outbox, sandboxes
from hatchway.wire.tokens import SCOPES

MAX_TTL_S = 24 * 3600.0

TokenScope = Literal["sessions", "files", "ports"]


class CreateToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new token of one sandbox: what it is good for, and for how long."""

    scopes: Annotated[tuple[TokenScope, ...], Meta(min_length=1, max_length=3)]
    ttl_s: Annotated[float, Meta(ge=1, le=MAX_TTL_S)] = 3600.0


async def create(call: Call[CreateToken]) -> Response:
    """Signs a token. It is stored nowhere; that it was made, by which key, is an event."""
    plane, body = call.plane, call.body
    scopes = tuple(scope for scope in SCOPES if scope in body.scopes)
    sandbox_id = requests.check_id(call.path["id"], "sandbox", NotFound)
    sandbox = await plane.database.read(sandboxes.get_alive, call.project, sandbox_id)
    link = plane.nodes.find(sandbox.node_id)
    if link is None or link.info is None:
        raise Unavailable("node_unreachable", f"The node {sandbox.node_id} is not connected.", "Try again in a moment.")
    token_id, expires_at = new_id(), float(int(time.time() + body.ttl_s))
    data = {"token": token_id, "scopes": scopes, "expires_at": expires_at, "key": call.key.id}
    await plane.database.write(outbox.append, sandbox.project, "token.created", sandbox.id, data)
    token = plane.signer.sign(
        token_id=token_id,
        project=sandbox.project,
        sandbox_id=sandbox.id,
        generation=sandbox.generation,
        expires_at=expires_at,
        scopes=frozenset(scopes),
    )
    shown = views.SandboxToken(
        token=token,
        token_id=token_id,
        expires_at=expires_at,
        scopes=scopes,
        sandbox_id=sandbox.id,
        data_plane_url=link.info.attach_url.rstrip("/"),
        port_url=link.info.port_url.replace("{sandbox}", sandbox.id),
    )
    return answer(shown, 201)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/tokens",
        create,
        "Make a data-plane token of a sandbox",
        {201: views.SandboxToken},
        "sandboxes",
        scope="write",
        body=CreateToken,
        errors=(404, 410, 503),
    ),
)
