"""The application: lets a request for the agent of a sandbox in, and leads it on.

Every request needs the sandbox's token but for `/health`, and `/files`, where a signature does as well. Browsers may ask from anywhere:
no cookie counts here.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hatchway.client import errors as ours
from hatchway.client.models import SandboxInfo
from hatchway.e2b import errors, refusals
from hatchway.e2b.envd import filesystem, process
from hatchway.e2b.envd.calls import OnClientStream, OnStream, OnUnary
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.downloads import Download
from hatchway.e2b.envd.endings import Endings
from hatchway.e2b.envd.fileaccess import ACCESS_TOKEN
from hatchway.e2b.envd.plain import Plain
from hatchway.e2b.envd.requests import MAX_HELD, MAX_OF_PROJECT, MAX_OF_SANDBOX, Cut, Departed, Request
from hatchway.e2b.envd.seam import Identity, Sandboxes
from hatchway.e2b.envd.uploads import Upload, compose
from hatchway.e2b.errors import E2bError
from hatchway.e2b.held import Held, Share
from hatchway.e2b.identity import same
from hatchway.e2b.origin import first_of_each
from hatchway.e2b.sending import Noting

EXPOSED = "Connect-Content-Encoding, Content-Encoding, Content-Disposition, Content-Range, Grpc-Message, Grpc-Status, Grpc-Status-Details-Bin"
ALLOWED = "GET, HEAD, POST, OPTIONS"
PREFLIGHT_S = "7200"

log = logging.getLogger(__name__)

Method = OnUnary | OnStream | OnClientStream


def _nothing(_: str) -> None:
    """Nobody has to know."""


@dataclass
class Envd:
    """The agents of all sandboxes, as one application. The id of the sandbox is told with each request: see `serve`.

    `secure` tells whether a sandbox takes its token only; `gone` hears of one that was found not to run; `fresh` tells of one whether it was seen
    running a moment ago, and `gone` not called since.
    """

    sandboxes: Sandboxes
    identity: Identity
    secure: Callable[[SandboxInfo], bool] = lambda _: True
    gone: Callable[[str], None] = _nothing
    fresh: Callable[[str], bool] = lambda _: False
    _plain: Plain = field(default_factory=Plain)

    def __post_init__(self) -> None:
        self._endings = Endings(self.sandboxes, gone=self.gone, fresh=self.fresh)
        self._held = Held(MAX_OF_SANDBOX, MAX_OF_PROJECT, MAX_HELD)
        services: Mapping[str, Mapping[str, Method]] = {
            process.NAME: process.Process().methods(),
            filesystem.NAME: filesystem.Filesystem().methods(),
        }
        self._methods = {
            f"/{service}/{name}": one for service, methods in services.items() for name, one in methods.items()
        }

    async def serve(self, sandbox_id: str, project: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. What cannot be answered any more is cut off: by an exception, as servers take it."""
        with self._held.share(sandbox_id, project) as share:
            await self._serve(sandbox_id, scope, receive, send, share)

    async def _serve(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        sending = _Sending(send)
        if scope["type"] != "http":
            raise E2bError(400, "Nothing of the agent is a WebSocket.")
        headers = first_of_each(scope["headers"])
        request = Request(
            scope, receive, headers, sandbox_id, self.sandboxes, self.identity, self._endings, self.gone, share
        )
        try:
            await self._answer(request, sending)
        except Departed:
            return
        except Cut:
            self.gone(sandbox_id)
            if sending.begun:
                raise refusals.not_found(sandbox_id) from None
            await errors.answer(refusals.not_found(sandbox_id))(scope, receive, sending)
        except E2bError as error:
            if sending.begun:
                raise
            if error.status == 502:
                self.gone(sandbox_id)
            await errors.answer(error)(scope, receive, sending)
        except ConnectError as error:
            if sending.begun:
                raise
            await errors.answer(E2bError(error.status, error.message))(scope, receive, sending)
        except ours.HatchwayError as error:
            if sending.begun:
                raise
            if request.gone(error):
                self.gone(sandbox_id)
                await errors.answer(refusals.not_found(sandbox_id))(scope, receive, sending)
            else:
                await errors.answer(errors.of_client(error))(scope, receive, sending)

    async def _answer(self, request: Request, send: Send) -> None:
        method, path = request.scope["method"], request.scope["path"]
        if method == "OPTIONS":
            await self._preflight(request, send)
            return
        if path == "/health" and method in ("GET", "HEAD"):
            await self._plain.health(request)
            await Response(None, 204)(request.scope, request.receive, send)
            return
        token = await self._token(request)
        if path == "/files":
            await self._files(request, send, token)
            return
        if token is not None and not same(request.headers.get(ACCESS_TOKEN), token):
            raise E2bError(
                401, "unauthorized access, please provide a valid access token or method signing if supported"
            )
        if (rpc := self._methods.get(path)) is not None:
            if method != "POST":
                raise E2bError(405, f"{method} is not for {path}: use POST")
            await rpc(request, send)
        elif path == "/files/compose":
            _only(method, "POST", path)
            await _json(request, send, await compose(request))
        elif path == "/envs":
            _only(method, "GET", path)
            await _json(request, send, await self._plain.envs(request))
        elif path == "/metrics":
            _only(method, "GET", path)
            await _json(request, send, await self._plain.metrics(request))
        else:
            raise E2bError(404, f"There is nothing at {path[:200]}.")

    async def _files(self, request: Request, send: Send, token: str | None) -> None:
        match request.scope["method"]:
            case "GET" | "HEAD":
                await Download(request, send, token).answer()
            case "POST":
                await _json(request, send, await Upload(request, token).do())
            case other:
                raise E2bError(405, f"{other} is not for /files: use GET or POST")

    async def _token(self, request: Request) -> str | None:
        """What a request must show; None for a sandbox that takes everybody."""
        info = (await request.sandbox()).info
        return self.identity.envd_token(request.sandbox_id) if self.secure(info) else None

    async def _preflight(self, request: Request, send: Send) -> None:
        asked = request.headers.get("access-control-request-headers", "*")
        headers = {
            "access-control-allow-methods": ALLOWED,
            "access-control-allow-headers": asked,
            "access-control-max-age": PREFLIGHT_S,
            "allow": ALLOWED,
            "vary": "Access-Control-Request-Headers",
        }
        await Response(None, 204, headers)(request.scope, request.receive, send)


class _Sending(Noting):
    """Lets pages from anywhere read the answers."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = [*message.get("headers", ())]
            headers += [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED.encode())]
            message = {**message, "headers": headers}
        await super().__call__(message)


def _only(method: str, wanted: str, path: str) -> None:
    if method != wanted:
        raise E2bError(405, f"{method} is not for {path}: use {wanted}")


async def _json(request: Request, send: Send, value: object) -> None:
    await Response(msgspec.json.encode(value), media_type="application/json")(request.scope, request.receive, send)
