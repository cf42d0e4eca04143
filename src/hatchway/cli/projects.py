"""The commands `projects`: what keys and sandboxes belong to, and how much of it there may be."""

from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .shared import with_front

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hatchway.client import Project

QUOTAS = (
    "sandboxes",
    "running_vcpus",
    "running_memory_mib",
    "disk_mib",
    "snapshot_bytes",
    "sessions",
    "creates_per_minute",
)
CAPS = ("vcpus", "memory_mib", "disk_mib", "timeout_s", "suspended_s", "snapshot_s", "export_s")

Name = Annotated[str, typer.Argument(metavar="PROJECT", help="Its name.", show_default=False)]
Quota = Annotated[
    list[str] | None,
    typer.Option("--quota", metavar="NAME=N", help=f"A bound: {', '.join(QUOTAS)}. Repeated.", show_default=False),
]
Cap = Annotated[
    list[str] | None,
    typer.Option(
        "--cap", metavar="NAME=N", help=f"A bound of each sandbox: {', '.join(CAPS)}. Repeated.", show_default=False
    ),
]
Template = Annotated[
    list[str] | None,
    typer.Option("--template", help="A template that may be used; repeated. Default: all.", show_default=False),
]
Isolation = Annotated[
    str | None, typer.Option("--require-isolation", metavar="hardware|emulated", help="Of every sandbox.")
]
Approval = Annotated[
    list[str] | None,
    typer.Option(
        "--approval",
        metavar="VERB",
        help="delete, rollback or export waits for consent (`hatchway approvals`); repeated. `none` takes all away.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    projects = typer.Typer(rich_markup_mode=None)
    projects.callback(invoke_without_command=True)(default)
    projects.command("list")(list_)
    projects.command("show")(show)
    projects.command("create")(create)
    projects.command("set")(change)
    projects.command("delete")(delete)
    projects.command("rm", hidden=True)(delete)
    app.add_typer(projects, name="projects", help="Make, bound and delete projects.")


@with_front
def default(front: Front, context: typer.Context) -> None:
    """List the projects that the key can see; or make, bound and delete them."""
    if context.invoked_subcommand is None:
        _list(front)


@with_front
def list_(front: Front) -> None:
    """List the projects that the key can see."""
    _list(front)


@with_front
def show(front: Front, name: Name) -> None:
    """Show a project: what it may have, and what it has now."""
    _show(front, front.client.projects.get(name))


@with_front
def create(
    front: Front,
    name: Name,
    quota: Quota = None,
    cap: Cap = None,
    template: Template = None,
    require_isolation: Isolation = None,
    approval: Approval = None,
) -> None:
    """Make a project. `hatchway keys create --project` makes its keys."""
    made = front.client.projects.create(
        name,
        require_isolation=require_isolation,
        templates=template,
        quotas=_bounds(quota, QUOTAS, "--quota"),
        caps=_bounds(cap, CAPS, "--cap"),
        approvals=_verbs(approval),
    )
    _show(front, made)


@with_front
def change(
    front: Front,
    name: Name,
    quota: Quota = None,
    cap: Cap = None,
    template: Template = None,
    require_isolation: Isolation = None,
    approval: Approval = None,
) -> None:
    """Change what is given and leave the rest as it is. NAME= without a number takes a bound away."""
    client = front.client.projects
    before = client.get(name)
    changed = client.update(
        name,
        require_isolation=require_isolation,
        templates=template,
        quotas=None if quota is None else _bounds(quota, QUOTAS, "--quota", before.quotas),
        caps=None if cap is None else _bounds(cap, CAPS, "--cap", before.caps),
        approvals=_verbs(approval),
    )
    _show(front, changed)


@with_front
def delete(
    front: Front,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="With all that it holds.")] = False,
) -> None:
    """Delete a project; its keys end at once."""
    gone = front.client.projects.delete(name, force=force)
    if front.json:
        from .output import print_json

        print_json({"name": name, "state": "deleted" if gone else "deleting"})
    elif not gone:
        from .front import note

        note(f"{name} is being deleted; it is gone when `hatchway projects show {name}` does not know it any more")


def _bounds(
    given: list[str] | None, known: tuple[str, ...], option: str, before: "Mapping[str, float] | None" = None
) -> dict[str, int]:
    found = {name: int(number) for name, number in (before or {}).items()}
    for one in given or ():
        name, equals, number = one.partition("=")
        if name not in known or not equals or not (number == "" or (number.isascii() and number.isdigit())):
            raise typer.BadParameter(f"{one!r}: NAME=N, where NAME is one of {', '.join(known)}", param_hint=option)
        if number:
            found[name] = int(number)
        else:
            found.pop(name, None)
    return found


def _list(front: Front) -> None:
    from .output import print_json, print_table, when

    found = list(front.client.projects.list())
    if front.json:
        print_json(found)
        return
    rows = [
        (
            one.name,
            one.state,
            when(one.created_at),
            one.require_isolation,
            "all" if one.templates is None else ", ".join(one.templates),
            ", ".join(f"{name}={number}" for name, number in {**one.quotas, **_named(one.caps)}.items()),
        )
        for one in found
    ]
    print_table(("PROJECT", "STATE", "CREATED", "ISOLATION", "TEMPLATES", "BOUNDS"), rows)


def _verbs(given: list[str] | None) -> list[str] | None:
    return [] if given == ["none"] else given


def _named(caps: "Mapping[str, float]") -> dict[str, int]:
    return {f"cap.{name}": int(number) for name, number in caps.items()}


def _show(front: Front, project: "Project") -> None:
    from .output import print_fields, print_json, print_table

    if front.json:
        print_json(project)
        return
    fields = project.as_dict()
    usage, quotas = fields.pop("usage"), fields.pop("quotas")
    print_fields(fields)
    if usage is not None:
        used = {**usage, "creates_per_minute": usage.get("creates_last_minute")}
        print_table(("WHAT", "USED", "QUOTA"), [(name, used.get(name), quotas.get(name)) for name in QUOTAS])
