"""The commands `keys`: who may call. Over the API, or with `--offline` in the data folder of a service that is down."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .front import FAILED, Finished, Front, show
from .shared import with_front

if TYPE_CHECKING:
    from collections.abc import Callable

    from hatchway.supervisor.settings import Settings

Offline = Annotated[
    bool, typer.Option("--offline", help="In the data folder itself, while the service is down; needs no key.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="With --offline: the data folder.", show_default=False)
]

Project = Annotated[
    str | None,
    typer.Option("--project", help="Of this project; needs the scope installation.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    keys = typer.Typer(rich_markup_mode=None)
    keys.callback(invoke_without_command=True)(default)
    keys.command("list")(list_)
    keys.command("show")(show_one)
    keys.command("create")(create)
    keys.command("rotate")(rotate)
    keys.command("revoke")(revoke)
    keys.command("rm", hidden=True)(revoke)
    app.add_typer(keys, name="keys", help="Make, list, rotate and revoke API keys.")


@with_front
def default(front: Front, context: typer.Context) -> None:
    """List the API keys, without their secrets; or make and revoke them."""
    if context.invoked_subcommand is None:
        _show(front, [key.as_dict() for key in front.client.keys.list()])


@with_front
def list_(front: Front, project: Project = None, offline: Offline = False, data_dir: DataDir = None) -> None:
    """List the API keys, without their secrets."""
    _require_online(project, offline)
    if offline:
        from hatchway.supervisor import offline as at_rest

        _show(front, _at_rest(front, lambda: at_rest.list_keys(_settings(data_dir))))
    else:
        _show(front, [key.as_dict() for key in front.client.keys.list(project)])


@with_front
def show_one(
    front: Front,
    key_id: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Its id; without one, the key that asks.", show_default=False)
    ] = None,
) -> None:
    """Show one API key, without its secret."""
    from .output import print_fields, print_json

    found = front.client.keys.own() if key_id is None else front.client.keys.get(key_id)
    if front.json:
        print_json(found)
    else:
        print_fields(found.as_dict())


@with_front
def create(
    front: Front,
    name: Annotated[str, typer.Argument(help="What it is for.", show_default=False)],
    expires_in: Annotated[
        float | None, typer.Option("--expires-in", min=1, metavar="SECONDS", help="How long it is valid.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            help="read, exec, write, admin or installation; repeated. Default: read and write.",
            show_default=False,
        ),
    ] = None,
    e2b: Annotated[
        bool,
        typer.Option("--e2b", help="In the form that SDKs of E2B send, for either API: e2b_ and hexadecimal digits."),
    ] = False,
    project: Project = None,
    offline: Offline = False,
    data_dir: DataDir = None,
) -> None:
    """Make an API key and print it; it is shown this once."""
    _require_online(project, offline)
    if offline:
        from hatchway.supervisor import offline as at_rest

        scopes = scope or ["read", "write"]
        made = _at_rest(front, lambda: at_rest.create_key(_settings(data_dir), name, scopes, expires_in, e2b=e2b))
    else:
        made = front.client.keys.create(name, scopes=scope, expires_in=expires_in, project=project, e2b=e2b).as_dict()
    _print_new(front, made)


@with_front
def rotate(
    front: Front,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key.", show_default=False)],
    overlap: Annotated[
        float, typer.Option("--overlap", min=0, metavar="SECONDS", help="How long the old key goes on. Default: not.")
    ] = 0.0,
) -> None:
    """Make an API key in the place of another and print it; it is shown this once."""
    _print_new(front, front.client.keys.rotate(key_id, overlap=overlap).as_dict())


@with_front
def revoke(
    front: Front,
    key_id: Annotated[str | None, typer.Argument(metavar="[KEY]", help="Id of the key.", show_default=False)] = None,
    development: Annotated[
        bool, typer.Option("--development", help="With --offline: every key that was made for development.")
    ] = False,
    offline: Offline = False,
    data_dir: DataDir = None,
) -> None:
    """Revoke an API key: it stops working at once, and with it its event streams and tokens."""
    if development == (key_id is not None) or (development and not offline):
        raise typer.BadParameter("give the id of a key, or --development with --offline", param_hint="KEY")
    if not offline:
        front.client.keys.delete(key_id or "")
        return
    from hatchway.supervisor import offline as at_rest

    if development:
        revoked = _at_rest(front, lambda: at_rest.revoke_development_keys(_settings(data_dir)))
        for one in revoked:
            print(one)
    else:
        _at_rest(front, lambda: at_rest.revoke_key(_settings(data_dir), key_id or ""))


def _print_new(front: Front, made: dict[str, Any]) -> None:
    from .output import print_json

    if front.json:
        print_json(made)
    else:
        print(made["key"])


def _require_online(project: str | None, offline: bool) -> None:
    if project is not None and offline:
        raise typer.BadParameter("what is done offline is done in the project `default`", param_hint="--project")


def _show(front: Front, keys: list[dict[str, Any]]) -> None:
    from .output import print_json, print_table, when

    if front.json:
        print_json(keys)
        return
    rows = [
        (
            key["id"],
            key["name"],
            key["prefix"],
            ", ".join(key["scopes"]),
            when(key["created_at"]),
            when(key["expires_at"]),
            when(key["last_used_at"]),
        )
        for key in keys
    ]
    print_table(("KEY", "NAME", "BEGINS", "SCOPES", "CREATED", "EXPIRES", "LAST USED"), rows)


def _settings(data_dir: Path | None) -> "Settings":
    from hatchway.supervisor import configuration
    from hatchway.supervisor.settings import default_data_dir

    return configuration.settings((data_dir or default_data_dir()).absolute())


def _at_rest(front: Front, body: "Callable[[], Any]") -> Any:
    """Runs work on the data folder; its errors end the command like those of the service."""
    from hatchway.domain.errors import HatchwayError

    try:
        return body()
    except HatchwayError as error:
        show(error.as_dict(), front.json)
        raise Finished(FAILED) from None
