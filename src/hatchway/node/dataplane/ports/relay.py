"""HTTP to ports: one client's connection, its requests one after the other, and what one of them is upgraded to.

A connection to the guest serves one client only, so that nothing that one client sends can become part of another's request.
Bodies are passed on as they come, in both directions at once; who is slow holds up the other side and nobody else.
"""

import asyncio
import contextlib
import logging

import h11

from hatchway.domain.errors import HatchwayError, Internal, InvalidRequest, MethodNotAllowed
from hatchway.node import metrics
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.ports import access
from hatchway.node.dataplane.ports.dialling import Dialler
from hatchway.node.dataplane.ports.exchange import Exchange, Stale, splice
from hatchway.node.dataplane.ports.heads import request_fields
from hatchway.node.dataplane.ports.names import Port, PortNames
from hatchway.node.dataplane.ports.sides import ClientSide, GuestSide, Over

log = logging.getLogger(__name__)


class Ports:
    """The ports of a node's sandboxes, as the data plane serves them."""

    def __init__(self, plane: Plane, names: PortNames) -> None:
        self.plane = plane
        self.names = names
        self.dialler = Dialler(plane)


class Relay:
    """One client's connection to the names of ports."""

    def __init__(self, ports: Ports, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ports = ports
        self._client = ClientSide(reader, writer)
        self._guest: GuestSide | None = None

    async def serve(self) -> None:
        """Serves the connection until its end."""
        try:
            while await self._one():
                pass
        except (Over, TimeoutError, OSError):
            pass
        except Exception:
            log.exception("a relay to a port failed")
            with contextlib.suppress(OSError):
                await self._client.refuse(Internal("internal", "The relay to the port failed."))
        finally:
            await self._drop()
            await self._client.close()

    def shutdown(self) -> None:
        """Ends a connection on which nothing is in hand; what is in hand on others is ended by the plane."""
        if self._client.idle:
            self._client.writer.close()

    async def _one(self) -> bool:
        """Answers the next request; tells whether another one can follow."""
        try:
            request = await self._next()
            if request is None:
                return False
            going_on = await self._answer(request)
            metrics.PORT_REQUESTS.labels("passed").inc()
            return going_on
        except HatchwayError as error:
            metrics.PORT_REQUESTS.labels(error.code).inc()
            metrics.note_refusal(error)
            self._ports.plane.accesses.port_refused(error, self._client.peer)
            await self._client.refuse(error)
            return False

    async def _next(self) -> h11.Request | None:
        limits = self._ports.plane.limits
        if self._guest is not None:
            try:
                return await self._client.next_request(limits.port_spare_s)
            except TimeoutError:
                await self._drop()
                if self._client.http.trailing_data[0]:
                    raise
        return await self._client.next_request(limits.port_idle_s)

    async def _answer(self, request: h11.Request) -> bool:
        plane, names, client = self._ports.plane, self._ports.names, self._client
        headers = list(request.headers)
        host = next((value for name, value in headers if name == b"host"), b"")
        port = names.parse(host.decode("latin-1"))
        target = request.target.decode("ascii")
        if target.startswith(access.RESERVED):
            opening = access.open_link(plane, port, request.method, target, secure=client.secure)
            told = [("Location", opening.to), ("Set-Cookie", opening.cookie), ("Referrer-Policy", "no-referrer")]
            await client.answer(303, told)
            return await client.can_go_on()
        plane.accesses.require_room()
        claims = access.admit(plane, names, port, headers, secure=client.secure)
        plane.accesses.port(claims, port.sandbox_id, port.number)
        if request.method == b"CONNECT":
            raise MethodNotAllowed("method_not_allowed", "CONNECT is not possible here.", "Use another method.")
        if not target.startswith("/") and target != "*":
            raise InvalidRequest("malformed_request", "The target of the request is no path.", "Send a path.")
        fields = request_fields(
            request.headers.raw_items(),
            http_version=request.http_version,
            peer=client.peer,
            host=host,
            secure=client.secure,
        )
        forwarded = h11.Request(method=request.method, target=request.target, headers=fields)
        why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with plane.opened(claims, why.set_result):
            return await self._carry(forwarded, port, why)

    async def _carry(self, request: h11.Request, port: Port, why: "asyncio.Future[str]") -> bool:
        exchange = Exchange(self._client, request, why, answer_s=self._ports.plane.limits.port_answer_s)
        try:
            try:
                upgraded = await exchange.over(guest := await self._reach(port))
            except Stale:
                await self._drop()
                upgraded = await exchange.over(guest := await self._reach(port))
        except BaseException:
            await self._drop()
            raise
        if upgraded:
            await splice(self._client, guest, why)
            return False
        if not guest.can_go_on():
            await self._drop()
        return await self._client.can_go_on()

    async def _reach(self, port: Port) -> GuestSide:
        """The connection to a port: the one that was kept for this client, or a new one. Raises what `Dialler.connection` does."""
        if self._guest is not None and self._guest.port == port:
            return self._guest
        await self._drop()
        held = contextlib.AsyncExitStack()
        self._guest = GuestSide(port, await held.enter_async_context(self._ports.dialler.connection(port)), held)
        return self._guest

    async def _drop(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.close()
