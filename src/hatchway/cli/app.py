"""All commands, put together."""

import typer

from . import (
    approvals,
    archives,
    audit,
    changes,
    copies,
    credentials,
    e2b,
    journal,
    keys,
    places,
    policies,
    pools,
    processes,
    projects,
    records,
    roles,
    sandboxes,
    tokens,
    top,
)

app = typer.Typer(
    name="hatchway",
    help="Runs the code of AI agents in isolated microVMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for room in (
    processes,
    sandboxes,
    changes,
    copies,
    archives,
    places,
    records,
    top,
    policies,
    pools,
    tokens,
    keys,
    credentials,
    projects,
    roles,
    e2b,
    journal,
    audit,
    approvals,
):
    room.register(app)
