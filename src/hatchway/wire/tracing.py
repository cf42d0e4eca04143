"""What an event belongs to: a request and the key that it came with, an operation, a sandbox, a project.

Bound once at the border of the API, these names travel with every call between our processes and stand in every log line that is
written on the way, so that one search for a request's id shows it through all of them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, bound_contextvars, clear_contextvars, get_contextvars

from hatchway.domain.ids import new_id

NAMES = ("request_id", "key_id", "operation_id", "sandbox_id", "project")
HEADER = b"x-request-id"
_ACCEPTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def current() -> dict[str, str]:
    """What is bound here of `NAMES`."""
    bound = get_contextvars()
    return {name: bound[name] for name in NAMES if name in bound}


def acceptable(name: str) -> bool:
    """Whether what somebody else calls a request may stand in our logs: at most 64 letters, digits, `.`, `_` and `-`."""
    return _ACCEPTED.fullmatch(name) is not None


def bind(**names: str) -> None:
    """Binds for the rest of this task, and of what it starts."""
    bind_contextvars(**names)


@contextmanager
def bound(names: Mapping[str, str]) -> Iterator[None]:
    """Binds what another process sent along, as far as it is acceptable, until the block is left."""
    good = {name: names[name] for name in NAMES if acceptable(names.get(name, ""))}
    with bound_contextvars(**good):
        yield


class Traced:
    """An ASGI application whose requests have ids: the client's, in `X-Request-Id`, where it is acceptable, else one of our own.

    Every answer names it.
    """

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, send)
            return
        request_id = _named(scope["headers"])
        clear_contextvars()
        bind(request_id=request_id)
        header = (HEADER, request_id.encode())

        async def naming(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._inner(scope, receive, naming)


def _named(headers: list[tuple[bytes, bytes]]) -> str:
    given = [value.decode("latin-1") for name, value in headers if name.lower() == HEADER]
    return given[0] if len(given) == 1 and acceptable(given[0]) else new_id()
