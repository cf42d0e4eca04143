"""What a client keeps of a command while it runs: the state of its session, and the output that `run` gathers. No I/O."""

from . import calls, streams
from .errors import BadAnswer, Conflict, HatchwayError, OutputLimit
from .events import Cursor, Exit, Gap, Output, SessionEvent
from .models import Result
from .steps import Flow, Stream

DEFAULT_MAX_OUTPUT = 64 * 1024 * 1024
"""Octets of each stream that `run` holds in memory."""


def octets(data: bytes | str) -> bytes:
    """Returns text as UTF-8, octets as they are."""
    return data.encode() if isinstance(data, str) else data


class SessionState:
    """One reader's and writer's view of a session."""

    def __init__(self, opened: calls.Opened, *, fresh: bool) -> None:
        self.info = opened.info
        self.line = streams.Line(opened.info.id, opened.access)
        self.cursor = Cursor()
        self.input = streams.Input(self.line, 0 if fresh else None)

    def attach(self) -> Stream[SessionEvent]:
        """The flow that reads on after what was delivered."""
        return streams.attach(self.line, self.cursor)

    def feed(self, data: bytes) -> Flow[None]:
        """Writes all of the standard input; a process that ends before it took all of it is no failure."""
        try:
            yield from self.input.write(data, eof=True)
        except Conflict as error:
            if error.code != "process_ended":
                raise

    def ended(self) -> Exit:
        """How the process ended; for a stream that was read to its end."""
        if self.cursor.exit is None:
            raise BadAnswer("no_exit", f"The stream of session {self.info.id} ended without telling how.", "")
        return self.cursor.exit

    def kill(self) -> Flow[None]:
        """Kills the process tree, if that is still possible."""
        try:
            yield from streams.send_signal(self.line, "KILL", "tree")
        except HatchwayError:
            return


class Gathering:
    """Collects the output of a command up to a bound per stream."""

    def __init__(self, max_output: int) -> None:
        self._max = max_output
        self._pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}
        self._gaps: list[Gap] = []

    def take(self, event: SessionEvent, session_id: str) -> None:
        """Takes one event in; raises `OutputLimit` when the bound is passed."""
        if isinstance(event, Output):
            self._sizes[event.stream] += len(event.data)
            if self._sizes[event.stream] > self._max:
                raise OutputLimit(
                    "output_limit",
                    f"The command wrote more than {self._max} octets to {event.stream}; it was killed.",
                    "Give a larger max_output, or use start() and read the events as they come.",
                    session_id=session_id,
                )
            self._pieces[event.stream].append(event.data)
        elif isinstance(event, Gap):
            self._gaps.append(event)

    def result(self, session_id: str, ended: Exit) -> Result:
        """Returns what was collected."""
        pieces = self._pieces
        return Result(session_id, ended, b"".join(pieces["stdout"]), b"".join(pieces["stderr"]), tuple(self._gaps))
