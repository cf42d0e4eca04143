"""Commands that run the service itself: `up`, `down`, `doctor`, `bench`, `chaos`, `redteam`. With `keys` and `journal`, the only ones that reach the supervisor."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from .front import FAILED, Finished, note, show

if TYPE_CHECKING:
    from hatchway.domain.vmm_policy import DriverName
    from hatchway.supervisor.settings import Profile, Settings

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Where everything lies. Default: HATCHWAY_DATA_DIR, else the user's own.", show_default=False
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Settings file. Default: HATCHWAY_CONFIG, else hatchway.toml in the data folder.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("doctor")(doctor)
    app.command("backup")(backup)
    app.command("bench")(bench)
    app.command("chaos")(chaos)
    app.command("redteam")(redteam)


def up(
    data_dir: DataDir = None,
    config: Config = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="development: loopback, with a key made for you; production: nothing weaker than it should be.",
            show_default="development",
        ),
    ] = None,
    allow_emulated: Annotated[
        bool | None,
        typer.Option(
            "--allow-emulated", help="In production: start also where sandboxes have software emulation for a boundary."
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the service is ready.")] = False,
    api_host: Annotated[
        str | None, typer.Option("--api-host", help="Address of the API.", show_default="127.0.0.1")
    ] = None,
    api_port: Annotated[
        int | None,
        typer.Option("--api-port", min=0, max=65535, help="Port of the API; 0: any.", show_default="7070"),
    ] = None,
    data_host: Annotated[
        str | None, typer.Option("--data-host", help="Address of the data plane.", show_default="127.0.0.1")
    ] = None,
    data_port: Annotated[
        int | None,
        typer.Option("--data-port", min=0, max=65535, help="Port of the data plane; 0: any.", show_default="7071"),
    ] = None,
    e2b: Annotated[
        bool | None, typer.Option("--e2b/--no-e2b", help="Serve the API of E2B too.", show_default="e2b")
    ] = None,
    e2b_host: Annotated[
        str | None, typer.Option("--e2b-host", help="Address of the API of E2B.", show_default="127.0.0.1")
    ] = None,
    e2b_port: Annotated[
        int | None,
        typer.Option(
            "--e2b-port",
            min=0,
            max=65535,
            help="Port of the API of E2B; 0: any.",
            show_default="7080; with --api-port 0: any",
        ),
    ] = None,
    e2b_domain: Annotated[
        str | None,
        typer.Option(
            "--e2b-domain",
            help="Ports of E2B's sandboxes have names under it, PORT-ID.DOMAIN; with :PORT where that is not 443.",
            show_default="none",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            "--database-url",
            help="PostgreSQL database, without a password in it: postgresql://user@host/database.",
            show_default="a file in the data folder",
        ),
    ] = None,
    bake: Annotated[
        bool | None,
        typer.Option(
            "--bake/--no-bake",
            help="Prepare the default shape at start, so that the first creation is fast.",
            show_default="bake",
        ),
    ] = None,
    vmm: Annotated[
        str | None,
        typer.Option(
            "--vmm",
            help="Machine monitor: auto, qemu or firecracker. `doctor` says which and why.",
            show_default="auto",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start the service."""
    from hatchway.supervisor import commands, configuration

    if vmm not in (None, "auto", "qemu", "firecracker"):
        raise typer.BadParameter("is auto, qemu or firecracker", param_hint="--vmm")
    if profile not in (None, "development", "production"):
        raise typer.BadParameter("is development or production", param_hint="--profile")

    def body() -> int:
        settings = configuration.settings(
            data_folder(data_dir),
            config,
            profile=cast("Profile | None", profile),
            allow_emulated=allow_emulated,
            api_host=api_host,
            api_port=api_port,
            data_host=data_host,
            data_port=data_port,
            e2b=e2b,
            e2b_host=e2b_host,
            e2b_port=e2b_port,
            e2b_domain=e2b_domain,
            database_url=database_url,
            bake=bake,
            vmm=cast("DriverName | None", vmm),
        )
        return commands.up(settings, detach=detach, as_json=json)

    finish(body, json)


def down(
    data_dir: DataDir = None,
    config: Config = None,
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="End only the service; the next `up` finds its sandboxes running.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop the service and power its sandboxes off; their disks stay."""
    from hatchway.supervisor import commands

    finish(lambda: commands.down(_settings_to_end(data_dir, config), keep_sandboxes=keep_sandboxes), json)


def doctor(data_dir: DataDir = None, config: Config = None, json: Json = False) -> None:
    """Show what this machine offers, what is missing, and what to do about it."""
    from hatchway.supervisor import commands

    finish(lambda: commands.doctor(_settings(data_dir, config), as_json=json), json)


def backup(
    file: Annotated[
        Path, typer.Argument(help="The copy: a new file, or with --restore the one to take.", show_default=False)
    ],
    restore: Annotated[
        bool, typer.Option("--restore", help="Take the copy for the database of a service that is down.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Copy the database into a file, beside the running service; or put a copy back."""
    from hatchway.supervisor import backup as copies

    def body() -> int:
        settings = _settings(data_dir, config)
        (copies.put_back if restore else copies.make)(settings, file.absolute())
        return 0

    finish(body, json)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[floor|create|pools|exec|idle|stream|files|slots|density|lifecycle|fork|concurrency|hostile|neighbour|fair|policy|egress|recovery|e2b]...",
            help="Default: all.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, max=1000, help="Counted runs of each.")] = 20,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Measure the running service against the bare VMM of this machine, in the same run."""
    from hatchway.bench.commands import run

    finish(lambda: run(names or [], data_folder(data_dir), runs=runs, as_json=json), json)


def chaos(
    kills: Annotated[int, typer.Option("--kills", min=1, max=100_000, help="How many processes are killed.")] = 300,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="ROLE,...",
            help="Of control, node, launcher, audit, broker, egress-0 and e2b; default: all.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Walk as an earlier run did.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Kill processes of the running service at random, and compare what it shows with what must be. Other sandboxes are left alone."""
    from hatchway.chaos.commands import run

    roles = [] if only is None else [role.strip() for role in only.split(",")]
    finish(lambda: run(data_folder(data_dir), kills=kills, only=roles, seed=seed, as_json=json), json)


def redteam(
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="ID,...", help="Attacks, or all whose ids begin so: H08, H. Default: all."),
    ] = None,
    condition: Annotated[
        list[str] | None, typer.Option("--condition", help="blocked, index, source; may be repeated. Default: all.")
    ] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Make the attacks where nothing is defended: each has to arrive. Needs no service."
        ),
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the attacks, and do nothing.")] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Attack the running service from within sandboxes of its own, towards an internet of its own: what arrives there is told. As root."""
    from hatchway.redteam.commands import run, show_list

    if listing:
        show_list(as_json=json)
        return
    finish(
        lambda: run(data_folder(data_dir), only=only or "", conditions=condition or [], prove=prove, as_json=json), json
    )


def _settings(data_dir: Path | None, config: Path | None) -> "Settings":
    from hatchway.supervisor import configuration

    return configuration.settings(data_folder(data_dir), config)


def _settings_to_end(data_dir: Path | None, config: Path | None) -> "Settings":
    """The settings of a service that is to be ended: a mistake in their file must not keep it up."""
    from hatchway.domain.errors import HatchwayError
    from hatchway.supervisor.settings import Settings

    try:
        return _settings(data_dir, config)
    except HatchwayError as error:
        note(f"the settings are left aside: {error.cause}")
        return Settings(data_dir=data_folder(data_dir))


def data_folder(data_dir: Path | None) -> Path:
    """The data folder that is meant."""
    from hatchway.supervisor.settings import default_data_dir

    return (data_dir or default_data_dir()).absolute()


def finish(body: Callable[[], int], json: bool) -> None:
    """Ends with the status of `body`, or shows its error."""
    from hatchway.domain.errors import HatchwayError

    try:
        status = body()
    except HatchwayError as error:
        show(error.as_dict(), json)
        status = FAILED
    raise Finished(status)
