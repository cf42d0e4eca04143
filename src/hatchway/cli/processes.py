"""Commands about commands: `sessions`, `logs`, `kill`; and the places of `run` and `exec`, whose calls `passing` reads."""

from collections.abc import Callable
from typing import Annotated

import typer

from . import passing
from .front import Front
from .options import SandboxId, SessionId
from .shared import with_front


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    for name, summary in passing.SUMMARIES.items():
        as_it_is = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
        app.command(name, context_settings=as_it_is, help=summary)(_passing_on(name))
    app.command("sessions")(sessions)
    app.command("logs")(logs)
    app.command("kill")(kill)


def _passing_on(name: str) -> Callable[..., None]:
    def command(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        passing.main(name, words or [])

    return command


@with_front
def sessions(front: Front, sandbox: SandboxId) -> None:
    """List the commands of a sandbox."""
    from .output import print_json, print_table, when

    found = list(front.client.sandboxes.get(sandbox).sessions())
    if front.json:
        print_json(found)
        return
    rows = [
        (
            session.id,
            session.process_id,
            session.state,
            session.exit.status if session.exit else None,
            when(session.started_at),
            " ".join(session.argv or ()),
        )
        for session in found
    ]
    print_table(("SESSION", "PROCESS", "STATE", "STATUS", "STARTED", "COMMAND"), rows)


@with_front
def logs(
    front: Front,
    session: SessionId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the command has ended.")] = False,
) -> None:
    """Show what a command has written.

    With --json its events, one a line. A command that was not started yet is not started by this.
    """
    from .logs import show_logs

    show_logs(front, session, follow=follow)


@with_front
def kill(
    front: Front,
    sessions: Annotated[list[str], typer.Argument(metavar="SESSION...", help="Ids of sessions.", show_default=False)],
) -> None:
    """Kill commands with all that they started, and drop what is kept of their output."""
    for session in sessions:
        front.client.sessions.get(session).delete()
