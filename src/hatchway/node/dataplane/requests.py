"""What a request says: its session, its JSON body within a bound, and the octets that it streams."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.types import Message, Receive, Scope

from hatchway.domain import checking
from hatchway.domain.errors import Gone, NotFound
from hatchway.node.dataplane.accesses import note_claims
from hatchway.node.dataplane.tokens import TokenChecker, is_for, may_use_sandbox, may_use_session
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.sessions import Sessions, unknown_session
from hatchway.wire import tracing
from hatchway.wire.tokens import Claims

T = TypeVar("T", bound=msgspec.Struct)


class ClientGone(Exception):
    """The client closed its connection: nobody is there to be answered."""


SUBPROTOCOL = "hatchway.v1"
"""What a WebSocket of ours speaks."""
_TOKEN_PROTOCOL = "hatchway.token."


def claims_of(scope: Scope, tokens: TokenChecker) -> Claims:
    """Checks the token of a request, or of a WebSocket's handshake, whose token may be a subprotocol. Raises `Unauthenticated`."""
    authorization = HTTPConnection(scope).headers.get("authorization")
    if authorization is None and scope["type"] == "websocket":
        offered = [name for name in scope["subprotocols"] if name.startswith(_TOKEN_PROTOCOL)]
        token = offered[0].removeprefix(_TOKEN_PROTOCOL) if len(offered) == 1 else ""
        claims = tokens.check_token(token, "`Authorization: Bearer TOKEN` or the subprotocol `hatchway.token.TOKEN`")
    else:
        claims = tokens.check(authorization)
    tracing.bind(sandbox_id=claims.sandbox_id, project=claims.project)
    note_claims(scope, claims)
    return claims


def session_of(scope: Scope, tokens: TokenChecker, sessions: Sessions) -> tuple[Session, Claims]:
    """Returns the session of the path, if the request's token is for it.

    Raises `Unauthenticated`, `Forbidden`, `NotFound("unknown_session")`, and `Gone("session_gone")` when the token itself names the
    session, which must have been here then.
    """
    session_id = str(scope["path_params"]["session_id"])
    claims = claims_of(scope, tokens)
    may_use_session(claims, session_id)
    try:
        session = sessions.session(session_id)
        if claims.session_id is None and not is_for(
            claims, session.record.spec.sandbox_id, session.record.spec.project
        ):
            # Of another sandbox's sessions a token learns nothing, not even that they are there.
            raise unknown_session()
    except NotFound:
        if claims.session_id is None:
            raise
        raise Gone(
            "session_gone",
            "The session was deleted, or the time that its output is kept for has passed.",
            "Create a new session; `retain_s` says how long its output is kept.",
        ) from None
    may_use_sandbox(claims, session.record.spec.sandbox_id, session.record.spec.project)
    return session, claims


async def read_json(scope: Scope, receive: Receive, kind: type[T], limit: int) -> T | None:
    """Reads a JSON body as `kind`; None when there is no body. Raises what `checking.decode` does, `UnsupportedMedia`, `TooLarge`, and `ClientGone`."""
    announced = Request(scope).headers.get("content-length", "")
    body = bytearray()
    too_large = announced.isdecimal() and int(announced) > limit
    more = not too_large
    while more:
        message = await _next(receive)
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            too_large = True
            break
    if too_large:
        raise checking.too_large(limit)
    if not body.strip():
        return None
    checking.require_json(Request(scope).headers.get("content-type"))
    return checking.decode(bytes(body), kind)


def flag(request: HTTPConnection, name: str, *, default: bool = False) -> bool:
    """Reads a query parameter that is 0 or 1. Raises `invalid_field`."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise checking.invalid_field(name, f"it is {value[:40]!r}.", ("0", "1"))
    return value == "1"


def offset(request: HTTPConnection, name: str) -> int | None:
    """Reads a query parameter that is an offset in octets. Raises `invalid_field`."""
    value = request.query_params.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 19):
        raise checking.invalid_field(name, f"it is {value[:40]!r}.", {"type": "integer", "minimum": 0})
    return int(value)


class Departure:
    """Notices that the client of a request whose body was read goes away while its answer is streamed."""

    def __init__(self, receive: Receive, noticed: Callable[[], None]) -> None:
        self._receive = receive
        self._noticed = noticed
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stops watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._noticed()


async def _next(receive: Receive) -> Message:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


class Body:
    """The octets of a request's body as they come, read ahead within a bound, so that a client that goes away is noticed
    while the octets before wait for the process."""

    def __init__(self, receive: Receive, ahead: int) -> None:
        self._receive = receive
        self._ahead = ahead
        self._chunks: list[bytes] = []
        self._size = 0
        self._complete = False
        self._gone = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._pump())

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields what has come, joined. Raises `ClientGone` when the body is cut off."""
        while True:
            self._changed.clear()
            if self._chunks:
                data = b"".join(self._chunks)
                self._chunks.clear()
                self._size = 0
                self._taken.set()
                yield data
            elif self._gone:
                raise ClientGone
            elif self._complete:
                return
            else:
                await self._changed.wait()

    async def departed(self) -> None:
        """Returns when the client has gone away."""
        while not self._gone:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Stops reading."""
        self._task.cancel()

    async def _pump(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                self._changed.set()
                return
            data = message.get("body", b"")
            if data:
                self._chunks.append(data)
                self._size += len(data)
            self._complete = self._complete or not message.get("more_body", False)
            self._changed.set()
            while self._size >= self._ahead:
                self._taken.clear()
                await self._taken.wait()
