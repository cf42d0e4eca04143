"""The ASGI application: what a request is for is looked at once, here."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from hatchway.client import errors as ours
from hatchway.e2b import errors, origin
from hatchway.e2b.config import E2bConfig
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import Identity
from hatchway.e2b.reaching import Reaching
from hatchway.wire.tracing import Traced

TARGET = "hatchway.e2b.target"
"""In the state of a request for a sandbox: its `origin.Target`."""

POLICY_VIOLATION = 1008
"""Why a WebSocket that was not accepted is closed (RFC 6455); the client sees 403."""

log = logging.getLogger(__name__)

Serve = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """What the rooms of the wrapper share."""

    config: E2bConfig
    identity: Identity
    reaching: Reaching


def make_app(wrapper: Wrapper) -> ASGIApp:
    """The wrapper as one origin: its API, and what goes to sandboxes."""
    from hatchway.e2b.control.routes import make_api

    api = make_api(wrapper)
    envd: ASGIApp = _later
    ports: ASGIApp = _later

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        target = origin.target(_headers(scope))
        if target is None:
            await api(scope, receive, send)
            return
        scope.setdefault("state", {})[TARGET] = target
        await (envd if target.envd else ports)(scope, receive, send)

    return Traced(_Answering(dispatch))


class _Answering:
    """Answers the errors of what is inside in E2B's form, as long as nothing was answered yet."""

    def __init__(self, inner: Serve) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: object) -> None:
            nonlocal begun
            begun = True
            await send(message)  # type: ignore[arg-type]  # it is passed on as it came

        try:
            await self._inner(scope, receive, noting)
        except E2bError as error:
            failure = error
        except ours.HatchwayError as error:
            failure = errors.of_client(error)
        except Exception as error:
            log.exception("%s %s failed", scope.get("method", scope["type"]), scope.get("path"))
            if begun:
                raise
            failure = E2bError(500, f"Something went wrong here ({type(error).__name__}).", retry=False)
        else:
            return
        if begun:
            raise failure
        if scope["type"] == "websocket":
            closing = {"type": "websocket.close", "reason": failure.message[:120]}
            await send({**closing, "code": POLICY_VIOLATION})
            return
        await errors.answer(failure)(scope, receive, send)


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


async def _later(scope: Scope, receive: Receive, send: Send) -> None:
    raise E2bError(501, "Traffic to sandboxes is not served yet.")
