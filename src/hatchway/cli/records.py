"""Commands about what is recorded: `operations`, `templates`, `events`."""

from typing import Annotated

import typer

from .front import Front
from .shared import with_front

_MAX_LISTED = 500


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("operations")(operations)
    app.command("templates")(templates)
    app.command("events")(events)


@with_front
def operations(
    front: Front,
    operation: Annotated[
        str | None, typer.Argument(metavar="[OPERATION]", help="Id of one.", show_default=False)
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until it has ended.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Ask that it be given up.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, max=_MAX_LISTED, help="How many to list.")] = 50,
) -> None:
    """List the newest operations, or show one."""
    import itertools

    from .output import print_fields, print_json, print_table, when

    client = front.client.operations
    if operation is None:
        if wait or cancel:
            raise typer.BadParameter("needs the id of an operation", param_hint="--wait/--cancel")
        found = list(itertools.islice(client.list(), limit))
        if front.json:
            print_json(found)
            return
        rows = [
            (one.id, one.kind, one.target, one.status, one.phase, when(one.created_at), one.error and one.error.code)
            for one in found
        ]
        print_table(("OPERATION", "KIND", "SANDBOX", "STATUS", "PHASE", "CREATED", "ERROR"), rows)
        return
    record = client.cancel(operation) if cancel else client.get(operation)
    if wait:
        record = client.wait(operation)
    if front.json:
        print_json(record)
    else:
        print_fields(record.as_dict())


@with_front
def templates(
    front: Front,
    reference: Annotated[
        str | None,
        typer.Argument(metavar="[TEMPLATE]", help="NAME, NAME:TAG or NAME@DIGEST of one.", show_default=False),
    ] = None,
) -> None:
    """List the templates that sandboxes can be made from, or show one."""
    from .output import print_fields, print_json, print_table, when

    if reference is not None:
        one = front.client.templates.get(reference)
        if front.json:
            print_json(one)
        else:
            print_fields(one.as_dict())
        return
    found = list(front.client.templates.list())
    if front.json:
        print_json(found)
        return
    rows = [
        (
            f"{one.name}:{one.tag}",
            one.digest[:19],
            f"{one.size_bytes / 2**20:.0f} MiB",
            when(one.created_at),
            one.description,
        )
        for one in found
    ]
    print_table(("TEMPLATE", "DIGEST", "SIZE", "CREATED", "DESCRIPTION"), rows)


@with_front
def events(
    front: Front,
    after: Annotated[str | None, typer.Option("--after", help="Begin behind the event with this id.")] = None,
) -> None:
    """Show what changes, until Ctrl-C."""
    from .output import print_json, to_json

    for event in front.client.events(after):
        if front.json:
            print_json(event)
        else:
            print(f"{event.id}  {event.kind}  {event.subject}  {to_json(event.data)}", flush=True)
