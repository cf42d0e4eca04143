"""The commands `credentials`: secrets for the requests of sandboxes. A value is read from standard input or typed, never taken from the command line."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import Credential

_VAULT = re.compile(r"(?P<server>[^:]+):(?P<mount>[^:]+):(?P<path>[^#]+)#(?P<field>.+)")

Name = Annotated[str, typer.Argument(help="Its name, such as github/bot.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    credentials = typer.Typer(rich_markup_mode=None)
    credentials.callback(invoke_without_command=True)(default)
    credentials.command("ls")(ls)
    credentials.command("list", hidden=True)(ls)
    credentials.command("put")(put)
    credentials.command("show")(show)
    credentials.command("check")(check)
    credentials.command("rm")(rm)
    credentials.command("rotate")(rotate)
    app.add_typer(credentials, name="credentials", help="Keep secrets for the requests of sandboxes.")


@with_front
def default(front: Front, context: typer.Context) -> None:
    """List the credentials, without their values; or keep, check and forget them."""
    if context.invoked_subcommand is None:
        _list(front)


@with_front
def ls(front: Front) -> None:
    """List the credentials, without their values."""
    _list(front)


@with_front
def put(
    front: Front,
    name: Name,
    host: Annotated[
        list[str],
        typer.Option("--host", metavar="HOST", help="A host that it may be sent to; repeated.", show_default=False),
    ],
    from_stdin: Annotated[
        bool,
        typer.Option("--from-stdin", help="Read the value from standard input. Without any source it is asked for."),
    ] = False,
    env: Annotated[
        str | None, typer.Option("--env", metavar="VARIABLE", help="From a variable of the broker.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="NAME", help="From a file in the broker's folder.", show_default=False),
    ] = None,
    vault: Annotated[
        str | None,
        typer.Option("--vault", metavar="SERVER:MOUNT:PATH#FIELD", help="From a HashiCorp Vault.", show_default=False),
    ] = None,
) -> None:
    """Keep a credential, or change one. It goes to the named hosts alone, whatever a policy says."""
    if from_stdin + (env is not None) + (file is not None) + (vault is not None) > 1:
        raise typer.BadParameter("a credential has one source", param_hint="--from-stdin/--env/--file/--vault")
    where = None
    if vault is not None:
        match = _VAULT.fullmatch(vault)
        if match is None:
            raise typer.BadParameter("write SERVER:MOUNT:PATH#FIELD", param_hint="--vault")
        where = match.groupdict()
    value = _value(from_stdin) if env is None and file is None and vault is None else None
    made = front.client.credentials.put(name, host, value=value, variable=env, file=file, vault=where)
    _show(front, made)


@with_front
def show(front: Front, name: Name) -> None:
    """Show a credential, without its value."""
    _show(front, front.client.credentials.get(name))


@with_front
def check(front: Front, name: Name) -> int | None:
    """Tell whether the value of a credential can be had now."""
    found = front.client.credentials.get(name, check=True)
    _show(front, found)
    return None if found.available else 1


@with_front
def rm(front: Front, name: Name) -> None:
    """Forget a credential; connections that use it are cut."""
    front.client.credentials.delete(name)


@with_front
def rotate(front: Front) -> None:
    """Make a new master key and seal all stored values with it; the old key is gone then."""
    from .output import print_fields, print_json

    made = front.client.credentials.rotate_key()
    if front.json:
        print_json(made)
    else:
        print_fields(made.as_dict())


def _value(from_stdin: bool) -> str:
    import sys

    if not from_stdin:
        if not sys.stdin.isatty():
            raise typer.BadParameter("say where the value comes from", param_hint="--from-stdin/--env/--file/--vault")
        import getpass

        return getpass.getpass("Value (not shown): ")
    octets = sys.stdin.buffer.read(65_536)
    try:
        return octets.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        raise typer.BadParameter("what came is not text", param_hint="--from-stdin") from None


def _list(front: Front) -> None:
    from .output import print_json, print_table, when

    found = list(front.client.credentials.list())
    if front.json:
        print_json(found)
        return
    rows = [(one.name, _source(one), ", ".join(one.hosts), _version(one), when(one.updated_at)) for one in found]
    print_table(("CREDENTIAL", "SOURCE", "HOSTS", "VERSION", "UPDATED"), rows)


def _version(one: "Credential") -> str:
    return str(one.version) if one.state == "ready" else f"{one.version} ({one.state})"


def _source(one: "Credential") -> str:
    """Where it comes from, in one word or two."""
    kind = str(one.source.get("kind", ""))
    if kind == "vault":
        return "vault {server}:{mount}:{path}#{field}".format(**one.source)
    return " ".join([kind, *(str(one.source[key]) for key in ("variable", "file") if one.source.get(key))])


def _show(front: Front, one: "Credential") -> None:
    from .output import print_fields, print_json

    if front.json:
        print_json(one)
    else:
        print_fields(one.as_dict())
