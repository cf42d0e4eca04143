"""The bounds on what a connection may ask, on every HTTP listener of ours, before anybody was asked for a key."""

import asyncio
import http
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hatchway.domain import problems
from hatchway.domain.errors import HatchwayError, HeadTooLarge, InvalidRequest

MAX_HEAD = 64 * 1024
"""Octets of request line and headers; a client that sends more is answered 431 and cut off."""
HEAD_WITHIN_S = 30.0
"""How long a head may take from its first octet on, and a fresh connection until it sends one."""

ABORT = "hatchway.abort"
"""Among the extensions of a request's scope: breaks its connection off, with what waits to be sent. Closing waits for a client that stands still."""

_SLICE = 16 * 1024
"""Octets that are parsed before it is looked whether others wait."""
_MANY = 64
"""Requests and pieces of bodies out of one slice, beyond which all other connections have their turn first."""


class _Flow(FlowControl):
    """Lets no more in while octets that came wait to be parsed; by itself it does so with every answer."""

    def __init__(self, transport: asyncio.Transport, holds: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._holds = holds

    def resume_reading(self) -> None:
        if not self._holds():
            super().resume_reading()


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which by itself takes a head without end, and any number of requests ahead of their answers.

    Of requests that a client sends ahead, only those of one slice are taken out of what came; the rest waits unparsed until they were
    answered, and no more is read meanwhile.
    """

    _held = b""
    """What came and is not parsed from `_at` on."""
    _at = 0
    _turn: asyncio.Handle | None = None
    _pieces = 0
    """Requests and pieces of bodies since the slice began."""
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
        self.flow = _Flow(transport, lambda: self._at < len(self._held))
        self._slow = self.loop.call_later(HEAD_WITHIN_S, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        self._held, self._at = b"", 0
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._pieces += 1
        self._received, self._head, self._in_head = 0, 0, True
        super().on_message_begin()
        self.scope["extensions"] = cast(Any, {ABORT: self.transport.abort})

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

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._pieces += 1
        super().on_body(body)

    def on_response_complete(self) -> None:
        """It is answered."""
        super().on_response_complete()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Takes octets, as long as no head grows beyond the bound."""
        self._held, self._at = self._held[self._at :] + data, 0
        if self._turn is None:
            self._feed()

    def _feed(self) -> None:
        """Parses what came, as far as it is this connection's turn and nothing waits to be answered."""
        self._turn = None
        self._pieces = 0
        while self._at < len(self._held) and not self.pipeline and self._pieces <= _MANY:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                self._held, self._at = b"", 0
                self.flow.resume_reading()
                break
            piece = self._held[self._at : self._at + _SLICE]
            self._at += len(piece)
            self._parse(piece)
        self._go_on()

    def _parse(self, piece: bytes) -> None:
        super().data_received(piece)
        if self._in_head:
            self._received += len(piece)
            if self._received > MAX_HEAD:
                self._refuse()
            elif self._slow is None:
                self._slow = self.loop.call_later(HEAD_WITHIN_S, self._too_slow)

    def _go_on(self) -> None:
        """Sees to it that what is held is parsed in time, and that no more is read meanwhile."""
        if self._at < len(self._held):
            self.flow.pause_reading()
            if self._turn is None and not self.pipeline:
                self._turn = self.loop.call_soon(self._feed)
        elif self._held:
            self._held, self._at = b"", 0
            # What waits for its answer, or a body for its reader, lets more in when its time comes.
            if not self.pipeline and (self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT):
                self.flow.resume_reading()

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

    def error_octets(self, error: HatchwayError) -> bytes:
        """The whole answer for an error of HTTP itself, behind which the connection is closed."""
        return answer_octets(error)

    def _answer(self, error: HatchwayError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(self.error_octets(error))
        self.transport.close()


def head_too_slow() -> HatchwayError:
    """The error of a head that does not come to its end."""
    return InvalidRequest(
        "head_too_slow", f"The head of the request did not come within {HEAD_WITHIN_S:g} s.", "Send it at once."
    )


def answer_octets(error: HatchwayError) -> bytes:
    """The whole answer for an error, where no HTTP library is at hand to write it; the connection must be closed behind it."""
    headers = {**problems.headers(error), "content-type": problems.MEDIA_TYPE}
    return closing_octets(error.status, headers, msgspec.json.encode(problems.document(error)))


def closing_octets(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """An answer behind which the connection is closed."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "connection": "close"}.items())
    phrase = http.HTTPStatus(status).phrase
    return f"HTTP/1.1 {status} {phrase}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
