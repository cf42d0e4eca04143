"""What `hatchway up` and `hatchway down` show of what the supervisor reports."""

import json
import sys
import time


class Printer:
    """Shows what the supervisor reports."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._began = time.monotonic()

    def __call__(self, event: dict[str, object]) -> None:
        """Shows one event: on standard error for people, as a line of JSON on standard output for programs."""
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
