"""What sandboxes use. There is no history here: every answer is a sample that was taken for it."""

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.domain.ids import is_id
from hatchway.e2b.control import listing, views
from hatchway.e2b.control.calls import Call, answer
from hatchway.e2b.control.finding import find
from hatchway.e2b.errors import E2bError

if TYPE_CHECKING:
    from hatchway.client.models import SandboxMetrics

MAX_ASKED = 100
AT_ONCE = 16
MAX_SEEN = 4096
MIN_SPAN_S = 0.5
"""Over less the share of the processor is that since the boot."""
RATE_OVER_S = 60.0


class Shares:
    """The share of its processors that a sandbox used since it was last asked for; at first since its boot."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def of(self, found: "SandboxMetrics") -> float:
        """In percent of all of them."""
        guest = found.guest
        if guest is None:
            return 0.0
        used_s, up_s = guest.cpu_user_s + guest.cpu_system_s, guest.uptime_s
        before = self._seen.get(found.sandbox_id, (0.0, 0.0))
        if up_s - before[1] < MIN_SPAN_S:  # it was booted anew, or asked for a moment ago
            before = (0.0, 0.0) if up_s < before[1] or before[1] == 0 else before
        if up_s - before[1] >= MIN_SPAN_S:
            self._seen[found.sandbox_id] = (used_s, up_s)
            self._seen.move_to_end(found.sandbox_id)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        else:
            before = (0.0, 0.0)
        span_s = max(up_s - before[1], 1e-3)
        return min(100.0, max(0.0, 100.0 * (used_s - before[0]) / span_s / max(1, guest.cpus)))


_shares = Shares()


async def of_sandbox(call: Call) -> Response:
    """GET /sandboxes/{id}/metrics: a sample of now, where that is in the span that is asked for."""
    info, _ = await find(call)
    start, end = _second(call, "start"), _second(call, "end")
    now = time.time()
    if info.state != "running" or (start is not None and start > now) or (end is not None and end < int(now)):
        return answer([])
    sample = await _sample(call, info.id)
    return answer([] if sample is None else [sample])


async def of_many(call: Call) -> Response:
    """GET /sandboxes/metrics: of each a sample of now; what is not there is left out."""
    asked = [one.partition("-")[0] for one in (call.query("sandbox_ids") or "").split(",") if one]
    if not 1 <= len(asked) <= MAX_ASKED:
        raise E2bError(400, f"sandbox_ids must have 1 to {MAX_ASKED} ids.")
    places = asyncio.Semaphore(AT_ONCE)

    async def one(sandbox_id: str) -> tuple[str, dict[str, Any] | None]:
        async with places:
            return sandbox_id, await _sample(call, sandbox_id) if is_id(sandbox_id) else None

    found = await asyncio.gather(*(one(sandbox_id) for sandbox_id in dict.fromkeys(asked)))
    return answer({"sandboxes": {sandbox_id: sample for sandbox_id, sample in found if sample is not None}})


async def of_team(call: Call) -> Response:
    """GET /teams/{id}/metrics: how many sandboxes of the key's project run, and how many are made in a second."""
    now = time.time()
    running, made = await asyncio.gather(
        listing.count(call, **listing.RUNNING), listing.count(call, created_after=repr(now - RATE_OVER_S))
    )
    sample = {"concurrentSandboxes": running, "sandboxStartRate": round(made / RATE_OVER_S, 4)}
    return answer([{"timestamp": views.time(now), "timestampUnix": int(now), **sample}])


async def _sample(call: Call, sandbox_id: str) -> dict[str, Any] | None:
    from hatchway.client import calls

    try:
        found = await call.run(calls.sandbox_metrics(sandbox_id))
    except (ours.NotFound, ours.Gone):
        return None
    return views.metric(found, _shares.of(found))


def _second(call: Call, name: str) -> int | None:
    given = call.query(name)
    if given is None:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 12:
        raise E2bError(400, f"Invalid {name} {given[:40]!r}: Unix seconds.")
    return int(given)
