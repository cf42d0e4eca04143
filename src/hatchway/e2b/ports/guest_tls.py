"""TLS to a port of a sandbox that speaks it itself (`httpsPorts`). Its certificate proves nothing and is not asked for anything: the way to the port is ours."""

import ssl

from hatchway.client.errors import ConnectionFailed
from hatchway.e2b.ports.exchange import Peer

_READ = 64 * 1024


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Secured:
    """A connection with TLS over another one. One task reads, one writes."""

    def __init__(self, under: Peer) -> None:
        self._under = under
        self._came = ssl.MemoryBIO()
        self._goes = ssl.MemoryBIO()
        self._tls = _context().wrap_bio(self._came, self._goes)

    async def handshake(self) -> None:
        """Begins. Raises `ssl.SSLError` and `ConnectionFailed`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        """See `Peer`."""
        while True:
            try:
                return self._tls.read(_READ)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as error:
                raise ConnectionFailed(f"The port's TLS broke: {error}", "Connect again.", code="port_broken") from None

    async def write(self, data: bytes) -> None:
        """See `Peer`."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
            await self._flush()

    async def write_eof(self) -> None:
        """See `Peer`. TLS knows no end of one direction: the other side is told nothing."""

    async def _flush(self) -> None:
        if octets := self._goes.read():
            await self._under.write(octets)

    async def _more(self) -> None:
        octets = await self._under.read()
        if octets:
            self._came.write(octets)
        else:
            self._came.write_eof()
