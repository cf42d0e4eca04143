"""The bodies of `hatchway up` and `hatchway down`."""

import dataclasses
import json
import os
import signal
import time

from hatchway.domain.errors import Unavailable
from hatchway.supervisor import becoming, database, folder
from hatchway.supervisor.printing import Printer
from hatchway.supervisor.settings import Settings
from hatchway.wire import handed

DOWN_WITHIN_S = 120.0
BROKER_ENVIRONMENT = "HATCHWAY_BROKER_ENVIRONMENT"
DATABASE_ENVIRONMENT = "HATCHWAY_DATABASE_ENVIRONMENT"
"""Name to the new program the descriptors with the variables that were taken out of its environment."""


def up(settings: Settings, *, detach: bool, as_json: bool) -> int:
    """Starts the service; returns the exit status. With `detach` it returns when the service is ready.

    Where the environment has secrets of roles, this becomes a new program without them first.
    """
    taken = handed.hand_over({BROKER_ENVIRONMENT: settings.lending.taken, DATABASE_ENVIRONMENT: database.VARIABLES})
    settings = dataclasses.replace(
        settings,
        broker_environment=taken.get(BROKER_ENVIRONMENT),
        database_environment=taken.get(DATABASE_ENVIRONMENT),
    )
    if not detach:
        return becoming.supervisor(settings, "json" if as_json else "text")
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        becoming.supervisor(settings, "detached", writing)
    os.close(writing)
    os.wait()
    return _follow(reading, Printer(as_json))


def down(settings: Settings, *, keep_sandboxes: bool = False) -> int:
    """Stops the service and powers the sandboxes off; also what a killed service left behind. Idempotent."""
    holder = folder.Lock(settings).holder()
    if holder is None:
        left_behind = settings.run.is_dir() and any((settings.run / "vm").iterdir())
        if left_behind and not keep_sandboxes:
            from hatchway.supervisor.supervise import Supervisor  # late: the roles, which few commands need

            Supervisor(settings, Printer(False)).drain_only()
        return 0
    handle = os.pidfd_open(holder)
    try:
        signal.pidfd_send_signal(handle, signal.SIGUSR1 if keep_sandboxes else signal.SIGTERM)
        deadline = time.monotonic() + DOWN_WITHIN_S
        while folder.Lock(settings).holder() == holder:
            if time.monotonic() > deadline:
                raise Unavailable(
                    "still_up",
                    f"The service (pid {holder}) did not end within {DOWN_WITHIN_S:.0f} s.",
                    f"See {settings.log}.",
                )
            time.sleep(0.05)
    finally:
        os.close(handle)
    return 0


def _follow(reading: int, report: Printer) -> int:
    """Shows the detached service's reports until it is ready or has failed."""
    with os.fdopen(reading, "r", encoding="utf-8") as stream:
        for line in stream:
            event = json.loads(line)
            report(event)
            if event.get("event") == "ready":
                return 0
            if event.get("event") == "error":
                return 1
    report(
        {
            "event": "error",
            "code": "ended",
            "cause": "The service ended before it was ready.",
            "remedy": "Run `hatchway up` without --detach.",
        }
    )
    return 1


def doctor(settings: Settings, *, as_json: bool) -> int:
    """Shows what this host offers and what is lacking; returns the exit status."""
    from hatchway.supervisor.doctor import doctor as examine_and_show  # late: it imports the node's rooms

    return examine_and_show(settings, as_json=as_json)
