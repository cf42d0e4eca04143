"""/v1/sandboxes/{id}/metrics: what a sandbox uses, as its guest says and as its host counts."""

import time

import msgspec
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.nodes import node_timeout, unreachable
from hatchway.domain.errors import NotFound
from hatchway.storage import sandboxes
from hatchway.wire import node as wire

WITHIN_S = 10.0


class GuestUsage(views.View, frozen=True, kw_only=True):
    """What the guest says that it uses; whoever is root in it can make it say anything. CPU times are since its boot."""

    uptime_s: float
    cpus: int
    cpu_user_s: float
    cpu_system_s: float
    load1: float
    processes: int
    memory_total_bytes: int
    memory_available_bytes: int
    memory_cached_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int


class HostUsage(views.View, frozen=True, kw_only=True):
    """What the host counts of the machine monitor; `memory_*` and `processes` are its cgroup's. Zeros where nothing runs, or nothing is counted."""

    cpu_s: float
    memory_bytes: int
    memory_private_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int
    processes: int
    oom_kills: int
    disk_bytes: int


class SandboxMetrics(views.View, frozen=True, kw_only=True):
    """What a sandbox uses. `guest` is null where it does not run or does not answer; `guest_error` says why."""

    sandbox_id: str
    state: str
    observed_at: float
    guest: GuestUsage | None
    guest_error: str
    host: HostUsage


async def show(call: Call[NoBody]) -> Response:
    """Asks the sandbox's node. One that is not running uses disk at most, and its guest says nothing."""
    sandbox_id = requests.check_id(call.path["id"], "sandbox", NotFound)
    row = await call.plane.database.read(sandboxes.get_alive, call.project, sandbox_id)
    link = call.plane.nodes.find(row.node_id)
    if link is None:
        raise unreachable(row.node_id)
    ref = wire.SandboxRef(sandbox_id=row.id, generation=row.generation)
    try:
        found = await link.call("sandbox.metrics", ref, wire.SandboxMetrics, within=WITHIN_S)
    except TimeoutError:
        raise node_timeout() from None
    except NotFound:  # its node has not begun with it, or nothing of it was ever made
        found = wire.SandboxMetrics(
            sandbox_id=row.id, state=row.state, observed_at=time.time(), guest_error="Its node has nothing of it."
        )
    return answer(msgspec.convert(found, SandboxMetrics, from_attributes=True))


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}/metrics",
        show,
        "What a sandbox uses",
        {200: SandboxMetrics},
        "sandboxes",
        errors=(404, 410, 503),
    ),
)
