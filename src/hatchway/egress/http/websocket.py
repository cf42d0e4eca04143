"""WebSockets, where a rule is for them: the handshake on both sides is ours, and every message to the outside is looked at whole.

No extension is agreed on, so that frames are what they look like. What comes from the outside goes to the client as it came.
"""

import asyncio
import base64
import binascii
import hashlib
import os
import re
from typing import TYPE_CHECKING

from wsproto.frame_protocol import CloseReason, Frame, FrameProtocol, Opcode, ParseFailed

from hatchway.domain.errors import Forbidden, HatchwayError
from hatchway.domain.policy.verdicts import Protocol
from hatchway.egress.http import fields, placeholders
from hatchway.egress.http.carrying import pass_on
from hatchway.egress.http.exchanges import Exchanges
from hatchway.egress.http.heads import AnswerHead, RequestHead, bad_answer, malformed
from hatchway.egress.http.incoming import Over
from hatchway.egress.http.judging import Going
from hatchway.egress.http.lines import Line, Stale, head_of, no_answer, request_head
from hatchway.egress.http.refusals import error_of, of_broker
from hatchway.egress.http.seam import Exchange, FlowError, Stream, StreamLost
from hatchway.egress.http.waiting import Alarm
from hatchway.wire.broker import LEG_ERROR

if TYPE_CHECKING:
    from hatchway.egress.http.http1 import Http1, Incoming1

MAX_MESSAGE = 1024 * 1024
"""Octets of one message at most, whatever a rule says: it is held until it is whole."""
MAX_FRAGMENTS = 4_096
FRAMES_PER_S = 1_000
"""More frames than this from a client, over some seconds, end the connection."""
CLOSE_WITHIN_S = 10.0
TAKE_WITHIN_S = 60.0
"""How long a client may take nothing of what comes back."""
_BURST_S = 5

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}", re.ASCII)
_MAX_PROTOCOLS = 16


class _Ended(Exception):
    """The client's side is at its end; `code` is said to both sides."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why


async def serve(connection: "Http1", incoming: "Incoming1") -> None:
    """Carries one WebSocket from its handshake to its end. Raises `Over` when it ended in the middle."""
    exchanges = connection.exchanges
    going: Going | None = None
    try:
        try:
            key, offered = _handshake(incoming.head)
        except HatchwayError as error:
            exchanges.record_unread(error)
            raise
        going = await exchanges.decide(incoming)
        if going.verdict.protocol is not Protocol.WEBSOCKET and not going.verdict.observed:
            raise Forbidden(
                "websocket_not_allowed",
                "The rule that the request falls under is for single requests, not for WebSockets.",
                "Ask whoever set the policy for a rule with `protocol: websocket`.",
            )
        exchanges.record_allowed(going)
        line = await exchanges.line(going, fresh=True)
    except HatchwayError as error:
        if going is not None:
            exchanges.record_failed(error, going)
        await exchanges.refuse(incoming, error)
        return
    cut = False

    def cut_off(reason: str) -> None:
        nonlocal cut
        cut = True
        line.stream.abort()
        incoming.break_off()

    exchange = None
    try:
        exchange = exchanges.flow.begin(going.request, going.verdict, cut_off, line.stream)
        key_sent = base64.b64encode(os.urandom(16)).decode()
        asked = _request(exchanges, going, key_sent, offered)
        exchange.count(len(asked), 0)
        line.write_request(asked)
        answer = await line.answer("GET", incoming.alarm, upgraded=True)
        if code := next((value for name, value in answer.fields if name == LEG_ERROR), ""):
            raise of_broker(code, answer.status, b"")
        if answer.status != 101:
            try:
                await pass_on(incoming, line, exchange, going, answer)
            except (HatchwayError, FlowError, StreamLost, TimeoutError) as error:
                raise Over from error
            return
        protocol = _accepted(answer, key_sent, offered)
        connection.client.write(_switch(answer, key, protocol))
        await _Relay(connection, line, going, exchange, exchanges).run()
    except (HatchwayError, FlowError, Stale) as error:
        if cut:
            raise Over from error
        told = (
            error
            if isinstance(error, HatchwayError)
            else error_of(error)
            if isinstance(error, FlowError)
            else no_answer(str(error))
        )
        exchanges.record_failed(told, going)
        await exchanges.refuse(incoming, told)
    finally:
        if exchange is not None:
            exchange.end()
        exchanges.drop(line)


def _request(exchanges: Exchanges, going: Going, key: str, offered: list[str]) -> bytes:
    sent = [
        *going.fields,
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", key),
    ]
    if offered:
        sent.append(("sec-websocket-protocol", ", ".join(offered)))
    return request_head("GET", going.target, exchanges.authority, sent, 0)


def _handshake(head: RequestHead) -> tuple[str, list[str]]:
    """The client's key and the protocols that it offers. Raises `InvalidRequest`."""
    found: dict[str, list[str]] = {}
    for name, value in head.fields:
        if name.startswith("sec-websocket-"):
            found.setdefault(name, []).append(value)
    keys = found.get("sec-websocket-key", [])
    if head.method != "GET" or head.version != "1.1" or head.length != 0:
        raise malformed("a WebSocket is asked for by GET, in HTTP/1.1, without a body")
    if found.get("sec-websocket-version") != ["13"]:
        raise malformed("Sec-WebSocket-Version is not 13, once")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise malformed("Sec-WebSocket-Key is not 16 octets in base64, once")
    offered = fields.offered_protocols(head.fields)
    if len(offered) > _MAX_PROTOCOLS or not all(_TOKEN.fullmatch(one) for one in offered):
        raise malformed("Sec-WebSocket-Protocol is no list of names")
    return keys[0], offered


def _is_key(value: str) -> bool:
    try:
        return len(value) == 24 and len(base64.b64decode(value, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def _accept(key: str) -> str:
    return base64.b64encode(hashlib.sha1(key.encode("ascii") + _GUID, usedforsecurity=False).digest()).decode()


def _accepted(answer: AnswerHead, key: str, offered: list[str]) -> str:
    """The protocol that was chosen, or "". Raises `BadGateway` for an answer that does not agree to this very handshake."""
    found: dict[str, list[str]] = {}
    for name, value in answer.fields:
        found.setdefault(name, []).append(value)
    if [one.lower() for one in found.get("upgrade", [])] != ["websocket"] or "upgrade" not in answer.nominated:
        raise bad_answer("it goes on with another protocol than WebSocket")
    if found.get("sec-websocket-accept") != [_accept(key)]:
        raise bad_answer("its Sec-WebSocket-Accept is not for the key that was sent")
    if "sec-websocket-extensions" in found:
        raise bad_answer("it uses a WebSocket extension that was not offered")
    chosen = found.get("sec-websocket-protocol", [])
    if len(chosen) > 1 or (chosen and chosen[0] not in offered):
        raise bad_answer("it chose a WebSocket protocol that was not offered")
    return chosen[0] if chosen else ""


def _switch(answer: AnswerHead, key: str, protocol: str) -> bytes:
    passed = [
        field
        for field in fields.for_client(answer.fields, nominated=answer.nominated)
        if not field[0].startswith("sec-websocket-") and field[0] != "content-length"
    ]
    passed += [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-accept", _accept(key))]
    if protocol:
        passed.append(("sec-websocket-protocol", protocol))
    return head_of("HTTP/1.1 101 Switching Protocols", passed)


_FRAMES_AT_ONCE = 16


class _Relay:
    """The messages of an open WebSocket."""

    def __init__(self, connection: "Http1", line: Line, going: Going, exchange: Exchange, exchanges: Exchanges) -> None:
        self._connection = connection
        self._client: Stream = connection.client
        self._line = line
        self._going = going
        self._exchange = exchange
        self._exchanges = exchanges
        self._known = exchanges.flow.placeholders
        self._limit = min(going.terms.max_frame, MAX_MESSAGE)
        self._from_client = FrameProtocol(client=False, extensions=[])
        self._to_server = FrameProtocol(client=True, extensions=[])
        self._parts: list[str | bytes] = []
        self._size = 0
        self._up_alarm, self._down_alarm = Alarm(), Alarm()
        self._tokens = float(FRAMES_PER_S * _BURST_S)
        self._filled = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Relays until both sides closed. Raises `Over` when one of them was cut off."""
        loop = asyncio.get_running_loop()
        down = loop.create_task(self._down())
        up = loop.create_task(self._up())
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not up.exception() and not down.done():
                await asyncio.wait((down,), timeout=CLOSE_WITHIN_S)
            for task in (up, down):
                if task.done():
                    task.result()
        except (StreamLost, TimeoutError) as error:
            raise Over from error
        except FlowError as error:
            await self._close(CloseReason.POLICY_VIOLATION, error.reason)
        except _Ended as error:
            await self._close(error.code, error.why)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self._up_alarm.stop()
            self._down_alarm.stop()

    async def _close(self, code: int, why: str) -> None:
        """Tells both sides why it ends."""
        self._client.write(bytes(FrameProtocol(client=False, extensions=[]).close(code, why)))
        self._line.stream.write(bytes(self._to_server.close(CloseReason.GOING_AWAY)))
        self._line.stream.close()

    # -- to the outside

    async def _up(self) -> None:
        data, self._connection.data = self._connection.data, b""
        while True:
            if data:
                self._from_client.receive_bytes(data)
                try:
                    for frame in self._from_client.received_frames():
                        if await self._take(frame):
                            return
                except ParseFailed as error:
                    raise _Ended(error.code, "what came is no WebSocket frame that may be") from error
            data = await self._client.read()
            if not data:
                raise StreamLost("the client ended without a close")

    async def _take(self, frame: Frame) -> bool:
        """Passes on a frame, or keeps it until its message is whole; True: it was the last one."""
        await self._pace()
        payload = frame.payload
        if frame.opcode is Opcode.CLOSE:
            assert isinstance(payload, tuple)
            code, why = payload
            self._look_through(why or "")
            await self._send(self._to_server.close(code, why), 2)
            return True
        assert isinstance(payload, str | bytes | bytearray)
        if frame.opcode.iscontrol():
            octets = bytes(payload) if not isinstance(payload, str) else payload.encode()
            self._look_through(octets.decode("latin-1"))
            made = self._to_server.ping(octets) if frame.opcode is Opcode.PING else self._to_server.pong(octets)
            await self._send(made, len(octets))
            return False
        if self._going.terms.text_only and frame.opcode is Opcode.BINARY:
            raise _Ended(CloseReason.UNSUPPORTED_DATA, "the rule lets text alone pass")
        self._parts.append(payload if isinstance(payload, str) else bytes(payload))
        self._size += len(payload) if isinstance(payload, bytes | bytearray) else len(payload.encode())
        if self._size > self._limit or len(self._parts) > MAX_FRAGMENTS:
            raise _Ended(CloseReason.MESSAGE_TOO_BIG, f"a message takes more than {self._limit} octets")
        if frame.message_finished and frame.frame_finished:
            await self._pass_message(text=frame.opcode is Opcode.TEXT)
        return False

    async def _pass_message(self, *, text: bool) -> None:
        parts, self._parts = self._parts, []
        size, self._size = self._size, 0
        message: str | bytes
        if text:
            message = "".join(part for part in parts if isinstance(part, str))
            self._look_through(message)
        else:
            message = b"".join(part for part in parts if isinstance(part, bytes))
            self._look_through(message.decode("latin-1"))
        await self._send(self._to_server.send_data(message), size)

    def _look_through(self, text: str) -> None:
        for placeholder, credential in self._known.items():
            if placeholder in text:
                error = placeholders.misplaced(credential, "a WebSocket message")
                self._exchanges.record_failed(error, self._going)
                raise _Ended(CloseReason.POLICY_VIOLATION, error.code)

    async def _send(self, frame: bytes | bytearray, size: int) -> None:
        self._exchange.count(size, 0)
        self._line.stream.write(bytes(frame))
        await self._line.drain(self._up_alarm)

    async def _pace(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tokens = min(FRAMES_PER_S * _BURST_S, self._tokens + (now - self._filled) * FRAMES_PER_S)
        self._filled = now
        if self._tokens < 1:
            raise _Ended(CloseReason.POLICY_VIOLATION, f"more than {FRAMES_PER_S} frames a second")
        self._tokens -= 1
        if int(self._tokens) % _FRAMES_AT_ONCE == 0:
            await self._exchanges.flow.shares.turns.take()

    # -- to the client

    async def _down(self) -> None:
        data = self._line.rest()
        while True:
            if data:
                self._exchange.count(0, len(data))
                self._client.write(data)
                await self._down_alarm.within(TAKE_WITHIN_S, self._client.drain())
            data = await self._line.stream.read()
            if not data:
                return
