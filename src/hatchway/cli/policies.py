"""The commands `policy`. `check`, `explain`, `diff`, `lint` and `init` work on files of this machine and need no
service; those of `policystore` talk to it."""

from pathlib import Path
from typing import Annotated

import typer

from . import policystore
from .shared import Json

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="[TIER:]FILE...",
        help="Policy documents, YAML or JSON; - for standard input. TIER: platform, project, template or sandbox (the default).",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    policy = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
    policy.command("check")(check)
    policy.command("explain")(explain)
    policy.command("diff")(diff)
    policy.command("lint")(lint)
    policy.command("init")(init)
    policystore.add_to(policy)
    app.add_typer(policy, name="policy", help="Say what may leave a sandbox, check it, and ask why something may not.")


def check(files: Files, json: Json = False) -> None:
    """Check policy documents and say all that is wrong with them. Ends with 1 when something is."""
    from .policy_files import check_files, end

    end(lambda: check_files(files, json), json)


def explain(
    files: Files,
    host: Annotated[str, typer.Option("--host", help="The name or address that is asked for.", show_default=False)],
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Default: 443, 80 with --clear.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="Of a request. Default: GET where there is a path.")
    ] = None,
    path: Annotated[str | None, typer.Option("--path", help="Path and query of a request.", show_default=False)] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME: VALUE", help="Of a request; repeatable.", show_default=False),
    ] = None,
    websocket: Annotated[bool, typer.Option("--websocket", help="The request opens a WebSocket.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Without TLS.")] = False,
    at: Annotated[str | None, typer.Option("--at", metavar="DATE", help="Ask about this time. Default: now.")] = None,
    json: Json = False,
) -> None:
    """Say whether something would pass, by which rule, with which credential; and why not, and what is needed. Ends with 1 when it is denied."""
    from .policy_files import end, explain_files

    request = path is not None or method is not None
    end(
        lambda: explain_files(
            files,
            json,
            destination=host,
            port=port or (80 if clear else 443),
            method=(method or "GET").upper() if request else None,
            target=path or "/",
            headers=header or [],
            websocket=websocket,
            tls=False if clear else None,
            at=at,
        ),
        json,
    )


def diff(
    before: Annotated[str, typer.Argument(metavar="[TIER:]A", help="The policy that is.", show_default=False)],
    after: Annotated[
        str, typer.Argument(metavar="[TIER:]B", help="The policy that takes its place.", show_default=False)
    ],
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="[TIER:]FILE", help="Documents that stand beside both; repeatable.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say what becomes allowed, asked about or denied when B takes the place of A."""
    from .policy_files import diff_files, end

    end(lambda: diff_files(before, after, beside or [], json), json)


def lint(
    files: Files,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 when something is found.")] = False,
    json: Json = False,
) -> None:
    """Say what is valid and still may not be meant: wide rules, ways around them, rules without effect."""
    from .policy_files import end, lint_files

    end(lambda: lint_files(files, json, strict=strict), json)


def init(
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            help="Also read the configuration of a project in this folder.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write there; an existing file is left alone.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a policy by which package installers of a sandbox read from where those of this machine do, and write nowhere.

    Hosts come from the configuration of pip, npm, apt, cargo and go, or, where there is none, from what the tool itself says is its default.
    """
    from .policy_files import end, make_profile

    end(lambda: make_profile(project, output, json), json)
