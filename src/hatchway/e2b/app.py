"""The ASGI application: what a request is for is looked at once, here."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from hatchway.client import errors as ours
from hatchway.e2b import errors, origin, refusals
from hatchway.e2b.control.routes import make_api
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import same
from hatchway.e2b.origin import first_of_each
from hatchway.e2b.places import Places
from hatchway.e2b.ports.admission import Admission
from hatchway.e2b.ports.relay import Ports
from hatchway.e2b.ports.upgrades import upgrades_of
from hatchway.e2b.resuming import Resuming, settings_of
from hatchway.e2b.sending import Noting
from hatchway.e2b.wrapper import Wrapper
from hatchway.wire.http_head import ABORT
from hatchway.wire.tracing import Traced

if TYPE_CHECKING:
    from hatchway.client.models import SandboxInfo
    from hatchway.e2b.envd.app import Envd

POLICY_VIOLATION = 1008
"""Why a WebSocket that was not accepted is closed (RFC 6455); the client sees 403."""

log = logging.getLogger(__name__)

Serve = Callable[[Scope, Receive, Send], Awaitable[None]]


class App:
    """The wrapper as one origin: its API, and what goes to sandboxes. An ASGI application; `upgrades` takes over what asks for a WebSocket."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._domains = wrapper.config.domains
        self._resuming = Resuming(wrapper.reaching)
        self._places = Places()
        admission = Admission(self._resuming, wrapper.identity, self._places)
        self._api = make_api(wrapper)
        self._envd: Envd | None = None
        self._ports = Ports(admission)
        self.upgrades = upgrades_of(admission, self._target)
        self._served = Traced(_Answering(self._dispatch))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        await self._served(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = first_of_each(scope["headers"])
        target = self._target(headers)
        if target is None and scope["type"] == "http":
            linked = self._wrapper.links.find(scope["method"], scope["path"], scope["query_string"])
            target = None if linked is None else origin.Target(linked, origin.ENVD_PORT, by_host=False)
        if target is None or origin.is_for_api(target, scope["path"], headers):
            await self._api(scope, receive, send)
            return
        if target.envd:
            handle = await self._resuming.running(target.sandbox_id, lambda info: self._may_command(info, headers))
            self._wrapper.links.note(target.sandbox_id, self._wrapper.identity)
            project = handle.info.project or ""
            with self._places.taken(target.sandbox_id, project):
                await self._agents().serve(target.sandbox_id, project, scope, receive, send)
        else:
            await self._ports.serve(target, scope, receive, send)

    def _agents(self) -> "Envd":
        """Commands and files; loaded with the first request for them."""
        if self._envd is None:
            from hatchway.e2b.envd.app import Envd

            self._envd = Envd(
                self._wrapper.reaching,
                self._wrapper.identity,
                secure=lambda info: settings_of(info).secure,
                gone=self._resuming.doubt,
                fresh=self._resuming.fresh,
            )
        return self._envd

    def _target(self, headers: Mapping[str, str]) -> origin.Target | None:
        return origin.target(headers, self._domains, self._wrapper.identity.sandbox_of)

    def _may_command(self, info: "SandboxInfo", headers: Mapping[str, str]) -> bool:
        """Whether a request has the right to commands and files, by which it may resume the sandbox too."""
        given = headers.get(origin.ACCESS_TOKEN)
        return not settings_of(info).secure or same(given, self._wrapper.identity.envd_token(info.id))


def make_app(wrapper: Wrapper) -> App:
    """The wrapper as an application."""
    return App(wrapper)


class _Answering:
    """Answers the errors of what is inside in E2B's form, as long as nothing was answered yet."""

    def __init__(self, inner: Serve) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = Noting(send)
        try:
            await self._inner(scope, receive, sending)
        except E2bError as error:
            failure = error
        except ours.HatchwayError as error:
            failure = errors.of_client(error)
        except Exception as error:
            log.exception("%s %s failed", scope.get("method", scope["type"]), scope.get("path"))
            failure = E2bError(500, f"Something went wrong here ({type(error).__name__}).", retry=False)
        else:
            return
        if sending.begun:
            # Broken off with what waits to be sent: closing would wait for a client that takes nothing, for ever.
            scope.get("extensions", {}).get(ABORT, lambda: None)()
            raise failure
        if scope["type"] == "websocket":
            closing = {"type": "websocket.close", "reason": failure.message[:120]}
            await send({**closing, "code": POLICY_VIOLATION})
            return
        answer = refusals.answer(failure, first_of_each(scope["headers"]), scope["method"])
        await answer(scope, receive, send)
