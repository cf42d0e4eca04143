"""WebSockets of the data plane without I/O: where they lead, what their messages mean, and when to come again."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from . import calls, streams
from .config import is_loopback
from .errors import BadAnswer, HatchwayError, InvalidRequest, Unauthenticated, Unavailable, from_problem
from .events import End, Exit, Gap, Output, SessionEvent, Started
from .models import Access, SandboxToken
from .reach import Reach, check_port
from .steps import Flow, Pause

MAX_MESSAGE = 1024 * 1024
"""Octets of one message; the node sends at most 64 KiB."""
INPUT_PIECE = 32 * 1024
"""Octets of input that one message carries."""
_NO_LONGER = 1008
"""The close code that says that the token is not good any more."""
SHELL = ("/bin/sh", "-c", 'exec "$(command -v bash || echo sh)" -l')
"""What a terminal runs when nothing else is asked for: the sandbox's bash as a login shell, where it has one."""


@dataclass(frozen=True, slots=True)
class Dial:
    """A WebSocket to open."""

    url: str
    token: str

    def options(self) -> dict[str, Any]:
        """What both kinds of connection are opened with."""
        # A proxy from the environment is not for a service on this machine.
        proxy = None if is_loopback(urlsplit(self.url).hostname or "") else True
        return {
            "additional_headers": {"Authorization": f"Bearer {self.token}"},
            "user_agent_header": "hatchway-python",
            "compression": None,
            "max_size": MAX_MESSAGE,
            "max_queue": 4,
            "open_timeout": 30,
            "close_timeout": 2,
            "proxy": proxy,
        }


def _websocket(url: str) -> str:
    return "ws" + url.removeprefix("http")


def refusal(status: int, body: bytes | bytearray | None) -> HatchwayError:
    """The error for a handshake that was refused."""
    if status < 400:
        return BadAnswer("bad_answer", f"The handshake was answered with status {status}.", "Check the URL.")
    return from_problem(status, bytes(body or b""))


class _Started(msgspec.Struct):
    offset: int
    epoch: int = 0
    pid: int | None = None


class _Gap(msgspec.Struct):
    from_: int = msgspec.field(name="from")
    to: int


class _Error(msgspec.Struct):
    code: str = "failed"
    cause: str = ""
    remedy: str = ""


class TerminalState:
    """One view of a terminal: how far it was read, and how to come again."""

    def __init__(self, opened: calls.Opened, offset: int = 0) -> None:
        self.info = opened.info
        self.line = streams.Line(opened.info.id, opened.access)
        self.offset = offset
        self.epoch: int | None = None
        self.started = False
        self.exit: Exit | None = None
        self.ended = False
        self._renewed = False
        self.patience = streams.Patience(
            f"The terminal {opened.info.id}",
            f"When the service is back, go on with: hatchway shell {opened.info.sandbox_id} --attach {opened.info.id}",
        )

    def dial(self) -> Flow[Dial]:
        """Where to connect to, behind what was read."""
        access: Access = yield from self.line.ready()
        return Dial(_websocket(f"{self.line.url(access, 'ws')}?from={self.offset}"), access.token)

    def connected(self) -> None:
        """The handshake succeeded."""
        self._renewed = False

    def refused(self, error: HatchwayError) -> Pause:
        """The handshake was refused: how long to wait before the next one, or `error` when there is none to be."""
        if isinstance(error, Unauthenticated) and not self._renewed:
            self._renewed = True
            self.line.access = None
            return Pause(0)
        if isinstance(error, Unavailable):
            return self.patience.next_pause(error.cause)
        raise error

    def lost(self, cause: str, code: int | None = None) -> Pause:
        """The connection broke, or was closed with `code`: how long to wait before the next one. Raises `StreamLost`."""
        if code == _NO_LONGER:
            self.line.access = None
        return self.patience.next_pause(cause)

    def take(self, message: bytes | str) -> Iterator[SessionEvent]:
        """Yields what a message of the node tells. Raises the error that it tells of, after which reading can go on."""
        self.patience.progress()
        if isinstance(message, bytes):
            if message:
                at, self.offset = self.offset, self.offset + len(message)
                yield Output("stdout", at, message)
            return
        try:
            yield from self._event(message.encode())
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadAnswer("bad_event", f"A message cannot be read: {error}", "Update the client.") from None

    def _event(self, message: bytes) -> Iterator[SessionEvent]:
        name = msgspec.json.decode(message, type=dict[str, Any]).get("event")
        if name == "started":
            started = msgspec.json.decode(message, type=_Started)
            # After a rollback of the sandbox its terminal goes on from where it was then.
            if self.epoch is not None and started.epoch != self.epoch:
                self.exit = None
            self.epoch = started.epoch
            self.offset = started.offset
            if not self.started:
                self.started = True
                yield Started(pid=started.pid)
        elif name == "gap":
            gap = msgspec.json.decode(message, type=_Gap)
            self.offset = gap.to
            yield Gap(stream="stdout", from_=gap.from_, to=gap.to)
        elif name == "exit":
            ended = msgspec.json.decode(message, type=Exit)
            if self.exit is None:
                self.exit = ended
                yield ended
        elif name == "end" and not self.ended:
            self.ended = True
            yield End()
        elif name == "error":
            error = msgspec.json.decode(message, type=_Error)
            raise InvalidRequest(error.code, error.cause, error.remedy)

    def finished(self) -> Exit:
        """How the process ended; for a terminal that was read to its end."""
        if self.exit is None:
            raise BadAnswer("no_exit", f"The terminal {self.info.id} ended without telling how.", "")
        return self.exit


def terminal_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a terminal's command: programs need to know its kind."""
    return {"TERM": "xterm-256color", **(env or {})}


def resize_message(rows: int, cols: int) -> str:
    """Asks for another size."""
    return json.dumps({"resize": {"rows": rows, "cols": cols}})


def signal_message(signal: str | int, scope: str) -> str:
    """Asks for a signal."""
    return json.dumps({"signal": signal, "scope": scope})


EOF = '{"eof": true}'
"""The end of input, or of a direction of a connection."""


def is_eof(message: str) -> bool:
    """Whether a text message of a tunnel says that no more will come. Raises `BadAnswer` for one that says something else."""
    try:
        if json.loads(message) == {"eof": True}:
            return True
    except ValueError:
        pass
    raise BadAnswer("bad_answer", "A message of the tunnel is none.", "Check the versions.")


def tunnel(reach: Reach, port: int) -> Flow[tuple[Dial, SandboxToken]]:
    """Where a connection to a port of the sandbox begins."""
    check_port(port)
    token = yield from reach.ready("ports")
    base = token.data_plane_url.rstrip("/")
    url = f"{base}/v1/sandboxes/{quote(reach.sandbox_id, safe='')}/ports/{port}/tcp"
    return Dial(_websocket(url), token.token), token
