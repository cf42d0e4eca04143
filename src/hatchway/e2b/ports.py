"""What goes to the ports of sandboxes: admission, and the relay of HTTP. `upgrades` does the same for WebSockets.

A request is let in (`Admission`), a connection to the port is made through the node's data plane, and both directions are carried at once as
they come; who is slow holds the other side back. Each request has a connection of its own, so that nothing that one client sends can become
part of another's. An answer that breaks off is broken off here as well: by that SDKs notice that a sandbox was killed.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from hatchway.client import errors as ours
from hatchway.e2b import network, refusals
from hatchway.e2b.errors import E2bError
from hatchway.e2b.exchange import Broken, ClientGone, Peer, carry
from hatchway.e2b.guest_tls import Secured
from hatchway.e2b.heads import Forwarding, first_of_each
from hatchway.e2b.identity import Identity, same
from hatchway.e2b.origin import Target
from hatchway.e2b.places import Places
from hatchway.e2b.resuming import Resuming, settings_of
from hatchway.wire.http_head import ABORT

if TYPE_CHECKING:
    from hatchway.client.aio import AsyncSandbox
    from hatchway.client.models import SandboxInfo

TRAFFIC_TOKEN = "e2b-traffic-access-token"
OPENS_WITHIN_S = 1.0
"""For so long a port that is closed is tried again: a server that was just started may not listen yet."""
TRY_AGAIN_S = 0.1
TLS_WITHIN_S = 10.0
_TRIES = 3
"""How often a sandbox that was taken for running is looked at again."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go to a port."""

    target: Target
    sandbox: "AsyncSandbox"
    settings: network.Settings

    def forwarding(self, *, peer: str, secure: bool, host: str) -> Forwarding:
        """How its head is written anew."""
        mask = self.settings.mask_request_host
        masked = None if mask is None else mask.replace("${PORT}", str(self.target.port))
        return Forwarding(peer=peer, secure=secure, host=host, masked=masked)


class Admission:
    """Lets requests in and connects them to ports."""

    def __init__(self, resuming: Resuming, identity: Identity, places: Places) -> None:
        self._resuming = resuming
        self._identity = identity
        self._places = places

    async def admit(self, target: Target, headers: Mapping[str, str]) -> Admitted:
        """Checks the right to a port, and has the sandbox resumed where traffic does that. Raises `E2bError`: 403, and see `Resuming.running`."""
        token = same(headers.get(TRAFFIC_TOKEN), self._identity.traffic_token(target.sandbox_id))
        sandbox = await self._resuming.running(target.sandbox_id, lambda info: token or ingress(info).allow_public_traffic)  # fmt: skip
        settings = ingress(sandbox.info)
        if not (token or settings.allow_public_traffic):
            raise refusals.private(target.sandbox_id)
        return Admitted(target, sandbox, settings)

    @contextlib.asynccontextmanager
    async def connected(self, admitted: Admitted) -> AsyncIterator[Peer]:
        """A connection to the port, until the block is left: broken off then. Raises `E2bError`: 502, 409, 429, 403."""
        target = admitted.target
        with self._places.taken(target.sandbox_id, admitted.sandbox.info.project):
            async with await self._dial(admitted) as connection:
                if target.port not in admitted.settings.https_ports:
                    yield connection
                    return
                secured = Secured(connection)
                try:
                    async with asyncio.timeout(TLS_WITHIN_S):
                        await secured.handshake()
                except (ssl.SSLError, ours.ConnectionFailed, TimeoutError) as error:
                    why = f"it speaks no TLS ({error or 'nothing came'})"
                    raise refusals.broken(target.sandbox_id, target.port, why) from None
                yield secured

    async def gone(self, target: Target) -> E2bError | None:
        """After a connection broke: the refusal, where that is because the sandbox does not run any more."""
        self._resuming.doubt(target.sandbox_id)
        try:
            await self._resuming.running(target.sandbox_id, lambda _: False)
        except E2bError as error:
            return refusals.not_found(target.sandbox_id) if error.status == 403 else error
        except ours.HatchwayError:
            return None
        return None

    async def _dial(self, admitted: Admitted):  # type: ignore[no-untyped-def]  # the library is imported with the first request
        from hatchway.client import connecting

        target, sandbox = admitted.target, admitted.sandbox
        now = asyncio.get_running_loop().time
        until = now() + OPENS_WITHIN_S
        doubts = 0
        while True:
            try:
                return await connecting.connect(sandbox, target.port)
            except ours.BadGateway as error:
                if now() >= until:
                    raise refusals.port_closed(target.sandbox_id, target.port) from error
                await asyncio.sleep(TRY_AGAIN_S)
            except ours.Exhausted as error:
                raise refusals.too_many(target.sandbox_id) from error
            except (ours.Conflict, ours.NotFound, ours.Gone, ours.Unavailable, ours.ConnectionFailed, ours.Forbidden) as error:  # fmt: skip
                # It was paused or killed since it was seen, or its node is not there now.
                doubts += 1
                self._resuming.doubt(target.sandbox_id)
                await self._resuming.running(target.sandbox_id)
                if doubts >= _TRIES:
                    raise refusals.broken(target.sandbox_id, target.port, "its node does not serve it now") from error


class Ports:
    """The relay of HTTP, as an ASGI application. The `target` of a request is in its state, see `app.TARGET`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def serve(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        """Relays one request. Raises `E2bError` when nothing was answered yet and no person reads the answer."""
        headers = first_of_each(scope["headers"])
        begun = False

        async def noting(message) -> None:  # type: ignore[no-untyped-def]  # it is passed on as it came
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._relay(target, headers, scope, receive, noting)
        except ClientGone:
            return
        except Broken as error:
            if begun:
                scope["extensions"][ABORT]()
                return
            failure = await self._admission.gone(target) or refusals.broken(target.sandbox_id, target.port, str(error))
            await refusals.answer(failure, headers, scope["method"])(scope, receive, send)
        except E2bError as error:
            if begun:
                scope["extensions"][ABORT]()
                return
            await refusals.answer(error, headers, scope["method"])(scope, receive, send)

    async def _relay(
        self, target: Target, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        admitted = await self._admission.admit(target, headers)
        client = scope.get("client")
        forwarding = admitted.forwarding(
            peer=str(client[0]) if client else "unknown", secure=scope["scheme"] == "https", host=headers.get("host", "")
        )  # fmt: skip
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope.get("query_string", b"")
        request = forwarding.request(scope["method"], path + (b"?" + query if query else b""), scope["headers"])
        async with self._admission.connected(admitted) as peer:
            await carry(peer, request, receive, send)


def ingress(info: "SandboxInfo") -> network.Settings:
    """What the way in to a sandbox is, by the settings that the wrapper keeps with it."""
    return network.way_in(settings_of(info).network)
