"""Who reached what on the data plane, as records for the audit journal: one for each request, when its answer begins; what is alike is counted.

A request whose access cannot be recorded is refused before it is looked at.
"""

import contextlib
import time
from typing import Any, Protocol

from starlette.types import Scope

from hatchway.domain.errors import Forbidden, HatchwayError, Unauthenticated, Unavailable
from hatchway.wire import tracing
from hatchway.wire.audit import Entry
from hatchway.wire.tokens import Claims

KINDS = {
    "Attach": "session.attached",
    "Terminal": "session.attached",
    "Output": "session.read",
    "Stdin": "session.written",
    "Signal": "session.signalled",
    "Tunnel": "port.opened",
    "Stat": "files.read",
    "List": "files.read",
    "Watch": "files.read",
    "Mkdir": "files.created",
    "Move": "files.moved",
    "Remove": "files.removed",
    "Chmod": "files.changed",
    "Download": "archive.read",
    "Upload": "archive.written",
    "Open": "archive.written",
}
"""By the endpoint. What is not here and not in `READ_OR_WRITTEN` changes nothing and shows nothing."""
READ_OR_WRITTEN = {"Content": "files", "Archive": "files"}
"""Those that do either, by the method."""
PORT = "port.opened"
_BODY = ("path", "path_base64", "from_", "from_base64", "to", "to_base64", "user")
_NOTED = "hatchway.access"


class Journal(Protocol):
    """What takes records; `audit.client.AuditClient` of a running node."""

    def require_room(self) -> None:
        """Raises `Unavailable("audit_unavailable")` when nothing more can be recorded."""

    def record(self, entry: Entry, *, alike: bool = False, done: bool = False) -> None:
        """Keeps a record; `alike`: those that are so are counted; `done`: it has happened, and room was asked for before."""


class Accesses:
    """See the module. Without a journal nothing is recorded."""

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal

    def require_room(self) -> None:
        """Raises `Unavailable("audit_unavailable")`."""
        if self._journal is not None:
            self._journal.require_room()

    def answered(self, scope: Scope, endpoint: str, status: int) -> None:
        """An answer to a request begins."""
        kind = _kind(endpoint, scope)
        if kind is not None:
            self._record(kind, scope, "allowed" if status < 400 else "failed", "", {"status": status})

    def refused(self, scope: Scope, endpoint: str, error: HatchwayError) -> None:
        """A request is answered with an error."""
        if isinstance(error, Unauthenticated | Forbidden):
            client = scope.get("client") or ("",)
            told = {"endpoint": endpoint, "peer": client[0]}
            self._record("token.refused", scope, "denied", error.code, told)
            return
        kind = _kind(endpoint, scope)
        if kind is not None:
            with contextlib.suppress(Unavailable):  # the error itself may be that nothing can be recorded
                self._record(kind, scope, "failed", error.code, {"status": error.status})

    def port(self, claims: Claims, sandbox_id: str, port: int) -> None:
        """A request for a port is let in."""
        if self._journal is not None:
            self._journal.record(_entry(PORT, claims, "allowed", "", {"port": port}, sandbox_id), alike=True)

    def port_refused(self, error: HatchwayError, peer: str) -> None:
        """A request for a port is not let in."""
        if self._journal is not None and isinstance(error, Unauthenticated | Forbidden):
            self._journal.record(
                _entry("token.refused", None, "denied", error.code, {"endpoint": "port", "peer": peer})
            )

    def _record(self, kind: str, scope: Scope, decision: str, reason: str, more: dict[str, Any]) -> None:
        if self._journal is None:
            return
        noted: dict[str, Any] = scope.get("state", {}).get(_NOTED, {})
        path = scope.get("path_params", {})
        data = {name: path[name] for name in ("session_id", "port", "archive_id") if name in path}
        data |= noted.get("data", {})
        claims: Claims | None = noted.get("claims")
        self._journal.record(_entry(kind, claims, decision, reason, data | more), alike=True, done=True)


def note_claims(scope: Scope, claims: Claims) -> None:
    """The right that a request comes with, for its record."""
    _noted(scope)["claims"] = claims


def note_data(scope: Scope, body: object) -> None:
    """What a body or a query says of paths, for the record."""
    said = body if isinstance(body, dict) else {name: getattr(body, name, None) for name in _BODY}
    _noted(scope)["data"] = {name.rstrip("_"): value for name, value in said.items() if value is not None}


def _noted(scope: Scope) -> dict[str, Any]:
    noted: dict[str, Any] = scope.setdefault("state", {}).setdefault(_NOTED, {})
    return noted


def _kind(endpoint: str, scope: Scope) -> str | None:
    area = READ_OR_WRITTEN.get(endpoint)
    if area is not None:
        return f"{area}.read" if scope.get("method") in ("GET", "HEAD") else f"{area}.written"
    return KINDS.get(endpoint)


def _entry(
    kind: str,
    claims: Claims | None,
    decision: str,
    reason: str,
    data: dict[str, Any],
    sandbox_id: str | None = None,
) -> Entry:
    return Entry(
        kind=kind,
        time=time.time(),
        project="" if claims is None else claims.project,
        sandbox_id=sandbox_id or ("" if claims is None else claims.sandbox_id),
        generation=0 if claims is None else claims.generation,
        actor="" if claims is None else claims.key_id,
        request_id=tracing.current().get("request_id", ""),
        decision=decision,
        reason=reason,
        data=data,
    )
