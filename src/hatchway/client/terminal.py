"""A terminal in a sandbox over a WebSocket, for blocking code. `aterminal` has the same for asyncio."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from . import calls
from .errors import Conflict
from .events import Exit, SessionEvent
from .models import SessionInfo
from .running import octets
from .steps import Pause
from .transport import SyncDriver
from .wires import EOF, INPUT_PIECE, Dial, TerminalState, refusal, resize_message, signal_message


class Terminal:
    """A command with a terminal.

    Iterating gives what it shows (`Output`), `Started`, `Gap`, `Exit` and `End`, each octet once: a connection that breaks is
    taken up again at its offset. Output that nobody reads holds the command back. Input that was on its way when a connection
    broke may be lost. Other threads may send while one iterates.
    """

    def __init__(self, driver: SyncDriver, opened: calls.Opened) -> None:
        self._driver = driver
        self._state = TerminalState(opened)
        self._socket: ClientConnection | None = None
        self._waiting: deque[SessionEvent] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def id(self) -> str:
        """The id of its session: `hatchway.sessions.get(id).terminal()` is another view of it."""
        return self._state.info.id

    @property
    def info(self) -> SessionInfo:
        """What the service told when it was made."""
        return self._state.info

    @property
    def exit(self) -> Exit | None:
        """How the process ended, as soon as the iteration has come there."""
        return self._state.exit

    def __iter__(self) -> Iterator[SessionEvent]:
        return self

    def __next__(self) -> SessionEvent:
        while not self._waiting:
            if self._state.ended or self._closed:
                raise StopIteration
            message = self._receive()
            if message is not None:
                self._waiting.extend(self._state.take(message))
        return self._waiting.popleft()

    def connect(self) -> None:
        """Connects, which starts the process; iterating and sending do it by themselves."""
        self._connected()

    def send(self, data: bytes | str) -> None:
        """Types: sends input to the process. Raises `Conflict("process_ended")` when nobody reads any more."""
        typed = octets(data)
        for at in range(0, len(typed), INPUT_PIECE):
            self._send(typed[at : at + INPUT_PIECE])

    def send_eof(self) -> None:
        """Hangs up, behind what was sent before. (To type the end of input, send `\\x04`.)"""
        self._send(EOF)

    def resize(self, rows: int, cols: int) -> None:
        """Tells the terminal its new size."""
        self._send(resize_message(rows, cols))

    def send_signal(self, signal: str | int = "TERM", *, scope: str = "tree") -> None:
        """Sends a signal, by name (`TERM`) or number, to the whole process tree or with `scope="leader"` to the leader."""
        self._send(signal_message(signal, scope))

    def wait(self) -> Exit:
        """Reads on to the end and returns how the process ended."""
        for _event in self:
            pass
        return self._state.finished()

    def delete(self) -> None:
        """Kills the command if it runs and drops what was kept of it."""
        self.close()
        self._driver.run(calls.delete_session(self.id))

    def close(self) -> None:
        """Disconnects; the command goes on."""
        self._closed = True
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> ClientConnection:
        with self._lock:
            while self._socket is None:
                if self._closed:
                    raise Conflict("terminal_closed", "This view of the terminal was closed.", "Open another one.")
                dial = self._driver.run(self._state.dial())
                try:
                    self._socket = open_socket(self._driver, dial)
                except InvalidStatus as error:
                    time.sleep(self._state.refused(refusal(error.response.status_code, error.response.body)).seconds)
                except (OSError, InvalidHandshake, EOFError) as error:
                    time.sleep(self._state.lost(str(error) or type(error).__name__).seconds)
                else:
                    self._state.connected()
            return self._socket

    def _receive(self) -> bytes | str | None:
        socket = self._connected()
        try:
            return socket.recv()
        except ConnectionClosed as error:
            self._lost(socket, error)
            return None

    def _send(self, message: bytes | str) -> None:
        while True:
            if self._state.ended or self._state.exit is not None:
                raise Conflict("process_ended", "The command has ended.", "Nobody reads what is sent any more.")
            socket = self._connected()
            try:
                socket.send(message)
                return
            except ConnectionClosed as error:
                # What could not be handed over as a whole was not taken as a message: it can be sent again.
                self._lost(socket, error)

    def _lost(self, socket: ClientConnection, error: ConnectionClosed) -> None:
        pause = Pause(0)
        with self._lock:
            if self._socket is socket:
                self._socket = None
                if not (self._closed or self._state.ended):
                    pause = self._state.lost(str(error), error.rcvd.code if error.rcvd else None)
        time.sleep(pause.seconds)


def open_socket(driver: SyncDriver, dial: Dial) -> ClientConnection:
    """Opens a WebSocket. Raises what the library does."""
    tls = driver.tls if dial.url.startswith("wss:") else None
    # The library wants a context manager, whose block would be the life of this object: `close` is its end.
    socket: ClientConnection = connect(dial.url, ssl=tls, **dial.options()).__enter__()
    return socket
