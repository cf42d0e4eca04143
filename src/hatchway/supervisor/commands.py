"""The bodies of `hatchway up` and `hatchway down`."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from hatchway.broker import environment
from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.supervisor import folder
from hatchway.supervisor.settings import Settings
from hatchway.supervisor.supervise import Report, Supervisor

DOWN_WITHIN_S = 120.0


def up(settings: Settings, *, detach: bool, as_json: bool) -> int:
    """Starts the service; returns the exit status. With `detach` it returns when the service is ready.

    Where the environment has secrets that are the broker's, this becomes a new program without them first.
    """
    settings = dataclasses.replace(settings, broker_environment=environment.hand_over(settings.lending.taken))
    if not detach:
        return _serve(settings, _Printer(as_json))
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os._exit(_detached(settings, writing))
    os.close(writing)
    os.wait()
    return _follow(reading, _Printer(as_json))


def down(settings: Settings, *, keep_sandboxes: bool = False) -> int:
    """Stops the service and powers the sandboxes off; also what a killed service left behind. Idempotent."""
    holder = folder.Lock(settings).holder()
    if holder is None:
        left_behind = settings.run.is_dir() and any((settings.run / "vm").iterdir())
        if left_behind and not keep_sandboxes:
            Supervisor(settings, _Printer(False)).drain_only()
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


class _Printer:
    """Shows what the supervisor reports."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._began = time.monotonic()

    def __call__(self, event: dict[str, object]) -> None:
        if self._as_json:
            print(json.dumps(event), flush=True)
            return
        at = f"[{time.monotonic() - self._began:6.1f} s]"
        match event.get("event"):
            case "progress":
                fraction = event.get("fraction")
                share = f" {fraction:4.0%}" if isinstance(fraction, float) else ""
                print(f"{at} {event.get('phase')}:{share} {event.get('message', '')}", file=sys.stderr, flush=True)
            case "ready":
                e2b = f", API of E2B {event['e2b']}" if event.get("e2b") else ""
                print(f"{at} ready: API {event['api']}, data plane {event['data']}{e2b}", file=sys.stderr, flush=True)
            case "hung":
                print(f"{at} {event['role']} does not answer: it is killed", file=sys.stderr, flush=True)
            case "restarted":
                print(f"{at} restarted: {event['role']}", file=sys.stderr, flush=True)
            case "error":
                print(
                    f"error: {event['cause']}\n  code: {event['code']}\n  remedy: {event['remedy']}",
                    file=sys.stderr,
                    flush=True,
                )
            case "down":
                print(f"{at} down", file=sys.stderr, flush=True)


def _serve(settings: Settings, report: Report) -> int:
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


def _follow(reading: int, report: _Printer) -> int:
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
