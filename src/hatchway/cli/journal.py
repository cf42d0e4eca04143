"""`hatchway journal`: what the service itself has written down, of all its processes."""

import contextlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .roles import DataDir, Json, data_folder, finish

_POLL_S = 0.5
_BESIDE = ("timestamp", "role", "level", "logger", "event", "exception", "project")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("journal")(journal)


def journal(
    role: Annotated[
        list[str] | None, typer.Option("--role", help="supervisor, launcher, node or control; repeatable.")
    ] = None,
    level: Annotated[str, typer.Option("--level", help="debug, info, warning or error, and what is worse.")] = "debug",
    request: Annotated[str | None, typer.Option("--request", help="Only what one request of the API led to.")] = None,
    operation: Annotated[str | None, typer.Option("--operation", help="Only what belongs to one operation.")] = None,
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="Only what belongs to one sandbox.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="How many of the last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what comes.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show what the service has written down, of all its processes in the order of time."""
    from hatchway.supervisor.journal import LEVELS, ROLES, Wanted

    if not set(role or ()) <= set(ROLES):
        raise typer.BadParameter(f"give one of {', '.join(ROLES)}", param_hint="--role")
    if level not in LEVELS:
        raise typer.BadParameter(f"give one of {', '.join(LEVELS)}", param_hint="--level")
    given = {"request_id": request, "operation_id": operation, "sandbox_id": sandbox}
    members = {name: value for name, value in given.items() if value is not None}
    wanted = Wanted(roles=tuple(role or ROLES), level=level, members=members)
    finish(lambda: _show(data_folder(data_dir), wanted, lines, follow, json), json)


def _show(data_dir: Path, wanted: Any, count: int, follow: bool, json: bool) -> int:
    from hatchway.supervisor import journal as files
    from hatchway.supervisor.settings import Settings

    settings = Settings(data_dir=data_dir)
    try:
        with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
            tails = []
            for role in wanted.roles if follow else ():
                with contextlib.suppress(FileNotFoundError):
                    path = files.files(settings, role)[-1]
                    tails.append(stack.enter_context(files.Tail(path, role, from_start=False)))
            for line in files.last(settings, wanted, count):
                _print(line, json)
            while follow:
                for tail in tails:
                    for line in tail.read():
                        if wanted.fits(line):
                            _print(line, json)
                time.sleep(_POLL_S)
    except PermissionError as error:
        from .front import show

        remedy = "Run it as the user that the service runs as."
        show({"code": "not_readable", "cause": f"{error.filename} cannot be read.", "remedy": remedy}, json)
        return 1
    return 0


def _print(line: dict[str, Any], json: bool) -> None:
    if json:
        from .output import print_json

        print_json(line)
        return
    more = " ".join(
        f"{name}={value}" for name, value in line.items() if name not in _BESIDE and value not in (None, "")
    )
    head = f"{line.get('timestamp', '')[:23]:23} {line['role']:10} {line.get('level', ''):8}"
    print(_plain(f"{head} {line.get('event', '')}  {more}".rstrip()), flush=True)
    for part in str(line.get("exception", "")).splitlines():
        print(_plain(f"    {part}"), flush=True)


def _plain(text: str) -> str:
    """What somebody wrote into a line must not steer the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
