"""TLS over a `TcpStream`, by OpenSSL on memory buffers: what was read before for the decision is simply what the handshake begins with.

A stream that ends without close_notify was cut off: `read` raises `StreamLost` and never takes what came for the whole.
"""

import asyncio
import contextlib
import functools
import os
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from hatchway.egress.http.seam import StreamLost
from hatchway.egress.streams import HIGH_WATER, TcpStream

HANDSHAKE_WITHIN_S = 10.0
READ_AT_ONCE = 64 * 1024
NICER = 5
"""By how much the thread of handshakes is nicer than the loop's. By much more, it would be made to wait while it holds the interpreter."""

UNRECOGNIZED_NAME: Final = 112
ACCESS_DENIED: Final = 49
HANDSHAKE_FAILURE: Final = 40
DECODE_ERROR: Final = 50


@functools.cache
def aside() -> ThreadPoolExecutor:
    """Where OpenSSL does what takes long: it lets go of the interpreter meanwhile. One thread, since a shard has about one processor, and behind the
    loop: a handshake can wait, and the requests of others shall not."""
    return ThreadPoolExecutor(1, "tls", initializer=_step_back)


def _step_back() -> None:
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICER))


def alert(description: int) -> bytes:
    """A fatal alert in clear, for a client whose ClientHello is refused."""
    return bytes((21, 3, 3, 0, 2, 2, description))


class TlsStream:
    """`http.seam.Stream` inside TLS. Made by `handshake`."""

    def __init__(self, under: TcpStream, context: ssl.SSLContext, *, server_side: bool, server_hostname: str | None):
        self._under = under
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._back = b""
        self._ended = False
        self._shut = False

    @property
    def alpn(self) -> str:
        """What ALPN agreed on; empty where nothing was."""
        return self._tls.selected_alpn_protocol() or ""

    @property
    def version(self) -> str:
        """The version of TLS, such as `TLSv1.3`."""
        return self._tls.version() or ""

    def peer_certificate(self) -> bytes | None:
        """DER of the peer's certificate."""
        return self._tls.getpeercert(binary_form=True)

    async def _shake(self, turn: asyncio.Lock) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with turn:
                    await loop.run_in_executor(aside(), self._tls.do_handshake)
            except ssl.SSLWantReadError:
                self._flush()
                data = await self._under.read()
                if not data:
                    raise StreamLost("the peer ended in the middle of the TLS handshake") from None
                self._incoming.write(data)
            except ssl.SSLError:
                self._flush()  # the alert that says why
                raise
            else:
                self._flush()
                return

    async def read(self) -> bytes:
        """See `http.seam.Stream`."""
        if self._back:
            data, self._back = self._back, b""
            return data
        while not self._ended:
            if self._incoming.pending or self._tls.pending():
                data = self._decrypt()
                if data:
                    return data
                if self._ended:
                    break
            came = await self._under.read()
            if not came:
                raise StreamLost("the TLS stream was cut off: it ended without saying so")
            self._incoming.write(came)
        return b""

    def _decrypt(self) -> bytes:
        """Everything of what arrived that is complete, up to some records."""
        parts: list[bytes] = []
        size = 0
        try:
            while size < READ_AT_ONCE:
                part = self._tls.read(READ_AT_ONCE)
                if not part:
                    self._ended = True
                    break
                parts.append(part)
                size += len(part)
                if not self._incoming.pending and not self._tls.pending():
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as error:
            self._flush()
            if not parts:
                raise StreamLost(f"TLS failed: {error.reason}") from error
        if self._outgoing.pending:
            self._flush()  # answers to key updates
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def unread(self, data: bytes) -> None:
        """See `http.seam.Stream`."""
        self._back = data + self._back

    def write(self, data: bytes) -> None:
        """See `http.seam.Stream`."""
        if self._shut or self._under.lost or not data:
            return
        try:
            self._tls.write(data)
        except ssl.SSLError:
            self._under.abort()
            return
        self._flush()

    async def drain(self) -> None:
        """See `http.seam.Stream`."""
        await self._under.drain()

    def end(self) -> None:
        """See `http.seam.Stream`."""
        self._notify()

    def close(self) -> None:
        """See `http.seam.Stream`."""
        self._notify()
        self._under.close()

    def abort(self) -> None:
        """See `http.seam.Stream`."""
        self._under.abort()

    @property
    def lost(self) -> bool:
        """See `http.seam.Stream`."""
        return self._under.lost

    def when_lost(self, callback: Callable[[], None]) -> None:
        """See `http.seam.Stream`."""
        self._under.when_lost(callback)

    @property
    def buffered(self) -> int:
        """See `http.seam.Stream`."""
        return len(self._back) + self._tls.pending() + self._incoming.pending + self._under.buffered

    def _notify(self) -> None:
        """Sends close_notify, once."""
        if self._shut or self._under.lost:
            return
        self._shut = True
        with contextlib.suppress(StreamLost):  # OpenSSL would throw away what is not read before close_notify
            while not self._ended and (data := self._decrypt()):
                self._back += data
        with contextlib.suppress(ssl.SSLError):  # the peer's own close_notify is not here yet, or never comes
            self._tls.unwrap()
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._under.write(self._outgoing.read())


async def handshake(
    under: TcpStream,
    context: ssl.SSLContext,
    *,
    server_side: bool,
    server_hostname: str | None = None,
    turn: asyncio.Lock | None = None,
    within: float = HANDSHAKE_WITHIN_S,
) -> TlsStream:
    """Does the handshake and returns the stream inside. The one under it stays the caller's when this raises.

    The steps are done beside the loop (`aside`), since each takes as long as many requests. `turn` is that of a sandbox: one step of one of its
    handshakes is done at a time, so that many of them stop nobody else's.

    Raises `ssl.SSLError` (with what the peer's certificate lacks), `StreamLost`, and `TimeoutError` after `within` seconds.
    """
    stream = TlsStream(under, context, server_side=server_side, server_hostname=server_hostname)
    async with asyncio.timeout(within):
        await stream._shake(turn or asyncio.Lock())
    return stream


__all__ = ["HIGH_WATER", "TlsStream", "alert", "handshake"]
