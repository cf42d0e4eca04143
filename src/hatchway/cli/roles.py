"""Commands that run the service itself: `up`, `down`, `doctor`. The only module here that reaches the supervisor."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .front import FAILED, Finished, show

if TYPE_CHECKING:
    from hatchway.supervisor.settings import Settings

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Where everything lies. Default: HATCHWAY_DATA_DIR, else the user's own.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("doctor")(doctor)
    app.command("bench")(bench)


def up(
    data_dir: DataDir = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the service is ready.")] = False,
    api_host: Annotated[str, typer.Option("--api-host", help="Address of the API.")] = "127.0.0.1",
    api_port: Annotated[int, typer.Option("--api-port", min=0, max=65535, help="Port of the API; 0: any.")] = 7070,
    data_host: Annotated[str, typer.Option("--data-host", help="Address of the data plane.")] = "127.0.0.1",
    data_port: Annotated[
        int, typer.Option("--data-port", min=0, max=65535, help="Port of the data plane; 0: any.")
    ] = 7071,
    bake: Annotated[
        bool,
        typer.Option(
            "--bake/--no-bake", help="Prepare the default shape at start, so that the first creation is fast."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Start the service."""
    from dataclasses import replace

    from hatchway.supervisor import commands

    settings = replace(
        _settings(data_dir), api_host=api_host, api_port=api_port, data_host=data_host, data_port=data_port, bake=bake
    )
    _finish(lambda: commands.up(settings, detach=detach, as_json=json), json)


def down(
    data_dir: DataDir = None,
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="End only the service; the next `up` finds its sandboxes running.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop the service and power its sandboxes off; their disks stay."""
    from hatchway.supervisor import commands

    _finish(lambda: commands.down(_settings(data_dir), keep_sandboxes=keep_sandboxes), json)


def doctor(data_dir: DataDir = None, json: Json = False) -> None:
    """Show what this machine offers, what is missing, and what to do about it."""
    from hatchway.supervisor import commands

    _finish(lambda: commands.doctor(_settings(data_dir), as_json=json), json)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[floor|create|exec|idle]...", help="Default: all.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=3, max=1000, help="Counted runs of each.")] = 20,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Measure the running service against the bare VMM of this machine, in the same run."""
    from hatchway.bench.commands import run

    _finish(lambda: run(names or [], _settings(data_dir).data_dir, runs=runs, as_json=json), json)


def _settings(data_dir: Path | None) -> "Settings":
    from hatchway.supervisor.settings import Settings, default_data_dir

    return Settings(data_dir=(data_dir or default_data_dir()).absolute())


def _finish(body: Callable[[], int], json: bool) -> None:
    """Ends with the status of `body`, or shows its error."""
    from hatchway.domain.errors import HatchwayError

    try:
        status = body()
    except HatchwayError as error:
        show(error.as_dict(), json)
        status = FAILED
    raise Finished(status)
