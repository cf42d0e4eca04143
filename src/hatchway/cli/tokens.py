"""The commands `tokens`: the right to use one sandbox on the data plane without a key."""

from typing import TYPE_CHECKING, Annotated, cast

import typer

from .front import Front
from .options import SandboxId
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client.reach import Scope


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    tokens = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
    tokens.command("ls")(ls)
    tokens.command("create")(create)
    tokens.command("revoke")(revoke)
    app.add_typer(tokens, name="tokens", help="Make, list and revoke tokens of sandboxes.")


@with_front
def ls(front: Front, sandbox: SandboxId) -> None:
    """List the tokens of a sandbox that are good now, without the tokens themselves."""
    from .output import print_json, print_table, when

    found = list(front.client.tokens.list(sandbox))
    if front.json:
        print_json(found)
        return
    rows = [(one.id, ", ".join(one.scopes), one.key_id, when(one.created_at), when(one.expires_at)) for one in found]
    print_table(("TOKEN", "SCOPES", "KEY", "CREATED", "EXPIRES"), rows)


@with_front
def create(
    front: Front,
    sandbox: SandboxId,
    scope: Annotated[
        list[str], typer.Option("--scope", metavar="files|ports|sessions", help="Repeatable.", show_default=False)
    ],
    ttl: Annotated[float, typer.Option("--ttl", min=1, max=86_400, help="Seconds that it is good for.")] = 3600.0,
) -> None:
    """Make a token of a sandbox and print it; it is shown this once."""
    from .output import print_json

    made = front.client.sandboxes.get(sandbox).token(cast("list[Scope]", scope), ttl=ttl)
    if front.json:
        print_json(made)
    else:
        print(made.token)


@with_front
def revoke(
    front: Front,
    tokens: Annotated[
        list[str] | None, typer.Argument(metavar="[TOKEN...]", help="Ids of tokens.", show_default=False)
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option("--sandbox", metavar="ID", help="All of this sandbox, of its sessions too.", show_default=False),
    ] = None,
) -> None:
    """Revoke tokens; what was opened with them ends at once."""
    if not tokens and sandbox is None:
        raise typer.BadParameter("name tokens, or a sandbox with --sandbox")
    for token in tokens or ():
        front.client.tokens.revoke(token)
    if sandbox is not None:
        front.client.tokens.revoke_all(sandbox)
