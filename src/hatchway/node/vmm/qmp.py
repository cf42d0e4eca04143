"""A small client of QEMU's machine protocol (QMP) over its Unix socket.

The peer may be a VMM that its guest took over: lines are bounded, floods are slowed down by reading no faster than
`FLOOD_OCTETS` in `FLOOD_SECONDS`, answers to nobody are dropped, and anything that is not the protocol closes the connection.
Commands are pipelined: one `run` is one write, and it may be sent before QEMU has even started, because the socket was bound by
the launcher.
"""

import array
import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hatchway.node.vmm import seqpacket
from hatchway.node.vmm.seam import VmmDied, VmmError, VmmTimeout
from hatchway.wire.paths import address

MAX_LINE = 1024 * 1024
"""Octets of one message; the longest that we ask for is the console ring (64 KiB in base64)."""
FLOOD_OCTETS = 1024 * 1024
FLOOD_SECONDS = 0.5
_READ = 65_536

log = logging.getLogger(__name__)

Event = Mapping[str, Any]
Command = tuple[str, Mapping[str, object]]


class QmpError(VmmError):
    """QEMU refused a command; `kind` is its error class, the text is its own."""

    def __init__(self, command: str, kind: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description}")
        self.command = command
        self.kind = kind
        self.description = description


def command(name: str, /, **arguments: object) -> Command:
    """Returns a command for `Qmp.run`; underscores in argument names become hyphens."""
    return name, {key.replace("_", "-"): value for key, value in arguments.items()}


class Qmp:
    """One connection. QEMU serves one at a time: a second one gets no greeting until the first is closed."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Event], None] | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._buffer = bytearray()
        self._negotiated = False
        self._write_lock = asyncio.Lock()
        self._window_end = 0.0
        self._window_octets = 0
        self._resume: asyncio.TimerHandle | None = None
        self.closed = False
        self.greeting: Mapping[str, Any] | None = None
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def connect(cls, path: Path, on_event: Callable[[Event], None] | None = None) -> "Qmp":
        """Connects to a socket that somebody listens on; waits for no greeting.

        Raises `VmmDied` when nobody listens, `VmmError` when this process lacks descriptors or memory to ask.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with address(path) as reached:
                sock.connect(reached)
        except (OSError, ValueError) as error:
            sock.close()
            if isinstance(error, OSError) and seqpacket.exhausted(error):
                raise VmmError(f"The VMM's control socket cannot be asked: {error.strerror}") from error
            raise VmmDied(f"Nobody listens on the VMM's control socket {path.name}: {error}") from error
        return cls(sock, on_event)

    async def run(self, *commands: Command, within: float = 10.0, fds: Sequence[int] = ()) -> list[Any]:
        """Sends all commands in one write and returns their results in order.

        `fds` travel beside the octets, for `getfd` or `add-fd`: the first such command takes them. Raises the `QmpError` of the
        first command that was refused (the others were executed all the same), `VmmTimeout` after `within` seconds (the connection is
        closed then: a late answer would be taken for another's), `VmmDied` when the VMM closes the connection.
        """
        if not self._negotiated:
            commands = (command("qmp_capabilities"), *commands)
            self._negotiated = True
            results = await self._run(commands, within, fds)
            return results[1:]
        return await self._run(commands, within, fds)

    async def execute(self, name: str, /, within: float = 10.0, **arguments: object) -> Any:
        """Runs one command and returns its result. Raises as `run`."""
        return (await self.run(command(name, **arguments), within=within))[0]

    async def _run(self, commands: Sequence[Command], within: float, fds: Sequence[int]) -> list[Any]:
        if self.closed:
            raise VmmDied("The connection to the VMM is closed.")
        numbers = [next(self._ids) for _ in commands]
        futures: list[asyncio.Future[Any]] = []
        octets = bytearray()
        for number, (name, arguments) in zip(numbers, commands, strict=True):
            future: asyncio.Future[Any] = self._loop.create_future()
            self._pending[number] = (name, future)
            futures.append(future)
            octets += msgspec.json.encode({"execute": name, "arguments": arguments, "id": number}) + b"\n"
        try:
            async with asyncio.timeout(within):
                await self._send(bytes(octets), fds)
                results = await asyncio.gather(*futures, return_exceptions=True)
        except TimeoutError:
            self.close()
            names = ", ".join(name for name, _ in commands)
            raise VmmTimeout(f"QEMU did not answer {names} within {within:g} s.") from None
        except OSError as error:
            self.close()
            raise VmmDied(f"The VMM closed its control socket: {error}") from error
        finally:
            for number, future in zip(numbers, futures, strict=True):
                self._pending.pop(number, None)
                if future.done() and not future.cancelled():
                    future.exception()
                else:
                    future.cancel()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _send(self, octets: bytes, fds: Sequence[int]) -> None:
        async with self._write_lock:
            sent = 0
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sent = self._sock.sendmsg([octets], rights)
            else:
                with contextlib.suppress(BlockingIOError):
                    sent = self._sock.send(octets)
            if sent < len(octets):
                await self._loop.sock_sendall(self._sock, octets[sent:])

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._slow_down(len(data))
        searched = len(self._buffer)
        self._buffer += data
        start = 0
        while (end := self._buffer.find(b"\n", max(start, searched))) >= 0:
            line = bytes(self._buffer[start:end])
            start = end + 1
            if not self._line(line):
                self.close()
                return
        del self._buffer[:start]
        if len(self._buffer) > MAX_LINE:
            log.warning("qmp peer sent a message longer than %d octets; closing", MAX_LINE)
            self.close()

    def _slow_down(self, octets: int) -> None:
        now = self._loop.time()
        if now >= self._window_end:
            self._window_end, self._window_octets = now + FLOOD_SECONDS, 0
        self._window_octets += octets
        if self._window_octets > FLOOD_OCTETS:
            self._loop.remove_reader(self._sock)
            self._resume = self._loop.call_at(self._window_end, self._read_on)

    def _read_on(self) -> None:
        self._resume = None
        if not self.closed:
            self._loop.add_reader(self._sock, self._readable)

    def _line(self, line: bytes) -> bool:
        if not line.strip():
            return True
        try:
            message = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            log.warning("qmp peer sent no JSON; closing")
            return False
        if not isinstance(message, dict):
            return False
        if "event" in message:
            if self._on_event is not None:
                self._on_event(message)
        elif "QMP" in message:
            self.greeting = message["QMP"] if isinstance(message["QMP"], dict) else {}
        else:
            self._answer(message)
        return True

    def _answer(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        entry = self._pending.get(number) if isinstance(number, int) else None
        if entry is None or entry[1].done():
            return
        name, future = entry
        error = message.get("error")
        if error is None:
            future.set_result(message.get("return"))
        else:
            detail = error if isinstance(error, dict) else {}
            future.set_exception(
                QmpError(name, str(detail.get("class", ""))[:100], str(detail.get("desc", "no reason given"))[:2000])
            )

    def close(self) -> None:
        """Closes the connection; commands in flight fail with `VmmDied`. The VM goes on."""
        if self.closed:
            return
        self.closed = True
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for name, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(VmmDied(f"The VMM closed its control socket before it answered {name}."))
