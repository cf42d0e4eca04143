"""One JSON object per event on standard error, which the supervisor collects; in the form that the other roles write."""

import json
import sys
import time

MAX_TEXT = 4_000
BURST = 200
"""Lines in one second. Beyond that they are counted, and the next second begins with their number."""


class _Flow:
    """How many lines this second had."""

    second = 0
    lines = 0
    dropped = 0


def say(text: str, *, level: str = "info", request_id: str = "", **more: str | float) -> None:
    """Writes an event; control characters are shown, not obeyed, as JSON has it."""
    now = time.time()
    if int(now) != _Flow.second:
        _Flow.second, _Flow.lines = int(now), 0
    _Flow.lines += 1
    if _Flow.lines > BURST:
        _Flow.dropped += 1
        return
    line: dict[str, str | float] = {"role": "launcher", "event": text[:MAX_TEXT], "level": level, **more}
    if request_id:
        line["request_id"] = request_id[:64]
    if _Flow.dropped:
        line["suppressed"], _Flow.dropped = _Flow.dropped, 0
    line["timestamp"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()
