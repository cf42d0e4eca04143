"""What a process tells, as E2B's events: from the events of its session."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from hatchway.client import End, Exit, Gap, Output, SessionEvent, Started
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.messages import encoded
from hatchway.e2b.envd.requests import Cut

PIECE = 32 * 1024
"""Octets of output in one event; of a terminal half as many."""

_SIGNALS = {
    1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted", 7: "bus error",
    8: "floating point exception", 9: "killed", 10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
    13: "broken pipe", 14: "alarm clock", 15: "terminated",
}  # fmt: skip
_LOST = ("sandbox_lost", "rolled_back")


def start(pid: int) -> dict[str, object]:
    """The first event."""
    return {"event": {"start": {"pid": pid}}}


def end(exit_: Exit) -> dict[str, object]:
    """The last event of a process: how it ended."""
    if exit_.reason == "exited" and exit_.code is not None:
        status = f"exit status {exit_.code}"
        failed = {"error": status} if exit_.code else {}
        return {"event": {"end": {"exitCode": exit_.code, "exited": True, "status": status, **failed}}}
    # A timeout and the memory killer are signals too.
    number = 9 if exit_.signal is None else exit_.signal
    status = f"signal: {_SIGNALS.get(number, f'signal {number}')}"
    return {"event": {"end": {"exitCode": -1, "exited": False, "status": status, "error": status}}}


class Telling:
    """The events of one process for one who follows it. `own`: the stream that started it, which its deadline ends with an error."""

    def __init__(self, *, pty: bool, own: bool) -> None:
        self._pty = pty
        self._own = own
        self._started = False
        self._exit: Exit | None = None
        self.stopped = False
        """Whoever follows is not interested in what others may still write: the process was told to end."""

    async def events(self, session: AsyncIterator[SessionEvent]) -> AsyncGenerator[dict[str, object], None]:
        """Yields events up to the end of the process. Raises `ConnectError`, and `Cut` when its sandbox is gone."""
        async for event in session:
            match event:
                case Started(pid=pid):
                    if not self._started and pid is not None:
                        self._started = True
                        yield start(pid)
                case Output():
                    for piece in self._output(event):
                        yield piece
                case Gap():
                    text = f"octets {event.from_} to {event.to} of {event.stream} are not there any more"
                    raise ConnectError("data_loss", f"{text}: more was written than is kept for one who reads slowly")
                case Exit():
                    self._exit = event
                    if event.reason in _LOST:
                        raise Cut
                    if event.reason == "agent_unresponsive":
                        raise ConnectError("unavailable", event.message)
                    if event.reason == "timeout" and self._own:
                        raise ConnectError("deadline_exceeded", "the process was killed at its deadline")
                    if event.reason != "exited" or self.stopped:
                        yield end(event)
                        return
                case End():
                    break
        if self._exit is None:
            raise Cut
        yield end(self._exit)

    def _output(self, event: Output) -> Iterator[dict[str, object]]:
        name = "pty" if self._pty else event.stream
        most = PIECE // 2 if self._pty else PIECE
        for at in range(0, len(event.data), most):
            yield {"event": {"data": {name: encoded(event.data[at : at + most])}}}
