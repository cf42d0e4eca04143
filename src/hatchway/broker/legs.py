"""The legs: who may open one, how many there are, and how each begins and ends."""

import asyncio
import contextlib
import logging
import select
import socket
import struct

import msgspec

from hatchway.broker import auditing
from hatchway.broker.auditing import AuditSink
from hatchway.broker.checking import Bound, NotBound
from hatchway.broker.config import BrokerConfig
from hatchway.broker.grants import Grants
from hatchway.broker.leg import LegSession
from hatchway.broker.side import Side
from hatchway.broker.sources import Sources
from hatchway.broker.upstream import DialError, Dialler, Upstream
from hatchway.domain.errors import HatchwayError
from hatchway.wire.broker import MAX_LEG_HEAD, Leg, LegAnswer

HEAD_WITHIN_S = 5.0
LOOK_EVERY_S = 2.0
"""How often it is looked whether a gateway has gone while an upstream is silent."""

_LENGTH = struct.Struct(">I")
_UNREADABLE = (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError)

log = logging.getLogger(__name__)


class OpenLeg:
    """A leg from its head on: what `Grants` can cut."""

    def __init__(self, head: Leg, bound: Bound, gateway: asyncio.StreamWriter) -> None:
        self.head = head
        self.bound = bound
        self.ended = asyncio.Event()
        self.task = asyncio.current_task()
        self.upstream: Upstream | None = None
        self._gateway = gateway

    def cut(self, why: str) -> None:
        """Closes both connections at once."""
        log.info("a leg of %s is cut: %s", self.head.sandbox_id, why)
        self.abort()
        if self.task is not None:
            self.task.cancel()

    def abort(self) -> None:
        """Closes both connections at once; nothing is sent any more."""
        self._gateway.transport.abort()
        if self.upstream is not None:
            self.upstream.writer.transport.abort()

    def gateway_is_gone(self) -> bool:
        """Whether the gateway has closed its end altogether."""
        sock = self._gateway.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), 0)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


class Legs:
    """All legs of one broker."""

    def __init__(self, config: BrokerConfig, grants: Grants, sources: Sources, audit: AuditSink) -> None:
        self._config = config
        self._grants = grants
        self._sources = sources
        self._audit = audit
        self._dialler = Dialler(config)
        self._open: set[OpenLeg] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream of a gateway whose user is known, until its end."""
        if self._connections >= 2 * self._config.limits.legs:
            writer.transport.abort()
            return
        self._connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writer.transport.set_write_buffer_limits(high=64 * 1024)
        try:
            await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the gateway went away, or does not take its answer
        except asyncio.CancelledError:
            if not writer.transport.is_closing():  # not cut: the process ends
                raise
        finally:
            self._connections -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def watch(self) -> None:
        """Looks for ever after legs whose gateway went away while their upstream was silent."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for leg in list(self._open):
                if leg.gateway_is_gone():
                    leg.cut("its gateway went away")

    async def close(self) -> None:
        """Cuts all."""
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_WITHIN_S):
                head = await _read_head(reader)
        except ValueError as error:
            log.warning("a gateway sends no leg: %s", error)
            return
        uid = peer_uid(writer)
        if not self._config.may_lead(uid, head.project):
            log.warning("uid %d opens a leg of a project that it does not serve", uid)
            await self._refuse(writer, head, "cred_not_bound", "Another shard serves this project.")
            return
        try:
            bound = self._bound(head)
        except DialError as error:
            await self._refuse(writer, head, error.code, error.message)
            return
        leg = OpenLeg(head, bound, writer)
        self._open.add(leg)
        self._grants.opened(leg)
        try:
            await self._lead(leg, reader, writer)
        finally:
            leg.abort()
            self._open.discard(leg)
            self._grants.closed(leg)
            leg.ended.set()

    def _bound(self, head: Leg) -> Bound:
        """The binding that a leg may rest on. Raises `DialError`."""
        limits = self._config.limits
        of_project = sum(one.head.project == head.project for one in self._open)
        if (
            len(self._open) >= limits.legs
            or of_project >= limits.legs_per_project
            or self._grants.legs_of(head.sandbox_id) >= limits.legs_per_sandbox
        ):
            raise DialError("limit", "There are too many connections with credentials; close some.")
        try:
            bound = self._grants.find(head)
        except NotBound as error:
            raise DialError("cred_not_bound", f"{error}.") from None
        if bound is None:
            raise DialError("cred_unavailable", "The broker has no grant for this sandbox now.")
        return bound

    async def _lead(self, leg: OpenLeg, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            held = await self._sources.held(leg.head.project, leg.bound.binding.source)
            if not held.may_go_to(leg.head.host):
                raise DialError("cred_not_bound", "The credential's source is not for this host.")
            leg.upstream = upstream = await self._dialler.dial(leg.head, leg.bound)
        except HatchwayError as error:
            await self._refuse(writer, leg.head, "cred_unavailable", error.cause, error.remedy)
            return
        except DialError as error:
            await self._refuse(writer, leg.head, error.code, error.message)
            return
        answer = LegAnswer(peer_address=upstream.address, certificate_sha256=upstream.certificate_sha256)
        await _answer(writer, answer)
        session = LegSession(
            leg.head,
            Side(reader, writer),
            upstream,
            grants=self._grants,
            sources=self._sources,
            audit=self._audit,
            limits=self._config.limits,
        )
        await session.serve()
        await _close(upstream.writer)
        await _close(writer)

    async def _refuse(self, writer: asyncio.StreamWriter, head: Leg, code: str, message: str, remedy: str = "") -> None:
        with contextlib.suppress(HatchwayError):
            self._audit.record(auditing.of_leg("credential.denied", head, "denied", code))
        await _answer(writer, LegAnswer(error=code, message=message, remedy=remedy))
        await _close(writer)


def peer_uid(writer: asyncio.StreamWriter) -> int:
    """The user of the process at the other end of a Unix socket."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", raw)[1]
    return uid


async def _read_head(reader: asyncio.StreamReader) -> Leg:
    """Raises `ValueError` for what is none."""
    length = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    if length > MAX_LEG_HEAD:
        raise ValueError(f"its head announces {length} octets")
    body = await reader.readexactly(length)
    try:
        return msgspec.msgpack.decode(body, type=Leg)
    except _UNREADABLE:
        raise ValueError("its head cannot be read") from None


async def _answer(writer: asyncio.StreamWriter, answer: LegAnswer) -> None:
    body = msgspec.msgpack.encode(answer)
    writer.write(_LENGTH.pack(len(body)) + body)
    async with asyncio.timeout(HEAD_WITHIN_S):
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Sends what was written, then closes."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HEAD_WITHIN_S):
            await writer.wait_closed()
