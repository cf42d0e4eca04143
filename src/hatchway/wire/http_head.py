"""The bound on the head of a request, on every HTTP listener of ours, before anybody was asked for a key."""

import asyncio
import http

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hatchway.domain import problems
from hatchway.domain.errors import HatchwayError, HeadTooLarge, InvalidRequest

MAX_HEAD = 64 * 1024
"""Octets of request line and headers; a client that sends more is answered 431 and cut off."""
HEAD_WITHIN_S = 30.0
"""How long a head may take from its first octet on, and a fresh connection until it sends one."""


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which by itself takes a head without end."""

    _received = 0
    """Octets that came while the head was not whole."""
    _head = 0
    """Octets of the target and the headers that are whole."""
    _in_head = True
    _slow: asyncio.TimerHandle | None = None
    """Runs while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """A client is there; it has to begin soon."""
        super().connection_made(transport)
        self._slow = self.loop.call_later(HEAD_WITHIN_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._received, self._head, self._in_head = 0, 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of its target."""
        self._head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers."""
        self._head += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is whole; one that is too large is answered here and goes no further."""
        self._in_head = False
        self._stop_waiting()
        if self._head > MAX_HEAD:
            self._refuse()
        else:
            super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Takes octets, as long as no head grows beyond the bound."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_head:
            self._received += len(data)
            if self._received > MAX_HEAD:
                self._refuse()
            elif self._slow is None:
                self._slow = self.loop.call_later(HEAD_WITHIN_S, self._too_slow)

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._answer(InvalidRequest("malformed_request", f"This is not HTTP/1.1: {msg}", "Send a well-formed request."))

    def _stop_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        if self._received:
            self._answer(head_too_slow())
        else:
            self.transport.close()

    def _refuse(self) -> None:
        self._answer(
            HeadTooLarge(
                "head_too_large",
                f"The request line and the headers take more than {MAX_HEAD} octets.",
                "Send less of them.",
                limit=MAX_HEAD,
            )
        )

    def _answer(self, error: HatchwayError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(answer_octets(error))
        self.transport.close()


def head_too_slow() -> HatchwayError:
    """The error of a head that does not come to its end."""
    return InvalidRequest(
        "head_too_slow", f"The head of the request did not come within {HEAD_WITHIN_S:g} s.", "Send it at once."
    )


def answer_octets(error: HatchwayError) -> bytes:
    """The whole answer for an error, where no HTTP library is at hand to write it; the connection must be closed behind it."""
    body = msgspec.json.encode(problems.document(error))
    headers = {**problems.headers(error), "connection": "close", "content-type": problems.MEDIA_TYPE}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    phrase = http.HTTPStatus(error.status).phrase
    return f"HTTP/1.1 {error.status} {phrase}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
