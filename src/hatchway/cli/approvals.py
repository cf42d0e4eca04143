"""Commands about what waits for somebody's consent: `approvals ls`, `watch`, `allow`, `deny`."""

import contextlib
import itertools
import queue
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front, harmless
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import Approval, HatchwayError, ServiceEvent

Id = Annotated[str, typer.Argument(metavar="APPROVAL", help="Id of what is asked.", show_default=False)]
Note = Annotated[str, typer.Option("--note", help="Why; whoever asked is told, and it is recorded.")]
_MAX_LISTED = 500
LOOK_AGAIN_S = 1.0


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for command in (ls, watch, allow, deny):
        group.command(command.__name__)(command)
    app.add_typer(group, name="approvals", help="Requests and operations that wait for somebody's consent.")


@with_front
def ls(
    front: Front,
    approval: Annotated[str | None, typer.Argument(metavar="[APPROVAL]", help="Id of one.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over, of the last day.")] = False,
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="Of this sandbox.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=_MAX_LISTED, help="How many to list.")] = 100,
) -> None:
    """List what waits for an answer, or show one."""
    from .output import print_fields, print_json, print_table, when

    client = front.client.approvals
    if approval is not None:
        one = client.get(approval)
        if front.json:
            print_json(one)
        else:
            print_fields({name: _plain(value) for name, value in one.as_dict().items()})
        return
    found = list(itertools.islice(client.list(states=() if all_ else ("pending",), sandbox=sandbox), limit))
    if front.json:
        print_json(found)
        return
    rows = [
        (one.id, one.state, one.sandbox_id, _what(one), when(one.expires_at), one.approver or one.why) for one in found
    ]
    print_table(("APPROVAL", "STATE", "SANDBOX", "WHAT", "UNTIL", "BY"), rows)


@with_front
def watch(front: Front) -> None:
    """Show what is asked, answered and over, until Ctrl-C. Begins with what waits."""
    from hatchway.client import HatchwayError

    from .output import print_json

    events: queue.SimpleQueue[ServiceEvent | HatchwayError] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(front, events), daemon=True).start()
    shown: set[str] = set()
    first = None
    while first is None:  # what was asked before the stream began is in none of its events
        for one in front.client.approvals.list(states=("pending",)):
            if one.id not in shown:
                shown.add(one.id)
                _tell(front, "approval.asked", one)
        with contextlib.suppress(queue.Empty):
            first = events.get(timeout=LOOK_AGAIN_S)
    event = first
    while True:
        if isinstance(event, HatchwayError):
            raise event
        if event.kind.startswith("approval.") and not (event.kind == "approval.asked" and event.subject in shown):
            if front.json:
                print_json(event)
            else:
                _tell(front, event.kind, front.client.approvals.get(event.subject))
        event = events.get()


def _read(front: Front, events: "queue.SimpleQueue[ServiceEvent | HatchwayError]") -> None:
    from hatchway.client import HatchwayError

    try:
        for event in front.client.events():
            events.put(event)
    except HatchwayError as error:
        events.put(error)


@with_front
def allow(
    front: Front,
    approval: Id,
    session: Annotated[
        bool,
        typer.Option("--session", help="Also what has the same key, until the sandbox stops or its policy changes."),
    ] = False,
    ttl: Annotated[
        float | None, typer.Option("--ttl", min=1, metavar="SECONDS", help="Also what has the same key, for so long.")
    ] = None,
    note: Note = "",
) -> None:
    """Let it go on, this once unless it is said otherwise."""
    if session and ttl is not None:
        raise typer.BadParameter("give one of both", param_hint="--session/--ttl")
    scope = "session" if session else "once" if ttl is None else "ttl"
    _done(front, front.client.approvals.allow(approval, scope=scope, ttl=ttl, note=note))


@with_front
def deny(front: Front, approval: Id, note: Note = "") -> None:
    """Refuse it."""
    _done(front, front.client.approvals.deny(approval, note=note))


def _done(front: Front, approval: "Approval") -> None:
    from .front import note
    from .output import print_json

    if front.json:
        print_json(approval)
        return
    print(f"{approval.id}  {approval.state}")
    if not approval.delivered:
        note("its node does not have the answer yet; it is sent again")


def _tell(front: Front, kind: str, approval: "Approval") -> None:
    from .output import print_json, when

    if front.json:
        print_json({"kind": kind, "subject": approval.id, "data": approval})
        return
    rest = (
        f"until {when(approval.expires_at)}"
        if approval.state == "pending"
        else f"{approval.state} {approval.approver or approval.why or ''}"
    )
    print(harmless(f"{approval.id}  {kind}  {approval.sandbox_id}  {_what(approval)}  {rest}"), flush=True)


def _what(approval: "Approval") -> str:
    """What is asked for, in a line. A sandbox chose parts of it."""
    asked = approval.request
    if approval.kind == "operation":
        return harmless(f"{asked.get('verb', '')} of the sandbox")
    where = f"{asked.get('host', '')}:{asked.get('port', '')}{asked.get('path', '')}"
    return harmless(f"{asked.get('method') or asked.get('protocol', '')} {where} ({asked.get('rule', '')})")


def _plain(value: object) -> object:
    return harmless(value) if isinstance(value, str) else value
