"""`hatchway shell`: the terminal that we run in becomes one of the sandbox, and is given back in every case."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Coroutine, Iterator
from typing import Any

from hatchway.client import AsyncTerminal, Conflict, Gap, HatchwayError, Output

from .escapes import HELP, Escapes
from .front import Front, note
from .output import write_octets
from .running import status_of

_PIECE = 32 * 1024
_AHEAD = 64
"""Pieces of input that wait for a connection; more stays in our terminal."""
_AS_BEFORE = b"\x1b[?1049l\x1b[?1000;1002;1003;1006l\x1b[?2004l\x1b[?25h\x1b[0m\r\n"
"""Undoes what a program that we leave may have told our terminal: other screen, mouse, pasting, cursor, colours."""


def run_shell(
    front: Front, sandbox: str, command: list[str], *, user: str | None, workdir: str | None, attach: str | None
) -> int:
    """Opens a terminal, or goes on with the one of the session `attach`; returns the exit status."""
    return asyncio.run(_open(front, sandbox, command, user, workdir, attach))


async def _open(
    front: Front, sandbox_id: str, command: list[str], user: str | None, workdir: str | None, attach: str | None
) -> int:
    async with front.asyncio_client() as client:
        if attach is not None:
            terminal = (await client.sessions.get(attach)).terminal()
        else:
            sandbox = await client.sandboxes.get(sandbox_id)
            rows, cols = size()
            env = {"TERM": os.environ["TERM"]} if os.environ.get("TERM") else None
            terminal = await sandbox.terminal(command or None, rows=rows, cols=cols, env=env, cwd=workdir, user=user)
        async with terminal:
            await terminal.connect()
            return await _Shell(terminal, sandbox_id).run(resize=attach is not None)


def size() -> tuple[int, int]:
    """Rows and columns of our terminal, 24 by 80 where there is none; what the service takes."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(descriptor)
            return min(max(rows, 1), 1000), min(max(columns, 1), 1000)
    return 24, 80


class _Shell:
    """What is typed goes there, what is shown there comes here."""

    def __init__(self, terminal: AsyncTerminal, sandbox_id: str) -> None:
        self._terminal = terminal
        self._sandbox_id = sandbox_id
        self._is_tty = os.isatty(0)
        self._typed: asyncio.Queue[bytes] = asyncio.Queue(_AHEAD)
        self._detached = asyncio.Event()
        self._signal: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, *, resize: bool) -> int:
        loop = asyncio.get_running_loop()
        with raw(), self._signals(loop):
            if resize:
                self._resized()
            shown = loop.create_task(self._show())
            left = loop.create_task(self._detached.wait())
            typing, sending = loop.create_task(self._type()), loop.create_task(self._send())
            whole = False
            try:
                await asyncio.wait({shown, left}, return_when=asyncio.FIRST_COMPLETED)
                if shown.done():
                    shown.result()
                    whole = True
            finally:
                for task in (shown, left, typing, sending, *self._tasks):
                    task.cancel()
                await asyncio.gather(shown, left, typing, sending, *self._tasks, return_exceptions=True)
                if not whole and os.isatty(1):
                    write_octets(1, _AS_BEFORE)
        if whole:
            assert self._terminal.exit is not None  # a terminal that was read to its end has one, or raised
            return status_of(self._terminal.exit)
        note(f"left; go on with: hatchway shell {self._sandbox_id} --attach {self._terminal.id}")
        return 128 + self._signal if self._signal is not None else 0

    # -- from there

    async def _show(self) -> None:
        async for event in self._terminal:
            if isinstance(event, Output):
                write_octets(1, event.data)
                await asyncio.sleep(0)  # a flood does not keep what is typed waiting
            elif isinstance(event, Gap):
                write_octets(2, f"\r\nhatchway: {event.to - event.from_} octets are not kept any more\r\n".encode())
        await self._terminal.wait()  # raises when it ended without telling how

    # -- from here

    async def _type(self) -> None:
        """Reads what is typed, also while nothing can be sent: leaving is always possible."""
        escapes = Escapes()
        while True:
            typed = await _read()
            if not typed:
                await self._typed.put(b"")
                return
            passed = escapes.feed(typed) if self._is_tty else typed
            if escapes.asked_for_help:
                escapes.asked_for_help = False
                write_octets(2, b"\r\n" + HELP)
            if passed:
                await self._typed.put(passed)
            if escapes.detached:
                self._detached.set()
                return

    async def _send(self) -> None:
        try:
            while typed := await self._typed.get():
                await self._terminal.send(typed)
            # What ends the input of a terminal is a letter; its end as such would hang up on the command. A program that sets
            # the terminal up just then (a shell that begins) never sees it: so again, until the command has ended.
            pause_s = 1.0
            while True:
                await self._terminal.send(b"\x04")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)
        except Conflict:
            return  # the command has ended; what it wrote is still coming
        except HatchwayError as error:
            write_octets(2, f"\r\nhatchway: {error.cause}\r\n".encode())

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        handlers = {
            signal.SIGWINCH: self._resized,
            signal.SIGCONT: self._continued,
            signal.SIGTERM: lambda: self._leave(signal.SIGTERM),
            signal.SIGHUP: lambda: self._leave(signal.SIGHUP),
            # Of a terminal it comes as a letter; without one, a signal is all there is.
            signal.SIGINT: lambda: self._later(self._terminal.send_signal("INT")),
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _leave(self, number: int) -> None:
        self._signal = number
        self._detached.set()

    def _resized(self) -> None:
        if self._is_tty:
            self._later(self._terminal.resize(*size()))

    def _continued(self) -> None:
        if self._is_tty:
            tty.setraw(0, termios.TCSANOW)
            self._resized()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(HatchwayError):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """Within it our terminal hands on every key as it is."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSANOW)
        yield
    finally:
        sys.stdout.flush()
        with contextlib.suppress(termios.error):  # a terminal that is gone needs nothing
            termios.tcsetattr(0, termios.TCSADRAIN, before)


async def _read() -> bytes:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(0, readable.set)
    except OSError:
        pass  # a file is always ready
    else:
        try:
            await readable.wait()
        finally:
            loop.remove_reader(0)
    try:
        return os.read(0, _PIECE)
    except OSError:
        return b""
