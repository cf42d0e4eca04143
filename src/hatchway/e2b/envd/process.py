"""`process.Process`: commands and terminals, as sessions of API v1."""

import contextlib
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from hatchway.client import Conflict, Gone, NotFound, SessionInfo
from hatchway.client import errors as ours
from hatchway.client.aio import AsyncSandbox, AsyncSession
from hatchway.client.events import Exit
from hatchway.client.models import SandboxInfo
from hatchway.e2b.envd import connect, environment, users
from hatchway.e2b.envd.calls import OnClientStream, OnStream, OnUnary
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.messages import Message
from hatchway.e2b.envd.processes import RETAIN_S, TAG, Processes, metadata
from hatchway.e2b.envd.requests import Request
from hatchway.e2b.envd.running import Telling

NAME = "process.Process"
KEEPALIVE: Final[Mapping[str, object]] = {"event": {"keepalive": {}}}
LONGEST_S = 30 * 24 * 3600.0
"""The longest that API v1 bounds a command by, or waits for what it left behind."""
ROWS, COLS, MOST_CELLS = 24, 80, 1000
SIGNALS = {"SIGNAL_UNSPECIFIED": 0, "SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}
CLOSED = frozenset({"stdin_closed", "stdin_refused", "no_stdin"})
ENDED = frozenset({"process_ended", "not_started", "session_gone", "unknown_session"})


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A process to start."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: str | None
    pty: tuple[int, int] | None
    stdin: bool
    tag: str | None
    timeout_s: float | None


@dataclass
class Process:
    """The service."""

    processes: Processes = field(default_factory=Processes)
    _stopping: dict[str, set[Telling]] = field(default_factory=dict)

    def methods(self) -> dict[str, OnUnary | OnStream | OnClientStream]:
        """Its methods, by name."""
        return {
            "List": OnUnary(self._list),
            "Start": OnStream(self._start, KEEPALIVE),
            "Connect": OnStream(self._connect, KEEPALIVE),
            "SendInput": OnUnary(self._send_input),
            "StreamInput": OnClientStream(self._stream_input),
            "CloseStdin": OnUnary(self._close_stdin),
            "SendSignal": OnUnary(self._send_signal),
            "Update": OnUnary(self._update),
        }

    # -- what runs

    async def _list(self, request: Request, _: Message) -> object:
        sandbox = await request.sandbox()
        infos = await self.processes.running(sandbox)
        return {"processes": [_shown(info, sandbox.info) for info in infos if info.pid is not None]}

    async def _start(self, request: Request, message: Message) -> AsyncGenerator[object, None]:
        sandbox = await request.sandbox()
        wanted = _wanted(message, connect.timeout_s(request.headers))
        del message
        session = await self._started(sandbox, wanted, request.user())
        async with aclosing(self._follow(session, pty=wanted.pty is not None, own=True)) as events:
            async for event in events:
                yield event

    async def _connect(self, request: Request, message: Message) -> AsyncGenerator[object, None]:
        sandbox = await request.sandbox()
        info = await self.processes.find(sandbox, message.required("process"))
        del message
        session = sandbox.session(info, live=True)
        async with aclosing(self._follow(session, pty=info.pty is not None, own=False)) as events:
            async for event in events:
                yield event

    async def _follow(self, session: AsyncSession, *, pty: bool, own: bool) -> AsyncGenerator[object, None]:
        telling = Telling(pty=pty, own=own)
        following = self._stopping.setdefault(session.id, set())
        following.add(telling)
        try:
            async with aclosing(telling.events(session)) as events:
                async for event in events:
                    yield event
        finally:
            following.discard(telling)
            if not following:
                self._stopping.pop(session.id, None)
            await session.close()

    async def _started(self, sandbox: AsyncSandbox, wanted: _Wanted, named: str | None) -> AsyncSession:
        """Starts a process; returns when it runs. Raises `ConnectError`."""
        user = users.checked(named or users.DEFAULT)
        cwd = wanted.cwd
        if cwd is not None and not cwd.startswith("/"):
            cwd = await _resolved(sandbox, cwd, user)
        session = await self._begun(sandbox, wanted, user, cwd)
        failed = session.exit
        if failed is not None and failed.reason == "spawn_failed" and _is_unknown_user(failed) and named is None:
            session = await self._begun(sandbox, wanted, users.FALLBACK, cwd)
            failed = session.exit
        if failed is not None and failed.reason == "spawn_failed":
            raise _not_started(failed, user, cwd)
        return session

    async def _begun(self, sandbox: AsyncSandbox, wanted: _Wanted, user: str, cwd: str | None) -> AsyncSession:
        timeout = wanted.timeout_s
        return await sandbox.start(
            wanted.argv,
            env={**environment.of(sandbox.info), **wanted.env},
            cwd=cwd,
            user=user,
            pty=wanted.pty,
            stdin=wanted.stdin,
            timeout=None if timeout is None or timeout > LONGEST_S else timeout,
            timeout_scope="leader",
            linger=LONGEST_S,
            retain=RETAIN_S,
            metadata=metadata(wanted.tag),
        )

    # -- what is done to it

    async def _send_input(self, request: Request, message: Message) -> object:
        sandbox = await request.sandbox()
        info = await self.processes.find(sandbox, message.required("process"))
        await self._feed(sandbox, info, message.message("input"))
        return {}

    async def _stream_input(self, request: Request, stream: AsyncIterator[Message]) -> object:
        sandbox = await request.sandbox()
        info: SessionInfo | None = None
        async for message in stream:
            which = message.one_of("start", "data", "keepalive")
            if which == "start":
                info = await self.processes.find(sandbox, message.required("start").required("process"))
            elif which == "data":
                if info is None:
                    raise ConnectError("invalid_argument", "the stream has data before its start")
                await self._feed(sandbox, info, message.required("data").message("input"))
            elif which is None:
                raise ConnectError("unimplemented", "invalid event type <nil>")
        return {}

    async def _feed(self, sandbox: AsyncSandbox, info: SessionInfo, given: Message | None) -> None:
        which = None if given is None else given.one_of("stdin", "pty")
        if given is None or which is None:
            raise ConnectError("unimplemented", "invalid input type <nil>")
        if which == "stdin" and info.pty is not None:
            raise ConnectError("internal", "error writing to stdin: the process has a terminal, not a stdin")
        if which == "pty" and info.pty is None:
            raise ConnectError("internal", "error writing to tty: tty not assigned to process")
        if which == "stdin" and not info.stdin:
            raise ConnectError("internal", "error writing to stdin: stdin not enabled or closed")
        octets = given.octets(which) or b""
        if octets:
            with _of(info, closed="error writing to stdin: stdin not enabled or closed"):
                await self.processes.session(sandbox, info).append_stdin(octets)

    async def _close_stdin(self, request: Request, message: Message) -> object:
        sandbox = await request.sandbox()
        info = await self.processes.find(sandbox, message.required("process"))
        if info.pty is not None:
            raise ConnectError("internal", "error closing stdin: a terminal has none; Ctrl+D (0x04) ends its input")
        if not info.stdin:
            return {}
        with _of(info, closed=None):
            await self.processes.session(sandbox, info).append_stdin(b"", eof=True)
        return {}

    async def _send_signal(self, request: Request, message: Message) -> object:
        sandbox = await request.sandbox()
        name = message.choice("signal", SIGNALS) or "SIGNAL_UNSPECIFIED"
        info = await self.processes.find(sandbox, message.required("process"))
        number = SIGNALS[name]
        if number == 0:
            raise ConnectError("unimplemented", f"invalid signal: {name}")
        with _of(info):
            if not await self.processes.session(sandbox, info).send_signal(number, scope="leader"):
                raise _ended(info)
        for telling in self._stopping.get(info.id, ()):
            telling.stopped = True
        return {}

    async def _update(self, request: Request, message: Message) -> object:
        sandbox = await request.sandbox()
        info = await self.processes.find(sandbox, message.required("process"))
        pty = message.message("pty")
        if pty is None:
            return {}
        rows, cols = _size(pty)
        if info.pty is None:
            raise ConnectError("internal", "error resizing tty: tty not assigned to process")
        with _of(info):
            await self.processes.session(sandbox, info).resize(rows, cols)
        return {}


def _wanted(message: Message, timeout_s: float | None) -> _Wanted:
    config = message.required("process")
    command = config.text("cmd")
    if not command:
        raise ConnectError("invalid_argument", "process.cmd is required")
    pty = message.message("pty")
    return _Wanted(
        argv=[command, *config.texts("args")],
        env=config.text_map("envs"),
        cwd=config.text("cwd") or None,
        pty=None if pty is None else _size(pty),
        stdin=message.flag("stdin") is not False,
        tag=message.text("tag"),
        timeout_s=timeout_s,
    )


def _size(pty: Message) -> tuple[int, int]:
    size = pty.message("size")
    rows = (size.unsigned("rows") if size else None) or ROWS
    cols = (size.unsigned("cols") if size else None) or COLS
    return min(rows, MOST_CELLS), min(cols, MOST_CELLS)


def _shown(info: SessionInfo, sandbox: SandboxInfo) -> dict[str, object]:
    argv = info.argv or ("",)
    envs = environment.asked_for(info.env or {}, sandbox)
    config: dict[str, object] = {"cmd": argv[0], "args": list(argv[1:]), "envs": envs}
    if info.cwd is not None:
        config["cwd"] = info.cwd
    shown: dict[str, object] = {"config": config, "pid": info.pid}
    if TAG in info.metadata:
        shown["tag"] = info.metadata[TAG]
    return shown


async def _resolved(sandbox: AsyncSandbox, cwd: str, user: str) -> str:
    """The absolute form of a working folder that begins at the user's home. Raises `ConnectError`."""
    inside = "." if cwd in ("~", "~/") else cwd.removeprefix("~/")
    try:
        entry = await sandbox.files.stat(inside, user=user)
    except NotFound:
        raise ConnectError("invalid_argument", f"cwd '{cwd}' does not exist") from None
    except ours.Unprocessable as error:
        if users.is_unknown(error):
            raise users.invalid(user) from None
        raise
    if not entry.is_dir:
        raise ConnectError("invalid_argument", f"cwd '{cwd}' is not a directory")
    return posixpath.normpath(entry.path)


def _is_unknown_user(failed: Exit) -> bool:
    return failed.message.startswith("no such user: ")


def _not_started(failed: Exit, user: str, cwd: str | None) -> ConnectError:
    """Why a process could not be started; the guest's agent says it in words (`guest/spawn.c`)."""
    if _is_unknown_user(failed):
        return users.invalid(user)
    if cwd is not None and failed.message.startswith("cwd "):
        missing = failed.message.endswith("No such file or directory")
        reason = "does not exist" if missing else f"cannot be entered: {failed.message.rpartition(': ')[2]}"
        return ConnectError("invalid_argument", f"cwd '{cwd}' {reason}")
    return ConnectError("invalid_argument", f"error starting process: {failed.message}")


def _ended(info: SessionInfo) -> ConnectError:
    return ConnectError("not_found", f"process with pid {info.pid} not found")


@contextlib.contextmanager
def _of(info: SessionInfo, closed: str | None = "") -> Iterator[None]:
    """Turns what says that the process has ended, or that its stdin is closed (None: that is no error), into an error of a call."""
    try:
        yield
    except (Conflict, Gone, NotFound) as error:
        if error.code in CLOSED:
            if closed is None:
                return
            raise ConnectError("internal", closed) from None
        if error.code in ENDED:
            raise _ended(info) from None
        raise
