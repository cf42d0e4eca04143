"""`hatchway logs`: what a session has written, from its first octet."""

import base64
from typing import Any

import msgspec

from hatchway.client import End, Exit, Gap, Output, SessionEvent

from .front import Front, note
from .output import print_json, write_octets


def show_logs(front: Front, session_id: str, *, follow: bool) -> None:
    """Shows what there is, with `follow` until the end. A command that nobody has started yet is not started by this."""
    session = front.client.sessions.get(session_id)
    if session.info.state == "created":
        note("the command was not started yet")
        return
    missing = {"stdout": session.info.stdout_bytes, "stderr": session.info.stderr_bytes}
    ended = session.info.state == "ended"
    with session:
        if not follow and not ended and not any(missing.values()):
            return
        for event in session:
            _show(event, front.json)
            if isinstance(event, Output):
                missing[event.stream] -= len(event.data)
            elif isinstance(event, Gap):
                missing[event.stream] -= event.to - event.from_
            if not follow and not ended and max(missing.values()) <= 0:
                return


def _show(event: SessionEvent, json: bool) -> None:
    if json:
        print_json(_as_json(event))
    elif isinstance(event, Output):
        write_octets(1 if event.stream == "stdout" else 2, event.data)
    elif isinstance(event, Gap):
        note(f"octets {event.from_} to {event.to} of {event.stream} are not kept any more")


def _as_json(event: SessionEvent) -> dict[str, Any]:
    if isinstance(event, Output):
        try:
            content = {"text": event.data.decode()}
        except UnicodeDecodeError:
            content = {"base64": base64.b64encode(event.data).decode()}
        return {"event": event.stream, "offset": event.offset, **content}
    names = {Gap: "gap", Exit: "exit", End: "end"}
    return {"event": names.get(type(event), "started"), **msgspec.to_builtins(event)}
