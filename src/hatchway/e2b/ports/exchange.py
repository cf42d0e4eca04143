"""One request to a port and its answer, on their ways at the same time: ASGI on the client's side, HTTP/1.1 over a connection on the guest's."""

import asyncio
from typing import Protocol

import h11
from starlette.types import Receive, Send

from hatchway.client import errors as ours
from hatchway.e2b.ports.heads import answer_fields
from hatchway.wire.http_head import MAX_HEAD

MAX_INTERIM = 64


class Peer(Protocol):
    """A connection to a port; see `client.connecting.AsyncConnection`."""

    async def read(self) -> bytes:
        """What came; b"" at the orderly end. Raises `ConnectionFailed`."""

    async def write(self, data: bytes) -> None:
        """Sends. Raises `ConnectionFailed`."""

    async def write_eof(self) -> None:
        """Sends no more. Raises `ConnectionFailed`."""


class Broken(Exception):
    """The guest's side broke, or what it answered is no answer."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answers:
    """Reads what a guest answers."""

    def __init__(self, peer: Peer, http: h11.Connection) -> None:
        self._peer = peer
        self._http = http

    async def head(self) -> h11.Response | h11.InformationalResponse:
        """The head of the answer, or that of an upgrade; interim answers before it are left out. Raises `Broken`."""
        for _ in range(MAX_INTERIM):
            event = await self.next()
            if isinstance(event, h11.Response) or (
                isinstance(event, h11.InformationalResponse) and event.status_code == 101
            ):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise Broken("it closed the connection")
        raise Broken(f"it sent more than {MAX_INTERIM} interim answers")

    async def next(self) -> object:
        """The next event. Raises `Broken`."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._peer.read())
        except ours.ConnectionFailed as error:
            raise Broken(str(error.cause)) from None
        except h11.RemoteProtocolError as error:
            raise Broken(f"it is no HTTP/1.1 ({error})") from None
        return event


async def carry(peer: Peer, request: h11.Request, receive: Receive, send: Send) -> None:
    """Carries one exchange to its end. Raises `Broken` and `ClientGone`; an answer may have begun then."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
    loop = asyncio.get_running_loop()
    up, down = loop.create_task(_up(peer, http, request, receive)), loop.create_task(_down(peer, http, send))
    try:
        waiting = {up, down}
        while not down.done():
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if up in done and not down.done():
                up.result()
                waiting.discard(up)
        down.result()
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _up(peer: Peer, http: h11.Connection, request: h11.Request, receive: Receive) -> None:
    """The request, and then nothing but watching whether the client leaves. Raises `ClientGone`."""
    try:
        await _write(peer, http, request)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if body := message.get("body", b""):
                await _write(peer, http, h11.Data(data=body))
        await _write(peer, http, h11.EndOfMessage())
    except ours.ConnectionFailed:
        pass  # it takes no more: what it answered, if anything, is read by the other direction
    except h11.LocalProtocolError as error:
        raise Broken(f"the request cannot be passed on ({error})") from None
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


async def _write(peer: Peer, http: h11.Connection, event: h11.Event) -> None:
    octets = http.send(event)
    if octets:
        await peer.write(octets)


async def _down(peer: Peer, http: h11.Connection, send: Send) -> None:
    answers = Answers(peer, http)
    response = await answers.head()
    if isinstance(response, h11.InformationalResponse):
        raise Broken("it upgraded the connection unasked")
    fields = answer_fields(list(response.headers.raw_items()), response.status_code)
    await send({"type": "http.response.start", "status": response.status_code, "headers": fields})
    while True:
        event = await answers.next()
        if isinstance(event, h11.Data):
            await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
        elif isinstance(event, h11.EndOfMessage):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        else:
            raise Broken("it closed the connection")
