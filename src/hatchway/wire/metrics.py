"""What every process of ours counts alike, who may read it, and how it is written: the text format of Prometheus.

Control plane and node have registries of their own beside this one. A label is never a sandbox's id, a tenant's name or a path: those are
without number, and not the operator's business.
"""

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from hatchway.domain.errors import Forbidden, Unauthenticated

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets in seconds, for what takes from a millisecond to a minute."""
SLOW = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TURN_S = 1.0
"""How often a process looks whether its event loop is late, and says that it is alive."""
MIN_TOKEN = 16

COMMON = CollectorRegistry()
LOOP_LAG = Histogram(
    "hatchway_event_loop_lag_seconds",
    "How late the event loop was for something that was due.",
    registry=COMMON,
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
LINES_SUPPRESSED = Counter(
    "hatchway_log_lines_suppressed", "Log lines that were not written, because too many came at once.", registry=COMMON
)


@dataclass(frozen=True)
class MetricsAccess:
    """Who may read `/metrics`: with a token whoever has it; without one, in development, programs of this machine, else nobody."""

    token_hash: bytes | None = None
    """SHA-256 of the token."""
    local: bool = True
    """Development: without a token, loopback may."""

    def check(self, *, peer: str, host: str, authorization: str | None) -> None:
        """Raises `Unauthenticated("metrics_token_wrong")` or `Forbidden("metrics_closed")`.

        `host` is the request's `Host`: a page that a browser shows under another name must not read what is on loopback.
        """
        if self.token_hash is not None:
            kind, _, token = (authorization or "").partition(" ")
            given = hashlib.sha256(token.strip().encode("utf-8", "replace")).digest()
            if kind.lower() != "bearer" or not hmac.compare_digest(given, self.token_hash):
                raise Unauthenticated(
                    "metrics_token_wrong",
                    "The metrics are read with a token of their own, and the request has not that one.",
                    "Send `Authorization: Bearer` with the content of the file that `token_file` in [metrics] names.",
                )
        elif not (self.local and _is_loopback(peer) and _is_loopback(_name(host))):
            raise Forbidden(
                "metrics_closed",
                "Nobody may read the metrics here: the settings name no token for them.",
                "Name a `token_file` in [metrics] of the settings file.",
            )


def hash_token(token: str) -> bytes:
    """What of a token is kept."""
    return hashlib.sha256(token.encode()).digest()


def text(*registries: CollectorRegistry) -> bytes:
    """Everything that the registries hold, with what every process counts."""
    return b"".join(generate_latest(registry) for registry in (COMMON, *registries))


class _Counted(Collector):
    """Numbers that somebody else counts up."""

    def __init__(self, family: CounterMetricFamily) -> None:
        self._family = family

    def collect(self) -> list[CounterMetricFamily]:
        """What there is."""
        return [self._family]


def add_counts(registry: CollectorRegistry, name: str, text: str, label: str, numbers: Mapping[str, float]) -> None:
    """Adds a counter whose values come from elsewhere, one for each value of the label."""
    family = CounterMetricFamily(f"hatchway_{name}", text, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], number)
    registry.register(_Counted(family))


async def turn(alive: Callable[[], None] | None = None) -> None:
    """Looks for ever how late the event loop is, and calls `alive` each time: whoever watches the process hears that it turns."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TURN_S
        await asyncio.sleep(TURN_S)
        LOOP_LAG.observe(max(0.0, loop.time() - due))
        if alive is not None:
            alive()


def _name(host: str) -> str:
    """A `Host` without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
