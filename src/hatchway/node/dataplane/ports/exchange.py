"""One request to a port and its answer, on their ways at the same time."""

import asyncio
from collections.abc import Iterable
from typing import Any

import h11

from hatchway.domain.errors import BadGateway
from hatchway.node.dataplane.ports.dialling import broken, unreachable
from hatchway.node.dataplane.ports.heads import AmbiguousAnswer, answer_fields, trailer_fields
from hatchway.node.dataplane.ports.sides import ClientSide, GuestSide, Over, size_of
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.wire.http_head import MAX_HEAD

_READ = 64 * 1024
_MAX_INTERIM = 64
_REPEATABLE = (b"GET", b"HEAD", b"OPTIONS")


class Stale(Exception):
    """A connection that was kept had been closed by the guest before it heard the request; it can be sent on another one."""


class Exchange:
    """Carries one request. `why` gets a result when it must end."""

    def __init__(
        self, client: ClientSide, request: h11.Request, why: "asyncio.Future[str]", *, answer_s: float
    ) -> None:
        self._client = client
        self._request = request
        self._why = why
        self._answer_s = answer_s
        self._body_read = False
        self._given = 0
        self._answered = False
        self._chunked = any(name == b"transfer-encoding" for name, _ in request.headers)

    async def over(self, guest: GuestSide) -> bool:
        """Carries it over this connection; tells whether that was upgraded to something else, which `splice` carries on.

        Raises `Stale`, `BadGateway` (`port_bad_answer port_no_answer`) and `Unavailable("sandbox_unreachable")` when nothing was answered
        yet, what `ClientSide.next_of_body` does, and `Over`.
        """
        loop = asyncio.get_running_loop()
        up, down = loop.create_task(self._up(guest)), loop.create_task(self._down(guest))
        waiting: set[asyncio.Future[Any]] = {up, down, self._why}
        try:
            while not down.done():
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if self._why.done():
                    raise Over
                if up.done() and not down.done():
                    up.result()
                    waiting.discard(up)
            return down.result()
        finally:
            await _cancel((up, down))

    # -- to the guest

    async def _up(self, guest: GuestSide) -> None:
        try:
            await guest.write(self._request)
            trailers: list[tuple[bytes, bytes]] = []
            while not self._body_read:
                part = await self._client.next_of_body()
                if isinstance(part, h11.EndOfMessage):
                    self._body_read = True
                    trailers = trailer_fields(part.headers.raw_items()) if self._chunked else []
                else:
                    await guest.write(part)
                    self._given += len(part.data)
            await guest.write(h11.EndOfMessage(headers=trailers))
        except (GuestError, LinkLost):
            return  # it takes no more: what it answered, if anything, is read by the other direction
        await self._client.departure()

    # -- to the client

    async def _down(self, guest: GuestSide) -> bool:
        try:
            response = await self._head(guest)
            if isinstance(response, h11.InformationalResponse):
                return True
            while True:
                part = await guest.next_of_answer()
                if isinstance(part, h11.Data):
                    await self._client.write(part)
                elif isinstance(part, h11.EndOfMessage):
                    await self._end(part)
                    return False
                else:
                    raise Over
        except LinkLost as error:
            if self._answered:
                raise Over from error
            raise unreachable(error) from error
        except (h11.RemoteProtocolError, AmbiguousAnswer) as error:
            if self._answered:
                raise Over from error
            raise bad_answer(guest.port.number, str(error)) from error
        except h11.LocalProtocolError as error:  # an answer that cannot be said to this client
            raise Over from error

    async def _head(self, guest: GuestSide) -> h11.Response | h11.InformationalResponse:
        """Passes on the head of the answer, and what comes before it."""
        for _ in range(_MAX_INTERIM):
            event = await self._begin(guest)
            if not isinstance(event, h11.Response | h11.InformationalResponse):
                self._is_stale(guest)
                raise h11.RemoteProtocolError("it closed the connection without an answer")
            if size_of(event.headers) > MAX_HEAD:
                raise h11.RemoteProtocolError(f"its head takes more than {MAX_HEAD} octets")
            upgraded = event.status_code == 101
            fields = answer_fields(event.headers.raw_items(), http_version=event.http_version, upgraded=upgraded)
            kind = type(event)
            said = kind(status_code=event.status_code, headers=fields, reason=event.reason)
            if kind is h11.Response or upgraded:
                self._answered = True
                await self._client.write(said)
                return event
            if (self._client.http.their_http_version or b"1.0") >= b"1.1":
                await self._client.write(said)
        raise h11.RemoteProtocolError(f"it sent more than {_MAX_INTERIM} interim answers")

    async def _begin(self, guest: GuestSide) -> object:
        """The next head; a port may take its time as long as it takes the request's body."""
        while True:
            given = self._given
            try:
                async with asyncio.timeout(self._answer_s):
                    return await guest.next_of_answer()
            except TimeoutError:
                if self._given == given:
                    raise BadGateway(
                        "port_no_answer",
                        f"Port {guest.port.number} of the sandbox took the request and did not answer within {self._answer_s:g} s.",
                        "Look at the server in the sandbox; let it answer at once and stream what takes long.",
                        port=guest.port.number,
                    ) from None
            except h11.RemoteProtocolError:
                self._is_stale(guest)
                raise

    def _is_stale(self, guest: GuestSide) -> None:
        if guest.used and not guest.heard and not self._given and self._request.method in _REPEATABLE:
            raise Stale

    async def _end(self, part: h11.EndOfMessage) -> None:
        trailers = trailer_fields(part.headers.raw_items())
        try:
            await self._client.write(h11.EndOfMessage(headers=trailers))
        except h11.LocalProtocolError:  # an HTTP/1.0 client, or an answer with Content-Length, has no place for them
            if not trailers:
                raise
            await self._client.write(h11.EndOfMessage())


async def splice(client: ClientSide, guest: GuestSide, why: "asyncio.Future[str]") -> None:
    """Carries octets both ways, each direction until its own end. Raises `Over` when one breaks or `why` says so."""
    loop = asyncio.get_running_loop()
    both = (loop.create_task(_to_guest(client, guest)), loop.create_task(_to_client(client, guest)))
    waiting: set[asyncio.Future[Any]] = {*both, why}
    try:
        while not all(task.done() for task in both):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if why.done():
                raise Over
            for task in both:
                if task.done():
                    task.result()
                    waiting.discard(task)
    except (GuestError, LinkLost) as error:
        client.reset()
        raise Over from error
    finally:
        await _cancel(both)


async def _to_guest(client: ClientSide, guest: GuestSide) -> None:
    early, _ = client.http.trailing_data
    if early:
        await guest.stream.write(early)
    while data := await client.reader.read(_READ):
        await guest.stream.write(data)
    await guest.stream.write_eof()


async def _to_client(client: ClientSide, guest: GuestSide) -> None:
    data, _ = guest.http.trailing_data
    while data or (data := await guest.stream.read()):
        client.writer.write(data)
        await client.writer.drain()
        data = b""
    if why := await broken(guest.stream):
        raise LinkLost(why)
    if not client.writer.can_write_eof():
        raise Over  # TLS knows no end of one direction
    client.writer.write_eof()


def bad_answer(port: int, why: str) -> BadGateway:
    """The error of a port that answers what is no HTTP."""
    return BadGateway(
        "port_bad_answer",
        f"What port {port} of the sandbox answered is no answer in HTTP/1.1: {why[:200]}.",
        "Look at the server in the sandbox; what speaks another protocol is reached over the port's `tcp` path.",
        port=port,
    )


async def _cancel(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
