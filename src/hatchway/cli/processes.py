"""Commands about commands: `run`, `exec`, `sessions`, `logs`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .front import Front, with_front, with_front_passing_on
from .options import Argv, Disk, Env, Memory, Name, SandboxId, SessionId, Template, Vcpus, pairs

Workdir = Annotated[str | None, typer.Option("--workdir", "-w", help="Working directory of the command.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="User that the command runs as.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0.001, help="Seconds after which the command is killed (status 124).")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show how long each phase took.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    # What stands behind the first word of the command is the command's, whatever it looks like.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)
    app.command("exec")(exec_)
    app.command("sessions")(sessions)
    app.command("logs")(logs)


@with_front_passing_on
def run(
    front: Front,
    argv: Argv,
    template: Template = "seed:latest",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sandbox at the end.")] = False,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", metavar="DIR", help="First copy the content of a folder into the working directory."),
    ] = None,
    workdir: Workdir = None,
    env: Env = None,
    user: User = None,
    timeout: Timeout = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Disk = None,
    name: Name = None,
    verbose: Verbose = False,
) -> int:
    """Run a command in a new sandbox, which is deleted at the end.

    Input, output and exit status are the command's. Status 124: timeout; 125: Hatchway failed; 128 + N: killed by signal N.
    Ctrl-C goes to the command; twice within 2 s it ends everything.
    """
    variables = _environment(env)
    from .running import Command, Machine, run_in_new

    machine = Machine(template, name, vcpus, memory, disk)
    command = Command(argv, variables, workdir, user, timeout)
    return run_in_new(front, machine, command, copy=copy, keep=keep, verbose=verbose)


@with_front_passing_on
def exec_(
    front: Front,
    sandbox: SandboxId,
    argv: Argv,
    workdir: Workdir = None,
    env: Env = None,
    user: User = None,
    timeout: Timeout = None,
    verbose: Verbose = False,
) -> int:
    """Run a command in a sandbox that is there.

    Input, output and exit status are the command's. Status 124: timeout; 125: Hatchway failed; 128 + N: killed by signal N.
    """
    variables = _environment(env)
    from .running import Command, run_in_old

    command = Command(argv, variables, workdir, user, timeout)
    return run_in_old(front, sandbox, command, verbose=verbose)


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

    With --json its events, one a line. Output of more than one kind comes in the order in which it is kept.
    """
    from .logs import show_logs

    show_logs(front, session, follow=follow)


def _environment(texts: list[str] | None) -> dict[str, str]:
    full = [text if "=" in text or text not in os.environ else f"{text}={os.environ[text]}" for text in texts or ()]
    return pairs(full, "--env")
