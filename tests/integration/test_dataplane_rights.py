"""Every route of the data plane, WebSockets and ports among them, against every token that is not good for it."""

import json
from typing import Any, cast

import httpx
import jwt
import pytest
from dataplane_fixtures import agent, module_opened, module_plane
from dataplane_harness import Plane
from ports_harness import connected, echo_heads, request, serving, token_of
from starlette.routing import Route, WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from hatchway.domain.ids import new_id
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.tokens import TokenChecker

__all__ = ["agent", "module_opened"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane = module_plane

Refused = tuple[int, str]


def routes() -> list[tuple[str, str]]:
    """Method (`WS` for a WebSocket) and path of everything that is served, apart from what anybody may ask for."""
    app: Any = make_app(cast(Any, None), TokenChecker(), cast(Any, None))
    found = []
    for route in app._inner.routes:
        if isinstance(route, Route):
            found += [(method, route.path) for method in sorted(route.methods or ())]
        elif isinstance(route, WebSocketRoute):
            found.append(("WS", route.path))
    public = [("GET", "/healthz"), ("HEAD", "/healthz"), ("WS", "/{path:path}")]
    assert set(public) <= set(found)
    sockets = {path for method, path in found if method == "WS"}
    # A plain GET where a WebSocket is told so, whoever asks.
    return [one for one in found if one not in public and not (one[0] != "WS" and one[1] in sockets)] + [("PORT", "/")]


def scope_of(path: str) -> str:
    if "/files/" in path:
        return "files"
    return "sessions" if "{session_id}" in path else "ports"


async def whole_refusal(plane: Plane, method: str, path: str, token: str) -> tuple[int, list[tuple[str, str]], str]:
    """Everything that a request is answered with, but the time and its own id."""
    headers = {"authorization": f"Bearer {token}"}
    if method == "WS":
        with pytest.raises(InvalidStatus) as refused:
            await connect(plane.url.replace("http", "ws") + path, additional_headers=headers, proxy=None).__aenter__()
        found = refused.value.response
        shown, status, body = found.headers.raw_items(), found.status_code, (found.body or b"").decode()
    else:
        response = await plane.client.request(method, plane.url + path, headers=headers, content=b"")
        shown, status, body = response.headers.multi_items(), response.status_code, response.text
    return status, sorted((name, value) for name, value in shown if name.lower() not in ("date", "x-request-id")), body


@pytest.mark.parametrize(
    ("method", "path"), [one for one in routes() if one[0] != "PORT"], ids=lambda value: value.strip("/")
)
async def test_what_another_project_has_is_answered_like_what_never_was(plane: Plane, method: str, path: str) -> None:
    command = await plane.create("cat", pty={"rows": 9, "cols": 9})
    token = token_of(plane, "sessions", "files", "ports", generation=9, project="other", sandbox_id=new_id())
    there = path.format(session_id=command.id, sandbox_id=plane.sandbox_id, port=9, watch=1)
    nowhere = path.format(session_id=new_id(), sandbox_id=new_id(), port=9, watch=1)
    found = await whole_refusal(plane, method, there, token)
    assert found == await whole_refusal(plane, method, nowhere, token)
    assert found[0] in (403, 404)
    assert (await command.status())["state"] == "created"


async def refusal(plane: Plane, method: str, path: str, session_id: str, token: str | None) -> Refused:
    """Status and code with which a request is answered."""
    path = path.format(session_id=session_id, sandbox_id=plane.sandbox_id, port=9, watch=1)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    if method == "PORT":
        async with serving(echo_heads) as port, connected(plane) as client:
            await client.send(request(plane, port, token=token))
            return await client.problem()
    if method == "WS":
        with pytest.raises(InvalidStatus) as refused:
            await connect(plane.url.replace("http", "ws") + path, additional_headers=headers, proxy=None).__aenter__()
        answer = refused.value.response
        return answer.status_code, json.loads(answer.body)["code"]
    response = await plane.client.request(method, plane.url + path, headers=headers, content=b"")
    assert response.headers["content-type"] == "application/problem+json" or method == "HEAD"
    return response.status_code, "" if method == "HEAD" else response.json()["code"]


@pytest.mark.parametrize(("method", "path"), routes(), ids=lambda value: value.strip("/"))
async def test_no_token_but_the_right_one(plane: Plane, method: str, path: str) -> None:
    command, other = await plane.create("cat", pty={"rows": 9, "cols": 9}), await plane.create("cat")
    scope = scope_of(path)
    wrong = sorted({"sessions", "files", "ports"} - {scope})
    revoked = token_of(plane, scope)
    await plane.configure(revoked=(jwt.decode(revoked, options={"verify_signature": False})["jti"],))
    await plane.tell("generation", 2)
    good = token_of(plane, scope, generation=2)
    body, signature = good.rsplit(".", 1)
    forged = jwt.encode(jwt.decode(good, options={"verify_signature": False}), "k" * 32, "HS256", {"kid": "key-1"})
    unsigned = jwt.encode(jwt.decode(good, options={"verify_signature": False}), None, "none", {"kid": "key-1"})
    # Of another sandbox's session one learns nothing; the sandbox that a path names is known to be another than the token's.
    elsewhere = (404, "unknown_session") if scope == "sessions" else (403, "wrong_sandbox")
    table: dict[str, tuple[str | None, set[Refused]]] = {
        "none": (None, {(401, "token_missing")}),
        "no token": ("x.y.z", {(401, "token_invalid")}),
        "of another key": (f"{body}.{signature[::-1]}", {(401, "token_invalid")}),
        "forged": (forged, {(401, "token_invalid")}),
        "unsigned": (unsigned, {(401, "token_invalid")}),
        "expired": (token_of(plane, scope, generation=2, ttl_s=-1.0), {(401, "token_expired")}),
        "revoked": (revoked, {(401, "token_revoked")}),
        "of an earlier life": (token_of(plane, scope, generation=1), {(401, "token_superseded")}),
        "of another sandbox": (token_of(plane, scope, generation=2, sandbox_id=new_id()), {elsewhere}),
        "of another project": (token_of(plane, scope, generation=2, project="other"), {elsewhere}),
        "with other scopes": (token_of(plane, *wrong, generation=2), {(403, "wrong_scope")}),
        "of another session": (
            plane.token(other.id, generation=2),
            {(403, "wrong_session" if scope == "sessions" else "wrong_scope")},
        ),
    }
    if scope != "sessions":
        table["of a session"] = (plane.token(command.id, generation=2), {(403, "wrong_scope")})
    for name, (token, expected) in table.items():
        status, code = await refusal(plane, method, path, command.id, token)
        assert (status, code) in expected or (method == "HEAD" and status in {one[0] for one in expected}), name
    assert (await command.status())["state"] == "created"  # nobody started it


async def test_a_browser_sends_no_cookie_that_the_api_looks_at(plane: Plane) -> None:
    command = await plane.create("cat")
    for name in ("hatchway-port", "__Host-hatchway-port", "token", "authorization"):
        headers = {"cookie": f"{name}={plane.token(command.id, generation=9)}", "hatchway-token": token_of(plane)}
        answer: httpx.Response = await plane.client.post(command.url("attach"), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "token_missing")
