"""Another program in the place of the agent: it stops the first process, takes its port, and speaks as it likes.

Where nothing is defended the port is a socket of a naive host's end.
"""

import contextlib
import ctypes
import io
import json
import os
import select
import socket
import tarfile
import time
from collections.abc import Callable
from typing import Any

from . import frames
from .frames import ARG, BUILTIN, FLAGS, KEY, NONCE, SIZE
from .meanwhile import HOLD_S, deadline, hold
from .notes import facts, tried

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_SEIZE, _INTERRUPT = 0x4206, 0x4207
_AF_VSOCK = 40
_TOOK_WELL_S = 1.0
"""What the true agent has still to say to its host, it says within this time."""
FOLDER = {"path": "/root/x", "name": "x", "type": "dir", "size": 0, "mode": 0o755, "uid": 0, "gid": 0, "user": "root", "group": "root", "mtime_ns": 0}  # fmt: skip
Deed = Callable[["Impostor"], object]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _port() -> int:
    """The first process stands still from now on, and its port is ours, too. Raises `LookupError` and `OSError`."""
    if "channel" in facts:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(facts["channel"])
        return sock.detach()
    if _libc.ptrace(_SEIZE, 1, None, None) or _libc.ptrace(_INTERRUPT, 1, None, None):
        raise LookupError(f"the first process cannot be stopped: {os.strerror(ctypes.get_errno())}")
    os.waitpid(1, 0x40000000)  # __WALL
    process = _libc.syscall(_PIDFD_OPEN, 1, 0)
    for name in os.listdir("/proc/1/fd"):
        leads = os.readlink(f"/proc/1/fd/{name}")
        if "vport" not in leads and not leads.startswith("socket:"):
            continue
        fd: int = _libc.syscall(_PIDFD_GETFD, process, int(name), 0)
        if "vport" in leads:
            return fd
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=fd)
            if sock.family == _AF_VSOCK and sock.getpeername():
                return sock.detach()
            sock.close()
    raise LookupError("the first process has no port")


class Impostor:
    """Speaks with the host. `number`, `key`, `request` and `args` are of the command at hand, `first` and `first_key` of the first one."""

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()
        self.number = self.request = self.first = 0
        self.key = self.first_key = b""
        self.args: list[bytes] = []
        self.greeting = b""
        """The last answer to a greeting."""
        self._fd = _port()
        os.set_blocking(self._fd, False)
        self._buffer = bytearray()

    # -- what a deed says

    def raw(self, octets: bytes, within: float = 60.0) -> None:
        """Octets as they are. Whoever does not take them is not waited for longer than this."""
        rest = memoryview(octets)
        ends = time.monotonic() + within
        while rest and time.monotonic() < ends:
            select.select([], [self._fd], [], 1.0)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._fd, rest) :]

    def again_and_again(self, octets: bytes, seconds: float = 60.0) -> None:
        """The same octets without an end; whoever breaks off is spoken to anew."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            try:
                self.raw(octets, left)
            except OSError:
                time.sleep(0.01)  # it is away for a moment

    def answer(self, request: int, *more: frames.Field, status: int = 0) -> None:
        """An answer to a request."""
        self.raw(frames.frame(frames.RESPONSE, request, frames.fields((frames.STATUS, status), *more)))

    def output(self, number: int, data: bytes, offset: int = 0, descriptor: int = 1) -> None:
        """Output of a process."""
        self.raw(frames.output(number, descriptor, offset, data))

    def proc(self, number: int, key: bytes, state: int = 3, out: int = 0, err: int = 0, code: int = 0, message: bytes = b"") -> None:  # fmt: skip
        """How a process stands."""
        more: list[frames.Field] = [(frames.MESSAGE, message)] if message else []
        told: list[frames.Field] = [
            (KEY, key),
            (frames.STATE, state),
            (frames.PID, 7),
            (frames.OUT, out),
            (frames.ERR, err),
            *more,
        ]
        ended = [(frames.CODE, code), (frames.REASON, 1)] if state > 1 else []
        self.raw(frames.frame(frames.PROC, number, frames.fields(*told, *ended)))

    def says(self, data: bytes, errors: bytes = b"", code: int = 0) -> None:
        """The command at hand wrote this, and has ended."""
        self.answer(self.request, (frames.PID, 7))
        if data:
            self.output(self.number, data)
        if errors:
            self.output(self.number, errors, descriptor=2)
        self.proc(self.number, self.key, out=len(data), err=len(errors), code=code)

    # -- what it does

    def serve(self, deed: Deed) -> None:
        """Answers as an agent would: the first command with who it is, the others, and work on files, with the deed."""
        while True:
            kind, _, stream, payload = self._next()
            told = frames.read_fields(payload)
            if kind == frames.HELLO:
                self._greet(told)
            elif kind == frames.SPAWN:
                self.request, self.number = stream, told[SIZE]
                self.key, self.args = told[KEY], told[ARG]
                if told.get(FLAGS, 0) & BUILTIN and self.args[1:2] == [b"stat"]:
                    self.says(b"", json.dumps({"ok": {"entry": FOLDER}}).encode() + b"\n")
                elif self.args[:1] == [b"who"]:
                    self.first, self.first_key = self.number, self.key
                    self.says(self.mark[::-1])
                else:
                    deed(self)
            elif kind in range(frames.PING, 29):
                self.answer(stream, (frames.TIME, time.time_ns()), (frames.UPTIME, 1))

    def _greet(self, told: "dict[int, Any]") -> None:
        said: list[frames.Field] = [(frames.VERSION_TAG, 1), (NONCE, told[NONCE]), (frames.EPOCH, told[frames.EPOCH])]
        said += [(frames.BOOT_ID, "impostor"), (frames.AGENT, "impostor"), (frames.UPTIME, 1)]
        self.greeting = frames.frame(frames.HELLO_ACK, 0, frames.fields(*said))
        self.raw(self.greeting + frames.frame(frames.READY, 0))

    def _next(self) -> "tuple[int, int, int, bytes]":
        while True:
            if (found := frames.split(self._buffer)) is not None:
                return found
            select.select([self._fd], [], [], 1.0)
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                continue
            if not data:
                time.sleep(0.05)  # the host's end is away
            self._buffer += data


def impostor(mark: str, deed: Deed) -> None:
    """Takes the agent's place when the host has said all that it had to say to the true one."""
    tried.append("the agent's port")
    hold(mark)
    if "channel" not in facts:
        time.sleep(_TOOK_WELL_S)
    deadline(HOLD_S)
    Impostor(mark).serve(deed)


def packed(*members: "tuple[str, dict[str, Any], bytes]", kind: int = tarfile.PAX_FORMAT) -> Deed:
    """Work on files is answered with an archive of these: name, what its head says, content."""

    def deed(agent: Impostor) -> None:
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w", format=kind) as archive:
            for name, says, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                for what, value in says.items():
                    setattr(info, what, value)
                archive.addfile(info, io.BytesIO(content))
        hands_over(agent, held.getvalue())

    return deed


def hands_over(agent: Impostor, octets: bytes) -> None:
    """Octets, for an archive."""
    ok = {"files": 1, "bytes": 1, "skipped": 0, "changed": 0}
    lines = json.dumps({"head": {"entry": FOLDER}}) + "\n" + json.dumps({"ok": ok}) + "\n"
    agent.says(octets, lines.encode())
