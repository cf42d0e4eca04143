"""Arguments and options that several commands have."""

from typing import Annotated

import typer

SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of the sandbox.", show_default=False)]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.", show_default=False)]
Template = Annotated[str, typer.Option("--template", "-t", help="Template to make the sandbox from.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the sandbox, for people.")]
Vcpus = Annotated[int | None, typer.Option("--vcpus", help="Virtual CPUs.")]
Memory = Annotated[int | None, typer.Option("--memory", help="Memory in MiB.")]
Disk = Annotated[int | None, typer.Option("--disk", help="Writable disk in MiB.")]
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
