"""Arguments and options that several commands have."""

import json
from typing import Annotated, Any

import typer

SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of the sandbox.", show_default=False)]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.", show_default=False)]
Template = Annotated[str, typer.Option("--template", "-t", help="Template to make the sandbox from.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the sandbox, for people.")]
Vcpus = Annotated[int | None, typer.Option("--vcpus", help="Virtual CPUs.")]
Memory = Annotated[int | None, typer.Option("--memory", help="Memory in MiB.")]
Disk = Annotated[int | None, typer.Option("--disk", help="Writable disk in MiB.")]
OnTimeout = Annotated[
    str | None,
    typer.Option("--on-timeout", metavar="suspend|pause|stop|delete", help="What is done when its time is over."),
]
AutoWake = Annotated[bool | None, typer.Option("--auto-wake/--no-auto-wake", help="Whether traffic wakes it.")]
Snapshots = Annotated[
    str | None,
    typer.Option("--snapshots", metavar="JSON", help='A schedule of snapshots, for example {"full_every_s": 900}.'),
]
Metadata = Annotated[
    list[str] | None, typer.Option("--metadata", "-m", metavar="K=V", help="Metadata; repeatable.", show_default=False)
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="K=V", help="Environment of all commands; repeatable.")
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME|FILE",
        help="What may leave it: a policy of the service, or a document (YAML, JSON; - is standard input).",
        show_default=False,
    ),
]
Credential = Annotated[
    list[str] | None,
    typer.Option(
        "--credential",
        metavar="ID",
        help="One that it may use of what its policy binds; repeatable. Default: all.",
        show_default=False,
    ),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the request was accepted.")]


def pairs(texts: list[str] | None, what: str) -> dict[str, str]:
    """Reads `K=V` texts. Raises `typer.BadParameter` for what is none."""
    found: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is no K=V", param_hint=what)
        found[key] = value
    return found


def schedule(text: str | None) -> dict[str, Any] | None:
    """Reads a schedule of snapshots. Raises `typer.BadParameter` for what is no JSON object."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"this is no JSON: {error}", param_hint="--snapshots") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("this is no JSON object", param_hint="--snapshots")
    return found
