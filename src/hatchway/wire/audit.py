"""What every process says to the audit writer, which alone appends to the journal.

`run/audit.sock` serves `wire.rpc`: `audit.append` is answered when the records are durable. Who sends keeps its records, within
its own bound, until then, and sends them again to the next writer: `source` and `number` tell the writer what it has.
A sender whose bound is reached lets nothing more happen that would have to be recorded.
"""

from typing import Any

from msgspec import field

from hatchway.wire.message import Empty, Struct

SOCKET = "audit.sock"
MAX_RECORD = 16 * 1024
"""Octets of one record; longer values are cut, with their digest in place of the rest."""


class Entry(Struct, frozen=True, kw_only=True):
    """One thing that happened. The writer adds sequence, hash of the one before, and its own."""

    kind: str
    """`area.what`: `egress.connection egress.request egress.dns egress.frames egress.policy approval.asked approval.answered credential.used
    credential.leased credential.revoked sandbox.<verb> session.created files.read files.written port.opened token.issued key.refused key.made
    policy.changed …`."""
    time: float
    project: str = ""
    sandbox_id: str = ""
    generation: int = 0
    actor: str = ""
    """Key id, `sandbox`, or the name of the process of ours that did it by itself."""
    request_id: str = ""
    decision: str = ""
    """`allowed denied asked failed`; empty where nothing was decided."""
    reason: str = ""
    """The code of the decision."""
    count: int = 1
    """How many alike this stands for; `time` is the first's, `data.last` the last's."""
    data: dict[str, Any] = field(default_factory=dict)


class Append(Struct, frozen=True, kw_only=True):
    """`audit.append`: records of one sender, `first` the number of the first; they are numbered without gaps."""

    source: str
    """`control`, `egress-0`, `broker`, `node` …, and `/` and the id of its start."""
    first: int
    entries: tuple[Entry, ...]


class Appended(Struct, frozen=True, kw_only=True):
    """Answer: all up to `last` of this sender are durable; `sequence` is the newest in the journal."""

    last: int
    sequence: int


class Query(Struct, frozen=True, kw_only=True):
    """`audit.query` of the control plane: records after `after`, oldest first, of one project (None: of all) and matching what else is given."""

    after: int = 0
    limit: int = 100
    project: str | None = None
    sandbox_id: str | None = None
    kinds: tuple[str, ...] = ()
    """Prefixes."""
    decision: str | None = None
    before_time: float | None = None
    since_time: float | None = None


class Records(Struct, frozen=True, kw_only=True):
    """Answer: each record as it lies in the journal."""

    lines: tuple[bytes, ...]
    next_after: int
    """Where the next query goes on."""
    head: int
    """The newest sequence."""


class Health(Struct, frozen=True, kw_only=True):
    """Answer to `audit.health`."""

    writable: bool
    error: str = ""
    head: int = 0
    head_hash: str = ""
    bytes: int = 0


METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "audit.append": (Append, Appended),
    "audit.query": (Query, Records),
    "audit.health": (Empty, Health),
}
"""Method name → (request, answer)."""
