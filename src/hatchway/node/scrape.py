"""/metrics of a node: what it counts, what holds now, and what the launcher counts, which has no listener of its own."""

import asyncio
from collections import Counter

from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hatchway import __version__
from hatchway.node import metrics
from hatchway.node.context import Context
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import VmmError
from hatchway.wire import metrics as common
from hatchway.wire.launcher import Counts

LAUNCHER_WITHIN_S = 3.0


class Metrics:
    """The ASGI endpoint. Tokens of sandboxes do not open it: what it tells is no tenant's."""

    def __init__(
        self, context: Context, sandboxes: Sandboxes, sessions: Sessions, access: common.MetricsAccess
    ) -> None:
        self._context = context
        self._sandboxes = sandboxes
        self._sessions = sessions
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one scrape. Raises `HatchwayError`."""
        request = Request(scope)
        self._access.check(
            peer="" if request.client is None else request.client.host,
            host=request.headers.get("host", ""),
            authorization=request.headers.get("authorization"),
        )
        counts = await _counts(self._context.launcher)
        body = common.text(metrics.REGISTRY, self._now(scope, counts))
        response = Response(body, headers={"cache-control": "no-store"}, media_type=common.CONTENT_TYPE)
        await response(scope, receive, send)

    def _now(self, scope: Scope, counts: Counts | None) -> CollectorRegistry:
        registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hatchway_{name}", text, labels, registry=registry)

        driver = self._context.driver
        gauge("node_build", "1; what this node runs.", "version", "vmm", "isolation").labels(
            __version__, f"{driver.name} {driver.version}", driver.isolation
        ).set(1)
        gauge("warnings", "What this node warns of; `hatchway doctor` shows it.").set(len(self._sandboxes.warnings()))
        states = gauge("node_sandboxes", "Sandboxes of this node by state.", "state")
        for state, number in Counter(sandbox.observed().state for sandbox in self._sandboxes.all()).items():
            states.labels(state).set(number)
        sessions, kept = self._sessions.kept()
        gauge("sessions", "Command sessions, ended ones whose output is kept among them.").set(sessions)
        gauge("spool_bytes", "Octets of output that are kept on disk.").set(kept)
        gauge("data_requests_in_hand", "Requests and streams of the data plane that are open.").set(
            scope["app"].in_flight
        )
        self._capacity(
            gauge("memory_bytes", "Memory for sandboxes.", "of"), gauge("disk_bytes", "Disk for them.", "of")
        )
        gauge("launcher_up", "Whether the launcher answers.").set(counts is not None)
        if counts is not None:
            _launcher(registry, counts, gauge("slots", "Places for machines, each with a user of its own.", "of"))
        return registry

    def _capacity(self, memory: Gauge, disk: Gauge) -> None:
        try:
            use = self._context.capacity.use(self._sandboxes.holdings())
        except OSError:  # the file system of the data folder does not answer
            return
        memory.labels("limit").set(use.memory_limit << 20)
        memory.labels("promised").set(use.memory_promised << 20)
        disk.labels("free").set(use.disk_free << 20)
        disk.labels("promised").set(use.disk_promised << 20)


def _launcher(registry: CollectorRegistry, counts: Counts, slots: Gauge) -> None:
    slots.labels("limit").set(counts.slots)
    slots.labels("used").set(counts.slots - counts.slots_free)
    slots.labels("prepared").set(counts.slots_prepared)
    answered = {verb: sum(results.values()) for verb, results in counts.answered.items()}
    refused = {
        verb: sum(number for result, number in results.items() if result != "ok")
        for verb, results in counts.answered.items()
    }
    common.add_counts(registry, "launcher_requests", "Requests that the launcher answered.", "verb", answered)
    common.add_counts(registry, "launcher_refused", "Of these, with a refusal.", "verb", refused)
    turned = {"peer": counts.turned_away}
    common.add_counts(registry, "launcher_turned_away", "Connections that it did not take.", "reason", turned)


async def _counts(launcher: LauncherClient) -> Counts | None:
    try:
        async with asyncio.timeout(LAUNCHER_WITHIN_S):
            return await launcher.counts()
    except (VmmError, TimeoutError):
        return None
