"""The node's end of a shim's socket."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm import seqpacket
from hatchway.node.vmm.seam import ExitStatus, VmmDied, VmmError, VmmTimeout

MAX_ANSWER = 4096
MAX_CONSOLE = 66_000
API, AGENT = 0, 1
"""What can be dialled in the jail of a VMM that takes paths: its control socket, and the guest channel."""
CONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 10.0
TRANSFER_WITHIN_S = 300.0
"""Of a capture or an injection: hundreds of GiB at the speed of memory, or of a slow disk."""

_ERROR = re.compile(rb"error code=(\w+) message=(.*)", re.DOTALL)
_LOG = re.compile(rb"ok total=\d+ text=(.*)", re.DOTALL)


class ShimError(VmmError):
    """The shim refused; `code` is its code: `busy invalid running exited unmapped shared unsupported exhausted denied refused io`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ShimStatus:
    """What the shim says of its VMM."""

    sandbox_id: str
    generation: int
    pid: int
    """Of the VMM, in the host's PID namespace; 0 when it ended."""
    shim_pid: int
    """Of the shim itself; 0 when the VMM ended."""
    exit: ExitStatus | None
    """None while it runs."""


@dataclass(frozen=True)
class Transferred:
    """What a capture wrote or an injection read."""

    pages: int
    runs: int
    bytes: int


class ShimClient:
    """Asks one shim. A request at a time; `watch` has a connection of its own.

    All raise `VmmDied` when the shim is not there: it is PID 1 of the VMM's namespace, so that the VMM is not either; `VmmTimeout`
    when it does not answer in time, `ShimError` for its no, `VmmError` when this process lacks descriptors or memory to ask it.
    """

    def __init__(self, path: Path, sock: socket.socket) -> None:
        self._path = path
        self._sock: socket.socket | None = sock
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path) -> "ShimClient":
        """Connects to run/vm/ID/shim.sock."""
        return cls(path, await _connect(path))

    async def status(self) -> ShimStatus:
        """Returns who it is and whether its VMM runs."""
        return _status(await self._ask(b"status"))

    async def watch(self) -> ExitStatus:
        """Waits for the end of the VMM, however long that takes, and returns how it ended. Can be cancelled."""
        sock = await _connect(self._path)
        try:
            await seqpacket.send(sock, b"watch")
            while True:
                answer = await seqpacket.receive(sock, MAX_ANSWER)
                if not answer:
                    raise VmmDied("the shim is gone, and the VMM with it")
                status = _status(_checked(answer))
                if status.exit is not None:
                    return status.exit
        except OSError as error:
            raise VmmDied(f"the shim is gone, and the VMM with it: {error.strerror}") from error
        finally:
            sock.close()

    async def kill(self) -> None:
        """Kills the VMM; returns when it is reaped. Does nothing to one that ended."""
        await self._ask(b"kill")

    async def reap(self) -> None:
        """Lets the shim of a VMM that ended go. `ShimError("running")` before."""
        await self._ask(b"reap")

    async def log(self) -> bytes:
        """Returns the newest octets of what the VMM wrote to its standard output and error, at most 3 KiB. Not to be trusted."""
        match = _LOG.fullmatch(await self._ask(b"log"))
        if match is None:
            raise VmmError("the shim's answer cannot be understood")
        return match[1]

    async def capture(self, map_fd: int, out_fd: int) -> Transferred:
        """Writes the VMM's private pages of the mapping made from its descriptor `map_fd` to the regular file `out_fd`.

        The VMM must be stopped by its own means before. The format is in docs/protocols/shim.md.
        """
        return _transferred(await self._ask(b"capture map=%d" % map_fd, (out_fd,), TRANSFER_WITHIN_S))

    async def inject(self, map_fd: int, in_fd: int) -> Transferred:
        """Writes a capture's pages into the mapping made from the VMM's descriptor `map_fd`."""
        return _transferred(await self._ask(b"inject map=%d" % map_fd, (in_fd,), TRANSFER_WITHIN_S))

    async def console(self) -> bytes:
        """Returns the newest octets of the guest's console, at most 64 KiB, of a VMM that takes paths. Not to be trusted."""
        match = _LOG.fullmatch(await self._ask(b"console", most=MAX_CONSOLE))
        if match is None:
            raise VmmError("the shim's answer cannot be understood")
        return match[1]

    async def dial(self, to: int) -> socket.socket:
        """Connects to `API` or `AGENT` of a VMM that takes paths. `ShimError("refused")` while nobody listens there, `"busy"` for a full queue."""
        async with self._lock:
            answer, fd = await self._exchange(b"dial to=%d" % to, (), ANSWER_WITHIN_S, MAX_ANSWER)
        sock = None if fd is None else socket.socket(fileno=fd)
        try:
            _checked(answer)
            if sock is None:
                raise VmmError("the shim's answer cannot be understood")
            sock.setblocking(False)
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        return sock

    async def offer(self, number: int, fd: int) -> None:
        """Has the VMM find the regular file `fd` as /hatchway/`number`, 40 to 49."""
        await self._ask(b"offer as=%d" % number, (fd,))

    async def withdraw(self, number: int) -> None:
        """Ends an offer."""
        await self._ask(b"withdraw as=%d" % number)

    async def close(self) -> None:
        """Drops the connection. The VM goes on."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def _ask(
        self, request: bytes, fds: Sequence[int] = (), within: float = ANSWER_WITHIN_S, most: int = MAX_ANSWER
    ) -> bytes:
        async with self._lock:
            answer, fd = await self._exchange(request, fds, within, most)
        if fd is not None:
            os.close(fd)
        return _checked(answer)

    async def _exchange(self, request: bytes, fds: Sequence[int], within: float, most: int) -> tuple[bytes, int | None]:
        """One request and its answer. The caller holds the lock."""
        if self._sock is None:
            self._sock = await _connect(self._path)
        sock = self._sock
        try:
            async with asyncio.timeout(within):
                await seqpacket.send(sock, request, fds)
                answer, fd = await seqpacket.receive_with_fd(sock, most)
            if not answer:
                raise ConnectionResetError(104, "it closed the connection")
        except BaseException as error:
            # Also when cancelled: the answer that is still to come must not be taken for another request's.
            await self.close()
            if isinstance(error, TimeoutError):
                raise VmmTimeout(f"the shim did not answer within {within:g} s") from error
            if isinstance(error, OSError):
                raise VmmDied(f"the shim is gone, and the VMM with it: {error.strerror}") from error
            raise
        return answer, fd


async def _connect(path: Path) -> socket.socket:
    try:
        async with asyncio.timeout(CONNECT_WITHIN_S):
            return await seqpacket.connect(path)
    except TimeoutError as error:
        raise VmmTimeout("the shim takes no connection") from error
    except OSError as error:
        if seqpacket.exhausted(error):
            raise VmmError(f"the shim cannot be asked: {error.strerror}") from error
        raise VmmDied(f"there is no shim: {error.strerror}") from error


def _checked(answer: bytes) -> bytes:
    match = _ERROR.fullmatch(answer)
    if match is not None:
        raise ShimError(match[1].decode(), match[2].decode(errors="replace"))
    if answer != b"ok" and not answer.startswith(b"ok "):
        raise VmmError("the shim's answer cannot be understood")
    return answer


def _fields(answer: bytes) -> dict[str, str]:
    return dict(part.split("=", 1) for part in answer.decode().split(" ")[1:])


def _status(answer: bytes) -> ShimStatus:
    with contextlib.suppress(ValueError, KeyError):
        fields = _fields(answer)
        status = None
        if fields["state"] == "exited":
            signal = int(fields["signal"])
            status = ExitStatus(signal=signal) if signal else ExitStatus(code=int(fields["code"]))
        return ShimStatus(
            sandbox_id=fields["id"],
            generation=int(fields["generation"]),
            pid=int(fields.get("pid", "0")),
            shim_pid=int(fields.get("shim", "0")),
            exit=status,
        )
    raise VmmError("the shim's answer cannot be understood")


def _transferred(answer: bytes) -> Transferred:
    with contextlib.suppress(ValueError, KeyError):
        fields = _fields(answer)
        return Transferred(*(int(fields[name]) for name in ("pages", "runs", "bytes")))
    raise VmmError("the shim's answer cannot be understood")
