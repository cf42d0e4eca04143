"""What a node counts. `scrape` shows it; docs/observability.md lists it. Any room of the node may import it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

from hatchway.domain.errors import HatchwayError
from hatchway.wire.metrics import FAST, SLOW

REGISTRY = CollectorRegistry()

VERBS = Histogram(
    "hatchway_node_request_seconds",
    "What control planes asked for, by method and by `ok` or the kind of the error.",
    ["method", "result"],
    registry=REGISTRY,
    buckets=SLOW,
)
PHASES = Histogram(
    "hatchway_phase_seconds",
    "Phases of what is done with sandboxes: of a creation, a start, a suspension, a restoration, a fork, a snapshot.",
    ["phase"],
    registry=REGISTRY,
    buckets=FAST,
)
BAKES = Histogram(
    "hatchway_bake_seconds", "Baked snapshots that were made.", ["result"], registry=REGISTRY, buckets=SLOW
)
LAUNCHER_CALLS = Histogram(
    "hatchway_launcher_call_seconds",
    "Calls of the launcher by this node; `start_vm` is the start of a machine.",
    ["verb", "result"],
    registry=REGISTRY,
    buckets=FAST,
)
RESYNCS = Counter(
    "hatchway_guest_channel_resyncs", "How often the channel to a guest was taken up again.", registry=REGISTRY
)
BROKEN = Counter(
    "hatchway_guest_channel_broken",
    "How often a connection was dropped because the guest broke the protocol.",
    registry=REGISTRY,
)
DATA_REQUESTS = Counter(
    "hatchway_data_requests",
    "Requests and WebSockets of the data plane that ended, by what served them and the status of the answer.",
    ["endpoint", "status"],
    registry=REGISTRY,
)
DATA_OCTETS = Counter(
    "hatchway_data_bytes",
    "Octets of bodies and messages of the data plane, ports by host name left out.",
    ["direction"],
    registry=REGISTRY,
)
PORT_REQUESTS = Counter(
    "hatchway_port_requests",
    "Requests on names of ports, by `passed` or the code of the refusal.",
    ["result"],
    registry=REGISTRY,
)
REFUSED = Counter(
    "hatchway_data_refused",
    "Requests of the data plane whose token is not good for them, by the code of the refusal.",
    ["code"],
    registry=REGISTRY,
)


@contextmanager
def timed(histogram: Histogram, *labels: str) -> Iterator[None]:
    """Observes how long the block takes; the last label is `ok` or the kind of the error that it raised."""
    began, result = time.perf_counter(), "ok"
    try:
        yield
    except BaseException as error:
        result = type(error).__name__
        raise
    finally:
        histogram.labels(*labels, result).observe(time.perf_counter() - began)


def note_refusal(error: HatchwayError) -> None:
    """Counts a request that was refused for its token."""
    if error.status in (401, 403):
        REFUSED.labels(error.code).inc()
