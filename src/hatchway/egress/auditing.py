"""How the gateway records what it decides: one façade for each sandbox, over whatever takes the records.

`audit.client.AuditClient` is the sink of a running process: it keeps records within a bound until they are durable, and counts
denials and failures that are alike. What cannot be recorded does not happen: `Recorder.record` raises, and the flow ends. A sandbox that
has more to be recorded than its quota gets it counted by where it went, not one by one: the journal, and the patience of who reads it, are everybody's.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from hatchway.domain.errors import Unavailable
from hatchway.domain.policy.verdicts import Verdict
from hatchway.egress.bounds import Bucket
from hatchway.egress.http.seam import FlowError
from hatchway.wire.audit import Entry

MAX_TEXT = 512
"""Characters of one value that came from a sandbox or an upstream; what is longer is cut, and says so."""


QUOTA_PER_S, QUOTA_AT_ONCE = 100.0, 3_000.0
"""Records of one sandbox that are kept one by one; what comes beyond that is counted."""
_TOLD = ("host", "port", "rule", "observed", "method", "credential", "bytes_out", "bytes_in")
"""What a counted record says still."""
_NOT_THE_GUESTS = frozenset({"egress.policy"})


class AuditSink(Protocol):
    """What takes records."""

    @property
    def full(self) -> bool:
        """Whether nothing more may happen that would have to be recorded."""
        ...

    def record(self, entry: Entry, *, bounded: bool = False) -> None:
        """Keeps a record until it is durable; never blocks. Raises `Unavailable` when it cannot. `bounded`: it is counted with those that are
        alike, like a denial."""
        ...


class Recorder:
    """The records of one sandbox."""

    def __init__(
        self,
        sink: AuditSink,
        project: str,
        sandbox_id: str,
        generation: int,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._project = project
        self._sandbox_id = sandbox_id
        self._generation = generation
        self._now = now
        self._quota = Bucket(QUOTA_PER_S, QUOTA_AT_ONCE, clock)

    @property
    def full(self) -> bool:
        """Whether nothing may go on because nothing can be recorded."""
        return self._sink.full

    def record(
        self,
        kind: str,
        decision: str,
        verdict: Verdict | None = None,
        *,
        reason: str = "",
        actor: str = "sandbox",
        data: dict[str, Any] | None = None,
        alike: bool = False,
    ) -> None:
        """Records one thing. `alike`: a sandbox can have it happen as often as it likes, and it is counted, as denials are.

        Raises `FlowError("audit_full")` when that cannot be.
        """
        told = {key: cut(value) for key, value in (data or {}).items()}
        if verdict is not None:
            if verdict.rule is not None:
                told["rule"] = str(verdict.rule)
            if verdict.observed:
                told["observed"] = True
        bounded = alike or decision == "denied"
        if not bounded and kind not in _NOT_THE_GUESTS and not self._quota.take():
            told = {key: value for key, value in told.items() if key in _TOLD} | {"folded": True}
            bounded = True
        entry = Entry(
            kind=kind,
            time=self._now(),
            project=self._project,
            sandbox_id=self._sandbox_id,
            generation=self._generation,
            actor=actor,
            decision=decision,
            reason=reason or (verdict.reason if verdict is not None else ""),
            data=told,
        )
        try:
            self._sink.record(entry, bounded=bounded)
        except Unavailable as error:
            raise FlowError("audit_full", error.cause, 503) from error

    def ended(
        self,
        kind: str,
        decision: str = "",
        *,
        reason: str = "",
        data: dict[str, Any] | None = None,
        alike: bool = False,
    ) -> None:
        """Records what nobody in the sandbox asked for, or the end of what was recorded when it began. It has happened: nothing is raised when
        it cannot be recorded. `alike`: see `record`."""
        try:
            self.record(kind, decision, reason=reason, actor="egress", data=data, alike=alike)
        except FlowError:
            return


def cut(value: Any) -> Any:
    """A value within `MAX_TEXT`."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}… ({len(value)} characters)"
    return value
