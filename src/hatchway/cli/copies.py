"""Commands about what is kept of sandboxes and made from them: `fork snapshot snapshots rollback`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .options import Env, Metadata, SandboxId, pairs
from .shared import with_front

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hatchway.client import Snapshot

Kind = Annotated[str, typer.Option("--kind", metavar="full|disk", help="With memory, or the disk alone.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("fork")(fork)
    app.command("snapshot")(snapshot)
    app.command("rollback")(rollback)
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(default)
    group.command("ls")(ls)
    group.command("list", hidden=True)(ls)
    group.command("get")(get)
    group.command("rm")(rm)
    app.add_typer(group, name="snapshots", help="List, show and delete snapshots.")


@with_front
def fork(
    front: Front,
    sandbox: SandboxId,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many branches, 1 to 100.")] = 1,
    name: Annotated[str | None, typer.Option("--name", help="Name of each.", show_default=False)] = None,
    metadata: Metadata = None,
    env: Env = None,
) -> None:
    """Branch new sandboxes off, which go on from where this one stands; it runs on.

    Metadata and environment are its own, unless they are given: then those alone.
    """
    from .output import print_json

    source = front.client.sandboxes.get(sandbox)
    made = source.fork(
        count, name=name, metadata=pairs(metadata, "--metadata") or None, env=pairs(env, "--env") or None
    )
    if front.json:
        print_json([branch.info for branch in made])
    else:
        for branch in made:
            print(branch.id)


@with_front
def snapshot(
    front: Front,
    sandbox: SandboxId,
    kind: Kind = "full",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="A name for it.", show_default=False)
    ] = None,
) -> None:
    """Keep a sandbox as it is now."""
    from .output import print_json

    made = front.client.sandboxes.get(sandbox).snapshot(kind, name=name)
    if front.json:
        print_json(made)
    else:
        print(made.id)


@with_front
def rollback(
    front: Front,
    sandbox: SandboxId,
    snapshot_id: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="Id of one of its snapshots.", show_default=False)
    ],
) -> None:
    """Go back to a snapshot: a full one runs on from there, a disk one is stopped."""
    from .output import print_json

    operation = front.client.sandboxes.get(sandbox).rollback(snapshot_id)
    if front.json:
        print_json(operation)
    else:
        print(f"{operation.target}  {operation.kind} {operation.status}")


@with_front
def default(front: Front, context: typer.Context) -> None:
    """List the snapshots of the project; or delete some."""
    if context.invoked_subcommand is None:
        _show(front, front.client.snapshots.list())


@with_front
def ls(
    front: Front,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", metavar="ID", help="Of this sandbox.", show_default=False)
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="full|disk", help="Of this kind.", show_default=False)
    ] = None,
) -> None:
    """List snapshots, newest first."""
    _show(front, front.client.snapshots.list(sandbox=sandbox, kind=kind))


@with_front
def get(
    front: Front,
    snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Id of the snapshot.", show_default=False)],
) -> None:
    """Show one snapshot."""
    from .output import print_fields, print_json

    found = front.client.snapshots.get(snapshot_id)
    if front.json:
        print_json(found)
    else:
        print_fields(found.as_dict())


@with_front
def rm(
    front: Front,
    snapshots: Annotated[
        list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids of snapshots.", show_default=False)
    ],
) -> None:
    """Delete snapshots."""
    from .output import print_json

    gone = [front.client.snapshots.delete(snapshot_id) for snapshot_id in snapshots]
    if front.json:
        print_json(gone)
        return
    for deleted in gone:
        print(f"{deleted.id}  {deleted.state}")


def _show(front: Front, snapshots: "Iterator[Snapshot]") -> None:
    from .output import print_json, print_table, when

    found = list(snapshots)
    if front.json:
        print_json(found)
    else:
        rows = [
            (
                one.id,
                one.kind,
                one.state,
                one.sandbox_id,
                one.name,
                "yes" if one.scheduled else "",
                when(one.created_at),
            )
            for one in found
        ]
        print_table(("SNAPSHOT", "KIND", "STATE", "SANDBOX", "NAME", "SCHEDULED", "CREATED"), rows)
