"""The supervisor itself, as `hatchway up` becomes it: `python -m hatchway.supervisor SETTINGS_FD text|json|detached [REPORTS_FD]`."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from hatchway.domain.errors import HatchwayError
from hatchway.supervisor import becoming
from hatchway.supervisor.printing import Printer
from hatchway.supervisor.settings import Settings

Report = Callable[[dict[str, object]], None]


def main(arguments: list[str]) -> int:
    """Runs until a signal ends it; returns the exit status."""
    descriptor, reports, *writing = arguments
    settings = becoming.handed_over(int(descriptor))
    if not writing:
        return _serve(settings, Printer(reports == "json"))
    os.set_inheritable(int(writing[0]), False)
    return _detached(settings, int(writing[0]))


def _serve(settings: Settings, report: Report) -> int:
    with becoming.nothing_that_draws():
        from hatchway.supervisor.supervise import Supervisor
    try:
        Supervisor(settings, report).run()
    except HatchwayError as error:
        report({"event": "error", **error.as_dict()})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _detached(settings: Settings, writing: int) -> int:
    """The grandchild's life: reports go to the starter until it is gone, and to the log."""
    null = os.open(os.devnull, os.O_RDWR)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log = _open_log(settings.supervisor_log, null)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def report(event: dict[str, object]) -> None:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        logged = {"role": "supervisor", "level": "info", "timestamp": now, **event}
        for fd, line in ((1, logged), (writing, event)):
            with contextlib.suppress(OSError):  # the disk below the log is full, or the starter is gone
                os.write(fd, json.dumps(line).encode() + b"\n")

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        return _serve(settings, report)
    except BaseException as error:
        report(
            {
                "event": "error",
                "code": "internal",
                "cause": f"{type(error).__name__}: {error}",
                "remedy": "See supervisor.log.",
            }
        )
        raise


def _open_log(path: Path, fallback: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:
        return fallback


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
