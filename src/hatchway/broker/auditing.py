"""What the broker records, and through whom: `audit.client.AuditClient` is a `AuditSink`."""

import time
from typing import Any, Protocol

from hatchway.wire.audit import Entry
from hatchway.wire.broker import Leg

MAX_PATH = 1024


class AuditSink(Protocol):
    """Takes records. Where it cannot, nothing may happen that would have to be recorded."""

    def record(self, entry: Entry) -> None:
        """Keeps a record until it is durable. Raises `Unavailable("audit_unavailable")`."""
        ...

    async def durable(self, entry: Entry) -> None:
        """Returns when the record is on the disk. Raises `Unavailable("audit_unavailable")`."""
        ...


class NoAudit:
    """Where no writer was named."""

    def record(self, entry: Entry) -> None:
        """Nothing is kept."""

    async def durable(self, entry: Entry) -> None:
        """Nothing is kept."""


def of_leg(kind: str, leg: Leg, decision: str, reason: str = "", **data: Any) -> Entry:
    """A record about a leg. Paths are given without their query, which may have anything in it."""
    return Entry(
        kind=kind,
        time=time.time(),
        project=leg.project,
        sandbox_id=leg.sandbox_id,
        generation=leg.generation,
        actor="broker",
        decision=decision,
        reason=reason,
        data={"credential": leg.credential_id, "rule": leg.rule, "host": leg.host, "port": leg.port, **data},
    )


def of_grant(
    kind: str, project: str, sandbox_id: str, generation: int, decision: str, reason: str = "", **data: Any
) -> Entry:
    """A record about a grant."""
    return Entry(
        kind=kind,
        time=time.time(),
        project=project,
        sandbox_id=sandbox_id,
        generation=generation,
        actor="broker",
        decision=decision,
        reason=reason,
        data=data,
    )
