"""What the control plane counts. `scrape` shows it; docs/observability.md lists it."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from hatchway.wire.metrics import FAST, SLOW

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "hatchway_api_requests",
    "Requests of the API, by what they were answered.",
    ["method", "route", "status"],
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "hatchway_api_request_seconds",
    "From the head of a request to its answer; those that ask to wait, wait in it.",
    ["method", "route"],
    registry=REGISTRY,
    buckets=FAST,
)
REFUSED = Counter(
    "hatchway_api_refused",
    "Requests whose key is not good for them, by the code of the refusal.",
    ["code"],
    registry=REGISTRY,
)
OPERATIONS = Counter(
    "hatchway_operations", "Operations that ended, by kind and status.", ["kind", "status"], registry=REGISTRY
)
OPERATION_SECONDS = Histogram(
    "hatchway_operation_seconds",
    "From the acceptance of an operation to its end.",
    ["kind", "status"],
    registry=REGISTRY,
    buckets=SLOW,
)
NODE_CALLS = Histogram(
    "hatchway_node_call_seconds",
    "Calls of nodes, by method and by `ok` or the kind of the error.",
    ["method", "result"],
    registry=REGISTRY,
    buckets=FAST,
)
TRANSACTIONS = Histogram(
    "hatchway_database_seconds",
    "From the request for a transaction to its end, the wait for its turn included.",
    ["kind", "result"],
    registry=REGISTRY,
    buckets=FAST,
)


def transaction(kind: str, result: str, seconds: float) -> None:
    """A transaction ended; `kind` is `read` or `write`, `result` `ok` or `error`."""
    TRANSACTIONS.labels(kind, result).observe(seconds)


def operation(kind: str, status: str, seconds: float) -> None:
    """An operation ended."""
    OPERATIONS.labels(kind, status).inc()
    OPERATION_SECONDS.labels(kind, status).observe(max(0.0, seconds))
