"""The relay of HTTP to the ports of sandboxes. `upgrades` does the same for WebSockets.

A request is let in (`Admission`), a connection to the port is made through the node's data plane, and both directions are carried at once as
they come; who is slow holds the other side back. Each request has a connection of its own, so that nothing that one client sends can become
part of another's. An answer that breaks off is broken off here as well: by that SDKs notice that a sandbox was killed.
"""

from starlette.types import Receive, Scope, Send

from hatchway.e2b import refusals
from hatchway.e2b.origin import Target, first_of_each
from hatchway.e2b.ports.admission import Admission
from hatchway.e2b.ports.exchange import Broken, ClientGone, carry
from hatchway.e2b.sending import Noting


class Ports:
    """The relay of HTTP."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def serve(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        """Relays one request. Raises `E2bError`, also where an answer has begun and broke off."""
        sending = Noting(send)
        try:
            await self._relay(target, scope, receive, sending)
        except ClientGone:
            return
        except Broken as error:
            gone = None if sending.begun else await self._admission.gone(target)
            raise gone or refusals.broken(target.sandbox_id, target.port, str(error)) from None

    async def _relay(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        headers = first_of_each(scope["headers"])
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
