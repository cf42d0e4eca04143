"""The entry point `hatchway`.

Exit status: 0; 1 when the service answered with an error; 2 for a wrong call; 130 after Ctrl-C. `run` and `exec` pass on the
status of the command that they ran and have 125 for whatever failed on our side.
"""

import sys


def main() -> None:
    """Runs the command line of this process and ends it."""
    # The command line of the HTTP library would load a terminal toolkit that nothing here needs, which takes longer than a
    # whole command. None bars its import, and the library goes on without it as it does where the toolkit is missing.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # this is how an import is barred
    words = sys.argv[1:]
    if words[:1] in (["run"], ["exec"]):
        from . import passing

        passing.main(words[0], words[1:])
    else:
        from .app import app

        app()


if __name__ == "__main__":
    main()
