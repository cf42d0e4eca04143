"""Who may go to a port of a sandbox, and the connection there."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hatchway.client import errors as ours
from hatchway.e2b import network, refusals
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import Identity, same
from hatchway.e2b.origin import Target
from hatchway.e2b.places import Places
from hatchway.e2b.ports.exchange import Peer
from hatchway.e2b.ports.guest_tls import Secured
from hatchway.e2b.ports.heads import Forwarding
from hatchway.e2b.resuming import Resuming, settings_of

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


def ingress(info: "SandboxInfo") -> network.Settings:
    """What the way in to a sandbox is, by the settings that the wrapper keeps with it."""
    return network.way_in(settings_of(info).network)
