"""The sockets of the name server: UDP with the source address that was asked, and TCP, both within bounds."""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

from hatchway.egress.bounds import Bucket
from hatchway.egress.dns import MAX_MESSAGE, Outcome, Responder
from hatchway.egress.http.seam import StreamLost
from hatchway.egress.streams import TcpStream

AT_ONCE = 32
TCP_IDLE_S = 5.0
TCP_MESSAGES = 64
MAX_TCP = 8

_IP_PKTINFO = 8
_IP_RECVORIGDSTADDR = 20
_ANCILLARY = socket.CMSG_SPACE(64)

log = logging.getLogger(__name__)

Seen = Callable[[Outcome], bool]
"""Hears of each outcome; False: it cannot be recorded, and so nothing is answered."""


class DnsServer:
    """Both sockets of one sandbox."""

    def __init__(
        self, udp: socket.socket, responder: Responder, bucket: Bucket, seen: Seen, flooded: Callable[[], None]
    ) -> None:
        self._udp = udp
        self._responder = responder
        self._bucket = bucket
        self._seen = seen
        self._flooded = flooded
        self._loop = asyncio.get_running_loop()
        self.tcp_open = 0
        udp.setblocking(False)
        self._loop.add_reader(udp.fileno(), self._datagrams)

    def close(self) -> None:
        """Lets go of the UDP socket. May be repeated."""
        if self._udp.fileno() >= 0:
            self._loop.remove_reader(self._udp.fileno())
            self._udp.close()

    def _datagrams(self) -> None:
        for _ in range(AT_ONCE):
            try:
                data, ancillary, flags, peer = self._udp.recvmsg(MAX_MESSAGE, _ANCILLARY)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                log.info("the name server's socket: %s", error.strerror)
                return
            if flags & socket.MSG_TRUNC:
                data += b"\x00"  # too long: it is answered as such, by its header
            answer = self._answer(data)
            if answer is not None:
                self._reply(answer, _asked_address(ancillary), peer)

    def _answer(self, message: bytes) -> bytes | None:
        if not self._bucket.take():
            self._flooded()
            return self._responder.too_many(message)
        outcome = self._responder.answer(message)
        return outcome.answer if self._seen(outcome) else None

    def _reply(self, answer: bytes, source: bytes | None, peer: object) -> None:
        """Sends from the address that was asked: a client takes an answer from nobody else."""
        ancillary = [] if source is None else [(socket.SOL_IP, _IP_PKTINFO, struct.pack("=i4s4s", 0, source, bytes(4)))]
        try:
            self._udp.sendmsg([answer], ancillary, socket.MSG_DONTWAIT, peer)  # type: ignore[arg-type]  # as recvmsg gave it
        except OSError as error:
            log.debug("an answer of the name server was not sent: %s", error.strerror)

    async def serve_tcp(self, stream: TcpStream) -> None:
        """Answers the questions of one TCP connection, one after another."""
        data = b""
        try:
            for _ in range(TCP_MESSAGES):
                async with asyncio.timeout(TCP_IDLE_S):
                    while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
                        if len(data) >= 2 and int.from_bytes(data[:2], "big") > MAX_MESSAGE:
                            stream.abort()
                            return
                        came = await stream.read()
                        if not came:
                            return
                        data += came
                size = int.from_bytes(data[:2], "big")
                answer = self._answer(data[2 : 2 + size])
                data = data[2 + size :]
                if answer is None:
                    return
                stream.write(len(answer).to_bytes(2, "big") + answer)
                async with asyncio.timeout(TCP_IDLE_S):
                    await stream.drain()
        except (StreamLost, TimeoutError):
            return
        finally:
            stream.close()


def _asked_address(ancillary: list[tuple[int, int, bytes]]) -> bytes | None:
    for level, kind, payload in ancillary:
        if level == socket.SOL_IP and kind == _IP_RECVORIGDSTADDR and len(payload) >= 8:
            return payload[4:8]
    return None
