"""A client of Firecracker's control interface: HTTP/1.1 with small JSON bodies over a Unix socket that the shim dials.

The peer may be a VMM that its guest took over: answers are bounded in size and time, and whatever is not an answer ends the connection.
Requests go one after another, as Firecracker itself carries them out.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httptools
import msgspec

from hatchway.node.vmm.firecracker_args import Request
from hatchway.node.vmm.seam import VmmDied, VmmError, VmmTimeout

MAX_ANSWER = 256 * 1024
"""Octets of one answer, head included; the longest that we ask for is far below 1 KiB."""
_READ = 65_536

Dial = Callable[[], Awaitable[socket.socket]]


class FirecrackerError(VmmError):
    """Firecracker refused a request; `status` is the HTTP status, the text is its own."""

    def __init__(self, request: str, status: int, description: str) -> None:
        super().__init__(f"Firecracker refused {request}: {description}")
        self.status = status
        self.description = description


class _Answer:
    """Collects one answer, for the parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class Api:
    """One Firecracker's control interface. Connects when it is needed, and again where a connection broke."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._sock: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def ask(self, request: Request, *, within: float = 10.0) -> Mapping[str, Any]:
        """Sends one request and returns the answer's JSON object, empty for an answer without one.

        Raises `FirecrackerError` for its no, `VmmTimeout` after `within` seconds (the connection is closed then: a late answer would
        be taken for another's), `VmmDied` when it closes the connection, `VmmError` for an answer that cannot be understood, and what the
        dialling raises.
        """
        method, path, body = request
        name = f"{method} {path}"
        async with self._lock:
            try:
                async with asyncio.timeout(within):
                    status, content = await self._exchange(method, path, body)
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    raise VmmTimeout(f"Firecracker did not answer {name} within {within:g} s.") from error
                if isinstance(error, OSError):
                    raise VmmDied(
                        f"Firecracker closed its control socket before it answered {name}: {error}"
                    ) from error
                raise
        answer = _decode(content)
        if not 200 <= status < 300:
            raise FirecrackerError(name, status, str(answer.get("fault_message", f"status {status}"))[:2000])
        return answer

    def close(self) -> None:
        """Drops the connection. The VM goes on, and the next request connects again."""
        sock, self._sock = self._sock, None
        if sock is not None:
            with contextlib.suppress(OSError):
                # Wakes whoever still waits for an answer.
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    async def _exchange(self, method: str, path: str, body: Mapping[str, object]) -> tuple[int, bytes]:
        if self._sock is None:
            self._sock = await self._dial()
        sock, loop = self._sock, asyncio.get_running_loop()
        content = msgspec.json.encode(body) if body else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        if content:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        await loop.sock_sendall(sock, head.encode() + b"\r\n" + content)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        received = 0
        while not answer.complete:
            data = await loop.sock_recv(sock, _READ)
            if not data:
                raise ConnectionResetError(104, "end of the connection")
            received += len(data)
            if received > MAX_ANSWER:
                raise VmmError(f"Firecracker's answer is longer than {MAX_ANSWER} octets.")
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise VmmError(f"Firecracker's answer to {method} {path} is not HTTP.") from error
        status = int(parser.get_status_code())
        if status < 200:  # another one would follow
            raise VmmError(f"Firecracker's answer to {method} {path} is none: status {status}.")
        return status, bytes(answer.body)


def _decode(content: bytes) -> dict[str, Any]:
    if not content:
        return {}
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return {}
