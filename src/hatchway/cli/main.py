"""The entry point `hatchway`.

Exit status: 0; 1 when the service answered with an error; 2 for a wrong call; 130 after Ctrl-C. `run` and `exec` pass on the
status of the command that they ran and have 125 for whatever failed on our side.
"""

import sys

import typer

from . import processes, records, roles, sandboxes
from .front import OUR_FAILURE, Finished

app = typer.Typer(
    name="hatchway",
    help="Runs the code of AI agents in isolated microVMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for room in (processes, sandboxes, records, roles):
    room.register(app)


def main() -> None:
    """Runs the command line of this process and ends it."""
    # The command line of the HTTP library would load a terminal toolkit that nothing here needs, which takes longer than a
    # whole command. None bars its import, and the library goes on without it as it does where the toolkit is missing.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # this is how an import is barred
    try:
        app()
    except Finished:
        raise
    except SystemExit as end:
        if end.code == 2 and sys.argv[1:2] in (["run"], ["exec"]):
            raise SystemExit(OUR_FAILURE) from None
        raise


if __name__ == "__main__":
    main()
