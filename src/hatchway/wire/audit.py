"""What every process says to the audit writer, which alone appends to the journal.

`run/audit.sock` serves `wire.rpc`: `audit.append` is answered when the records are durable. Who sends keeps its records, within
its own bound, until then, and sends them again to the next writer: `source` and `number` tell the writer what it has.
A sender whose bound is reached lets nothing more happen that would have to be recorded.
"""

from typing import Any

from msgspec import field

from hatchway.wire.message import Empty, Struct

SOCKET = "audit.sock"
SOURCE = r"[a-z0-9-]{1,32}/[a-z0-9]{1,32}"
MAX_RECORD = 16 * 1024
"""Octets of one record; longer values are cut, with their digest in place of the rest."""


class Entry(Struct, frozen=True, kw_only=True):
    """One thing that happened. The writer adds sequence, hash of the one before, and its own."""

    kind: str
    """`area.what`: `egress.connection egress.request egress.dns egress.frames egress.rules egress.policy approval.asked approval.answered credential.used
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
    """`audit.append`: records of one sender, `first` the number of the first; they are numbered from 1 without gaps.

    Without records it asks what the writer has. What it has already is left out. Raises `HostExhausted("audit_full")`: nothing of it is
    written, and whoever has to record does nothing more that would have to be.
    """

    source: str
    """`control`, `egress-0`, `broker`, `node` …, and `/` and the id of its start: `SOURCE`."""
    first: int
    entries: tuple[Entry, ...]


class Appended(Struct, frozen=True, kw_only=True):
    """Answer: all of this sender up to the number `last` are durable; `sequence` is the newest in the journal."""

    last: int
    sequence: int


class Query(Struct, frozen=True, kw_only=True):
    """`audit.query` of the control plane: records after `after`, oldest first, of one project (None: of all) and matching what else is given.

    With `newest` the newest first, those before `before`. One query reads a bounded part of the journal: it may find nothing and yet
    have to be gone on with.
    """

    after: int = 0
    limit: int = 100
    project: str | None = None
    sandbox_id: str | None = None
    kinds: tuple[str, ...] = ()
    """Prefixes."""
    decision: str | None = None
    before_time: float | None = None
    since_time: float | None = None
    newest: bool = False
    before: int = 0
    """0: from the end on."""


class Records(Struct, frozen=True, kw_only=True):
    """Answer: each record as it lies in the journal."""

    lines: tuple[bytes, ...]
    next_after: int
    """Where the next query goes on: its `after`, or with `newest` its `before`, which is 0 at the journal's beginning."""
    head: int
    """The newest sequence."""


class Health(Struct, frozen=True, kw_only=True):
    """Answer to `audit.health`."""

    writable: bool
    error: str = ""
    head: int = 0
    head_hash: str = ""
    octets: int = 0
    first: int = 1
    """The oldest sequence that is kept."""
    public_key: str = ""
    """Ed25519, 32 octets in hexadecimal digits."""


MAX_RECORDS = 2000
"""Records of one `audit.append`."""

METHODS: dict[str, tuple[type[Struct], type[Struct]]] = {
    "audit.append": (Append, Appended),
    "audit.query": (Query, Records),
    "audit.health": (Empty, Health),
}
"""Method name → (request, answer)."""
