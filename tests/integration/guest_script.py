"""A guest that a test plays by hand over a real socket, a proxy that breaks connections, a sink that remembers what it was told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from hatchway.node.guest.link import Link, connect
from hatchway.node.guest.seam import Proc, ProcessState, Setup
from hatchway.wire import channel
from hatchway.wire.channel import FrameReader, FrameType
from hatchway.wire.channel_fields import Fields, Tag, Value, encode_fields

WITHIN = 30.0


class Recorder:
    """A sink that keeps everything, and can be waited on."""

    def __init__(self, stdout: int = 0, stderr: int = 0) -> None:
        self.data = [bytearray(), bytearray()]
        self.next = [stdout, stderr]
        self.gaps: list[tuple[int, int, int]] = []
        self.states: list[Proc] = []
        self.lost: str | None = None
        self._changed = asyncio.Event()

    def stored(self) -> tuple[int, int]:
        return self.next[0], self.next[1]

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        stream = fd - 1
        if offset != self.next[stream]:
            self.gaps.append((fd, self.next[stream], offset))
        self.data[stream] += data
        self.next[stream] = offset + len(data)
        self._changed.set()

    def changed(self, proc: Proc) -> None:
        self.states.append(proc)
        self._changed.set()

    def gone(self, reason: str) -> None:
        assert self.lost is None, "gone twice"
        self.lost = reason
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> Proc:
        """Waits for the final state and all output."""
        await self.until(
            lambda: (
                bool(self.states)
                and self.states[-1].state is ProcessState.CLOSED
                and self.next[0] >= self.states[-1].stdout_total
                and self.next[1] >= self.states[-1].stderr_total
            )
        )
        return self.states[-1]

    @property
    def out(self) -> bytes:
        return bytes(self.data[0])

    @property
    def err(self) -> bytes:
        return bytes(self.data[1])


Received = tuple[int, int, bytes, int]


class GuestEnd:
    """The guest's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.zeros = 0
        self._frames = FrameReader()
        self._queue: list[Received] = []
        self._begun = False

    async def read(self) -> Received:
        """Returns the next frame: type, stream, payload, flags."""
        async with asyncio.timeout(WITHIN):
            while not self._queue:
                octets = await self.reader.read(65536)
                if not octets:
                    raise ConnectionError("the host hung up")
                if not self._begun:
                    stripped = octets.lstrip(b"\0")
                    self.zeros += len(octets) - len(stripped)
                    octets = stripped
                    self._begun = bool(octets)
                for frame in self._frames.feed(octets):
                    self._queue.append((frame.type, frame.stream, bytes(frame.payload), frame.flags))
        return self._queue.pop(0)

    async def expect(self, kind: FrameType) -> tuple[int, Fields]:
        """Returns stream and fields of the next frame, which must be of this type."""
        got, stream, payload, _ = await self.read()
        assert got == kind, f"{FrameType(got).name} instead of {kind.name}"
        return stream, Fields(payload)

    def send(self, kind: int, stream: int, *fields: tuple[Tag, Value], flags: int = 0) -> None:
        self.writer.write(channel.encode_frame(kind, stream, encode_fields(fields), flags=flags))

    def output(self, number: int, offset: int, data: bytes, descriptor: int = 1) -> None:
        self.writer.write(channel.encode_output(number, descriptor, offset, data))

    def proc(self, number: int, key: str = "k", *, state: int = 1, out: int = 0, err: int = 0, stdin: int = 0) -> None:
        ending: list[tuple[Tag, Value]] = [(Tag.EXIT_CODE, 0), (Tag.REASON, 1)] if state > 1 else []
        self.send(
            FrameType.PROC,
            number,
            (Tag.KEY, key),
            (Tag.STATE, state),
            (Tag.PID, 7),
            (Tag.STDOUT_TOTAL, out),
            (Tag.STDERR_TOTAL, err),
            (Tag.STDIN_OFFSET, stdin),
            *ending,
        )

    def answer(self, request: int, *fields: tuple[Tag, Value], status: int = 0) -> None:
        self.send(FrameType.RESPONSE, request, (Tag.STATUS, status), *fields)

    def acknowledge(self, hello: Fields, *, version: int = 1, boot: str = "boot-1", epoch: int | None = None) -> None:
        self.send(
            FrameType.HELLO_ACK,
            0,
            (Tag.VERSION, version),
            (Tag.NONCE, hello.get_octets(Tag.NONCE) or b""),
            (Tag.EPOCH, hello.number(Tag.EPOCH) if epoch is None else epoch),
            (Tag.BOOT_ID, boot),
            (Tag.AGENT, "script"),
            (Tag.UPTIME_NS, 5),
        )

    async def greet(
        self, *listed: tuple[int, str], boot: str = "boot-1", before: bytes = b"", state: int = 1, out: int = 0
    ) -> None:
        """Answers HELLO, behind some stale octets, with processes that all are in one state."""
        _, hello = await self.expect(FrameType.HELLO)
        self.writer.write(before)
        self.acknowledge(hello, boot=boot)
        for number, key in listed:
            self.proc(number, key, state=state, out=out)
        self.send(FrameType.READY, 0)

    async def hung_up(self) -> None:
        """Waits until the host closed the connection."""
        async with asyncio.timeout(WITHIN):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass

    def close(self) -> None:
        self.writer.transport.abort()


class ScriptedGuest:
    """A listening socket where a VMM's would be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.vm_ended = asyncio.Event()
        self._ends: asyncio.Queue[GuestEnd] = asyncio.Queue()
        self._all: list[GuestEnd] = []
        self._links: list[Link] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accepted, self.path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links:
            await link.close()
        for end in self._all:
            end.close()
        self._server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = GuestEnd(reader, writer)
        self._all.append(end)
        self._ends.put_nowait(end)

    async def accept(self) -> GuestEnd:
        async with asyncio.timeout(WITHIN):
            return await self._ends.get()

    async def connect(
        self, *, fresh: bool = False, setup: Setup | None = None, within: float = WITHIN, path: Path | None = None
    ) -> Link:
        link = await connect(path or self.path, fresh=fresh, vm_ended=self.vm_ended, setup=setup, within=within)
        self._links.append(link)
        return link

    @contextlib.asynccontextmanager
    async def linked(self, *listed: tuple[int, str]) -> AsyncIterator[tuple[Link, GuestEnd]]:
        """A link that is up, and the guest's end of it."""
        dialling = asyncio.create_task(self.connect())
        end = await self.accept()
        await end.greet(*listed)
        yield await dialling, end


class Proxy:
    """Stands between link and agent, and cuts the connection after so many octets, in either direction."""

    def __init__(self, path: Path, target: Path, cuts: Iterator[int]) -> None:
        self.path = path
        self.lost = 0
        self._target = target
        self._cuts = cuts
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accepted, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        agent_reader, agent_writer = await asyncio.open_unix_connection(self._target)
        left = next(self._cuts)

        async def pump(source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
            nonlocal left
            while left > 0:
                octets = await source.read(20_000)
                if not octets:
                    return
                # The last piece goes through in part: half a frame, more often than not.
                drain.write(octets[:left])
                left -= len(octets)
                await drain.drain()
            self.lost += 1

        pumps = [asyncio.create_task(pump(reader, agent_writer)), asyncio.create_task(pump(agent_reader, writer))]
        try:
            # Cancelled by the end of the test, which is no error; the server's own callback would report it.
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pumped in done:
                    pumped.exception()
        finally:
            for pumped in pumps:
                pumped.cancel()
            # What was written reaches the agent, which is then in the middle of a frame.
            agent_writer.close()
            writer.transport.abort()
