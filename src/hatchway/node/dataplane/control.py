"""`…/signal` and `…/resize`: what a client does to a process besides feeding it."""

import signal
from typing import Annotated, Literal, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import Conflict, InvalidRequest
from hatchway.node.dataplane import requests
from hatchway.node.dataplane.plane import Plane
from hatchway.node.sessions.session import Session

Cells = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
B = TypeVar("B", bound=msgspec.Struct)


class SignalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`signal` by name (`TERM`, `SIGTERM`) or number; `scope`: the whole tree, or the leader alone."""

    signal: str | int
    scope: Literal["tree", "leader"] = "tree"


class ResizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terminal's new size in characters."""

    rows: Cells
    cols: Cells


class _Control:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def _read(self, scope: Scope, receive: Receive, kind: type[B]) -> tuple[Session, B]:
        session, _ = requests.session_of(scope, self._plane.tokens, self._plane.sessions)
        body = await requests.read_json(scope, receive, kind, self._plane.limits.body)
        if body is None:
            raise InvalidRequest("body_missing", "The request has no body.", "Send a JSON object.")
        if not session.started:
            raise Conflict("not_started", "The process was not started yet.", "Attach to the session first.")
        await self._plane.ready_for(session)
        return session, body


class Signal(_Control):
    """The endpoint; answers `{"delivered": bool}`: false when nothing of the process lives any more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        session, body = await self._read(scope, receive, SignalBody)
        number = signal_number(body.signal)
        delivered = session.living and await session.signal(
            self._plane.link(session), number, leader_only=body.scope == "leader"
        )
        answer = msgspec.json.encode({"delivered": delivered})
        await Response(answer, media_type="application/json")(scope, receive, send)


class Resize(_Control):
    """The endpoint; answers 204."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        session, body = await self._read(scope, receive, ResizeBody)
        if session.record.exit is not None:
            raise Conflict("process_ended", "The process has ended.", "Nothing is left to do.")
        await session.resize(self._plane.link(session), body.rows, body.cols)
        await Response(status_code=204)(scope, receive, send)


def signal_number(name: str | int) -> int:
    """The number of a signal that a client names. Raises `InvalidRequest("unknown_signal")`."""
    if isinstance(name, int):
        if 1 <= name <= 64:
            return name
    else:
        upper = name.upper()
        known = signal.Signals.__members__.get(upper if upper.startswith("SIG") else f"SIG{upper}")
        if known is not None:
            return int(known)
    raise InvalidRequest(
        "unknown_signal", f"{str(name)[:40]!r} is not a signal.", "Use a name like TERM, or a number from 1 to 64."
    )
