"""The commands `pools`: sandboxes that are made ahead, so that a creation has only to claim one."""

from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .options import Disk, Memory, Template, Vcpus
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import Pool

Name = Annotated[str, typer.Argument(metavar="POOL", help="Its name.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    pools = typer.Typer(rich_markup_mode=None)
    pools.callback(invoke_without_command=True)(default)
    pools.command("ls")(ls)
    pools.command("get")(get)
    pools.command("put")(put)
    pools.command("rm")(rm)
    app.add_typer(pools, name="pools", help="Keep sandboxes ready.")


@with_front
def default(front: Front, context: typer.Context) -> None:
    """List the pools of the project; or make, change and delete them."""
    if context.invoked_subcommand is None:
        _list(front)


@with_front
def ls(front: Front) -> None:
    """List the pools of the project."""
    _list(front)


@with_front
def get(front: Front, name: Name) -> None:
    """Show a pool: what it holds, how many are ready, and what keeps it from being full."""
    _show(front, front.client.pools.get(name))


@with_front
def put(
    front: Front,
    name: Name,
    size: Annotated[int, typer.Option("--size", "-n", metavar="N", help="How many it shall hold.", show_default=False)],
    template: Template = "seed:latest",
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Disk = None,
) -> None:
    """Make a pool, or change it: all of it is said anew. Members that do not fit any more are replaced."""
    made = front.client.pools.put(name, template, size, vcpus=vcpus, memory_mib=memory, disk_mib=disk)
    _show(front, made)


@with_front
def rm(
    front: Front,
    names: Annotated[list[str], typer.Argument(metavar="POOL...", help="Their names.", show_default=False)],
) -> None:
    """Let pools run dry; what was claimed of them stays."""
    from .output import print_json

    gone = [front.client.pools.delete(name) for name in names]
    if front.json:
        print_json(gone)
        return
    for pool in gone:
        print(f"{pool.name}  {pool.state}")


def _list(front: Front) -> None:
    from .output import print_json, print_table

    found = list(front.client.pools.list())
    if front.json:
        print_json(found)
        return
    rows = [
        (
            one.name,
            one.state,
            one.template,
            f"{one.vcpus} vCPU, {one.memory_mib} MiB",
            f"{one.ready} of {one.size}",
            one.condition,
        )
        for one in found
    ]
    print_table(("POOL", "STATE", "TEMPLATE", "SIZE", "READY", "CONDITION"), rows)


def _show(front: Front, pool: "Pool") -> None:
    from .output import print_fields, print_json

    if front.json:
        print_json(pool)
    else:
        print_fields(pool.as_dict())
