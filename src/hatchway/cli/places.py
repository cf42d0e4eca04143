"""Commands that reach into a sandbox: `cp` for its files, `shell` for a terminal, `forward` and `open` for its ports."""

from functools import partial
from typing import Annotated

import typer

from .front import OUR_FAILURE, Front
from .options import SandboxId
from .shared import with_front

User = Annotated[str | None, typer.Option("--user", "-u", help="User of the sandbox. Default: user.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("cp")(cp)
    app.command("shell")(shell)
    app.command("forward")(forward)
    app.command("open")(open_)


@with_front
def cp(
    front: Front,
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Paths here, SANDBOX:PATH, or - for standard input or output.",
            show_default=False,
        ),
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Copy folders; with - as a tar archive.")
    ] = False,
    user: User = None,
    max_bytes: Annotated[
        int | None, typer.Option("--max-bytes", help="Refuse a download of more octets.", show_default=False)
    ] = None,
) -> int:
    """Copy files between here and sandboxes, or from one sandbox to another: hatchway cp SRC... DST.

    As cp does it: into DST where that is a folder, else as DST. What is cut off never has its final name. Of what a sandbox sends,
    nothing is written outside of DST: links that lead out of a folder, devices and set-user-id bits are left out.
    """
    from .copying import copy

    return copy(front, places, recursive=recursive, user=user, max_bytes=max_bytes)


def _shell(
    front: Front,
    sandbox: SandboxId,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="Instead of a login shell.", show_default=False)
    ] = None,
    user: User = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Working directory.")] = None,
    attach: Annotated[
        str | None, typer.Option("--attach", metavar="SESSION", help="Go on with a terminal that was left.")
    ] = None,
) -> int:
    """Open a terminal in a sandbox.

    The exit status is that of the command. ~. at the beginning of a line leaves the terminal, which goes on; ~? lists what else
    there is. A connection that breaks is taken up again where it was.
    """
    from .shell import run_shell

    return run_shell(front, sandbox, command or [], user=user, workdir=workdir, attach=attach)


shell = partial(with_front, failed=OUR_FAILURE)(_shell)


@with_front
def forward(
    front: Front,
    sandbox: SandboxId,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]REMOTE", help="Ports here and in the sandbox.", show_default=False),
    ],
    host: Annotated[str, typer.Option("--host", help="Address here to listen on.")] = "127.0.0.1",
) -> int:
    """Lead connections to ports of this machine to ports of a sandbox, until Ctrl-C.

    LOCAL 0 is any port that is free.
    """
    from .forward import run_forward

    return run_forward(front, sandbox, ports, host=host)


@with_front
def open_(
    front: Front,
    sandbox: SandboxId,
    port: Annotated[int, typer.Argument(min=1, max=65_535, help="Port in the sandbox.", show_default=False)],
    path: Annotated[str, typer.Option("--path", help="Path that the link leads to.")] = "/",
    ttl: Annotated[float, typer.Option("--ttl", min=1, max=86_400, help="Seconds that it lets in for.")] = 3600.0,
) -> None:
    """Print a link that lets a browser in to a web server in a sandbox.

    Whoever has the link has the right to the ports of the sandbox, for so long.
    """
    link = front.client.sandboxes.get(sandbox).port_link(port, path=path, ttl=ttl)
    if front.json:
        from .output import print_json

        print_json({"link": link})
    else:
        print(link)
