"""/metrics of the control plane: what it counts, what holds now, and what the supervisor tells of the roles."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway import __version__
from hatchway.control import metrics
from hatchway.control.plane import Plane
from hatchway.domain.errors import HatchwayError, MethodNotAllowed
from hatchway.domain.lifecycle import State
from hatchway.storage import sandboxes
from hatchway.wire import metrics as common
from hatchway.wire import supervision

WITHIN_S = 5.0


class Metrics:
    """The ASGI endpoint. It has no scope of an API key: what it tells is no project's."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one scrape. Raises `HatchwayError`."""
        request = Request(scope)
        if request.method != "GET":
            raise MethodNotAllowed("method_not_allowed", "Only GET is possible here.", "Use GET.", allow=["GET"])
        self._plane.config.metrics.check(
            peer="" if request.client is None else request.client.host,
            host=request.headers.get("host", ""),
            authorization=request.headers.get("authorization"),
        )
        body = common.text(metrics.REGISTRY, await now(self._plane))
        response = Response(body, headers={"cache-control": "no-store"}, media_type=common.CONTENT_TYPE)
        await response(scope, receive, send)


async def now(plane: Plane) -> CollectorRegistry:
    """What holds at this moment. What cannot be had is left out: a scrape says so by `hatchway_database_up`."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"hatchway_{name}", text, labels, registry=registry)

    gauge("build", "1; the version of the control plane.", "version").labels(__version__).set(1)
    gauge("api_requests_in_hand", "Requests that are being answered.").set(plane.requests)
    gauge("event_streams", "Open streams of events.").set(plane.event_streams)
    gauge("database_waiting", "Transactions that wait for the writer.").set(plane.database.waiting)
    gauge("audit_behind", "Records that wait for the audit journal.").set(plane.audit.behind)
    gauge("audit_failing", "Whether the audit writer does not take records.").set(bool(plane.audit.error))
    in_hand = gauge("operations_in_hand", "Operations that have not ended.", "kind")
    for kind, number in Counter(str(live.operation.kind) for live in plane.engine.live.values()).items():
        in_hand.labels(kind).set(number)
    connected = gauge("node_connected", "Whether a node is reachable.", "node")
    warnings = gauge("node_warnings", "What a node warns of; `hatchway doctor` shows it.", "node")
    for link in plane.nodes.links:
        name = link.node_id or str(link.address)
        connected.labels(name).set(link.connected)
        warnings.labels(name).set(0 if link.info is None else len(link.info.warnings))
    counts = await _counts(plane)
    gauge("database_up", "Whether the database answers.").set(counts is not None)
    if counts is not None:
        states = gauge("sandboxes", "Sandboxes by state, deleted ones left out.", "state")
        for state in State:
            if state is not State.DELETED:
                states.labels(str(state)).set(counts.get(str(state), 0))
    _supervised(plane, registry)
    return registry


async def _counts(plane: Plane) -> Mapping[str, int] | None:
    try:
        async with asyncio.timeout(WITHIN_S):
            return await plane.database.read(sandboxes.count_by_state)
    except (HatchwayError, TimeoutError):
        return None


def _supervised(plane: Plane, registry: CollectorRegistry) -> None:
    told = None if plane.config.run_dir is None else supervision.read(plane.config.run_dir)
    if told is None:
        return
    common.add_counts(registry, "role_restarts", "How often a role was started again.", "role", told.restarts)
    common.add_counts(
        registry, "role_hung", "How often a role was killed because it did not answer.", "role", told.hung
    )
