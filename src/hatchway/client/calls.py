"""The calls of the API as flows: which request, how often, and what the answer means. No I/O."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import UNSET

from .errors import (
    BadAnswer,
    ConnectionFailed,
    InvalidRequest,
    OperationFailed,
    Unavailable,
    WaitTimeout,
    from_problem,
)
from .models import (
    Access,
    Key,
    Limits,
    NewKey,
    Operation,
    Page,
    SandboxInfo,
    SandboxMetrics,
    SessionInfo,
    Snapshot,
    Template,
)
from .steps import Flow, Pause, Reply, Request

T = TypeVar("T")

RETRIES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds to wait before each repetition of a request that nobody answered: a service that restarts is there again."""
WAIT_AT_ONCE_S = 30
"""The longest that one request asks the service to wait for the end of an operation."""
POLL_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between questions for an operation, where the service does not wait itself; the last one repeats."""


def exchange(request: Request) -> Flow[Reply]:
    """Does `request`, again where that is safe and may help, and raises the error that the service answered with."""
    for pause in (*RETRIES, None):
        try:
            reply: Reply = yield request
            if reply.status < 400:
                return reply
            raise from_problem(reply.status, reply.body)
        except ConnectionFailed as error:
            if pause is None or error.code == "timeout" or (error.sent and not request.repeatable):
                raise
        except Unavailable:
            if pause is None or not request.repeatable:
                raise
        yield Pause(pause)
    raise AssertionError("the last round returns or raises")


def decode(body: bytes, kind: type[T]) -> T:
    """Decodes an answer; raises `BadAnswer` when it is not what the protocol says."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(
            "bad_answer", f"The answer of the service cannot be read: {error}", "Check the URL and the versions."
        ) from None


class Accepted(msgspec.Struct):
    """An operation, and what it is about; that is None where the answer does not show it as the operation left it."""

    operation: Operation
    sandbox: SandboxInfo | None = None
    snapshot: Snapshot | None = None
    made: str = "sandbox"
    """Which of the two it is about."""


class Opened(msgspec.Struct):
    """A session and how to reach it."""

    info: SessionInfo
    access: Access | None


def either(body: bytes, member: str, kind: type[T]) -> T:
    """Decodes an object that is the answer itself, or its member `member`."""
    fields = decode(body, dict[str, msgspec.Raw])
    raw = fields.get(member)
    return decode(body if raw is None else bytes(raw), kind)


def compact(**fields: object) -> dict[str, object]:
    """Returns the fields that are not None: what the caller said."""
    return {name: value for name, value in fields.items() if value is not None}


def given(**fields: object) -> dict[str, object]:
    """Returns the fields that the caller gave, among them those that are None."""
    return {name: value for name, value in fields.items() if value is not UNSET}


# Sandboxes


def create_sandbox(
    body: Mapping[str, object], *, wait: bool, timeout_s: float, idempotency_key: str | None = None
) -> Flow[tuple[SandboxInfo, Operation]]:
    """Asks for a sandbox and, with `wait`, stays until it runs."""
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return (yield from accepted("POST", "/v1/sandboxes", body, headers, wait, timeout_s))


def change_sandbox(
    sandbox_id: str, verb: str, *, wait: bool, timeout_s: float, body: Mapping[str, object] | None = None
) -> Flow[tuple[SandboxInfo, Operation]]:
    """Does a lifecycle verb: `pause resume suspend restore stop start wake fork snapshots rollback`."""
    # Repeated after a broken connection it must not be done twice.
    headers = {} if body is None else {"Idempotency-Key": uuid.uuid4().hex}
    path = f"/v1/sandboxes/{segment(sandbox_id)}/{verb}"
    return (yield from accepted("POST", path, body, headers, wait, timeout_s))


def branch_ids(operation: Operation) -> list[str]:
    """The sandboxes that a fork made, without those of its branches that failed."""
    branches = operation.result.get("branches", []) if isinstance(operation.result, dict) else []
    return [str(one["sandbox"]) for one in branches if one.get("error") is None]


def snapshot_of(operation: Operation) -> Flow[Snapshot]:
    """Asks for the snapshot that an operation made."""
    made = operation.result.get("snapshot", "") if isinstance(operation.result, dict) else ""
    return (yield from get_snapshot(str(made)))


def get_snapshot(snapshot_id: str) -> Flow[Snapshot]:
    """Asks for one snapshot."""
    reply = yield from exchange(Request("GET", f"/v1/snapshots/{segment(snapshot_id)}"))
    return either(reply.body, "snapshot", Snapshot)


def delete_snapshot(snapshot_id: str) -> Flow[Snapshot]:
    """Deletes a snapshot."""
    reply = yield from exchange(Request("DELETE", f"/v1/snapshots/{segment(snapshot_id)}"))
    return either(reply.body, "snapshot", Snapshot)


def delete_sandbox(sandbox_id: str, *, wait: bool, timeout_s: float) -> Flow[tuple[SandboxInfo, Operation]]:
    """Deletes a sandbox, whatever it is doing."""
    return (yield from accepted("DELETE", f"/v1/sandboxes/{segment(sandbox_id)}", None, {}, wait, timeout_s))


def accepted(
    method: str, path: str, body: object, headers: dict[str, str], wait: bool, timeout_s: float
) -> Flow[tuple[SandboxInfo, Operation]]:
    """Asks for a lifecycle change of a sandbox and, with `wait`, stays until it succeeded."""
    answer = yield from carried_out(method, path, body, headers, wait, timeout_s)
    sandbox = answer.sandbox
    if sandbox is None:
        sandbox = yield from get_sandbox(answer.operation.target or "")
    return sandbox, answer.operation


def carried_out(
    method: str, path: str, body: object, headers: dict[str, str], wait: bool, timeout_s: float
) -> Flow[Accepted]:
    """Asks for an operation and, with `wait`, stays until it succeeded."""
    at_once = min(timeout_s, WAIT_AT_ONCE_S) if wait else 0
    if at_once >= 1:
        headers = {**headers, "Prefer": f"wait={int(at_once)}"}
    reply = yield from exchange(
        Request(method, path, json=body, headers=headers, timeout_s=at_once + 30 if at_once else None)
    )
    answer = decode(reply.body, Accepted)
    if wait:
        operation = answer.operation
        ended = yield from await_operation(operation, timeout_s=timeout_s - at_once if not operation.done else 0)
        if ended is not operation:
            return Accepted(operation=ended, made=answer.made)
    return answer


def await_operation(operation: Operation, *, timeout_s: float) -> Flow[Operation]:
    """Returns `operation` when it has succeeded.

    Raises `OperationFailed` when it failed or was cancelled, and `WaitTimeout` when it had not ended after about
    `timeout_s` seconds.
    """
    left = timeout_s
    round_ = 0
    while not operation.done:
        if left <= 0:
            raise WaitTimeout(operation.id, timeout_s, operation.target)
        wait = int(min(left, WAIT_AT_ONCE_S))
        reply = yield from exchange(_operation_request(operation.id, wait))
        operation = either(reply.body, "operation", Operation)
        if wait and "preference-applied" in reply.headers:
            left -= wait
        elif not operation.done:
            pause = min(POLL_S[min(round_, len(POLL_S) - 1)], max(left, 0))
            round_ += 1
            left -= pause
            yield Pause(pause)
    if operation.status != "succeeded":
        raise failure_of(operation)
    return operation


def failure_of(operation: Operation) -> OperationFailed:
    """Builds the error that tells why `operation` did not succeed."""
    error = operation.error
    if error is None:
        code, cause, remedy = f"operation_{operation.status}", f"The {operation.kind} was {operation.status}.", ""
    else:
        code, cause, remedy = error.code, error.cause or error.message, error.remedy
    return OperationFailed(code, cause, remedy, operation_id=operation.id, sandbox_id=operation.target)


def get_sandbox(sandbox_id: str, *, annotations: bool = False) -> Flow[SandboxInfo]:
    """Asks for one sandbox, and for its annotations."""
    query = "?annotations=true" if annotations else ""
    reply = yield from exchange(Request("GET", f"/v1/sandboxes/{segment(sandbox_id)}{query}"))
    return either(reply.body, "sandbox", SandboxInfo)


def sandbox_metrics(sandbox_id: str) -> Flow[SandboxMetrics]:
    """Asks what a sandbox uses."""
    reply = yield from exchange(Request("GET", f"/v1/sandboxes/{segment(sandbox_id)}/metrics"))
    return decode(reply.body, SandboxMetrics)


def update_sandbox(sandbox_id: str, body: Mapping[str, object]) -> Flow[SandboxInfo]:
    """Changes name, metadata or lifetime."""
    reply = yield from exchange(Request("PATCH", f"/v1/sandboxes/{segment(sandbox_id)}", json=body))
    return either(reply.body, "sandbox", SandboxInfo)


def extend_sandbox(sandbox_id: str, seconds: float) -> Flow[SandboxInfo]:
    """Puts a deadline off."""
    body = {"timeout_s": seconds}
    reply = yield from exchange(Request("POST", f"/v1/sandboxes/{segment(sandbox_id)}/extend", json=body))
    return either(reply.body, "sandbox", SandboxInfo)


# Lists


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A list of the API, which is read page by page: `member` of each answer holds the items."""

    path: str
    member: str
    kind: type[T]
    filters: Mapping[str, str] = field(default_factory=dict)

    def page(self, cursor: str | None) -> Flow[Page[T]]:
        """Asks for the page at `cursor`, the first one at None."""
        query = {**self.filters, **({} if cursor is None else {"cursor": cursor})}
        reply = yield from exchange(Request("GET", self.path + ("?" + urlencode(query) if query else "")))
        fields = decode(reply.body, dict[str, msgspec.Raw])
        raw = fields.get(self.member)
        if raw is None:
            raise BadAnswer(
                "bad_answer", f"The answer has no member {self.member!r}.", "Check the URL and the versions."
            )
        items = tuple(decode(bytes(item), self.kind) for item in decode(bytes(raw), list[msgspec.Raw]))
        following = fields.get("next_cursor")
        return Page(items, None if following is None else decode(b"[%b]" % bytes(following), list[str | None])[0])


def sandboxes(
    state: str | None, template: str | None, metadata: Mapping[str, str] | None, *, annotations: bool = False
) -> Listing[SandboxInfo]:
    """The sandboxes of the project that pass the filters, with their annotations where those are asked for."""
    filters = {f"metadata.{key}": value for key, value in (metadata or {}).items()}
    if state is not None:
        filters["state"] = state
    if template is not None:
        filters["template"] = template
    if annotations:
        filters["annotations"] = "true"
    return Listing("/v1/sandboxes", "sandboxes", SandboxInfo, filters)


def snapshots(sandbox_id: str | None, kind: str | None) -> Listing[Snapshot]:
    """The snapshots of the project that pass the filters."""
    filters = {name: value for name, value in (("sandbox", sandbox_id), ("kind", kind)) if value is not None}
    return Listing("/v1/snapshots", "snapshots", Snapshot, filters)


def sessions_of(
    sandbox_id: str,
    state: str | None = None,
    pid: int | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    live: bool = False,
    env: bool = False,
) -> Listing[SessionInfo]:
    """The sessions of one sandbox that pass the filters."""
    filters = {f"metadata.{key}": value for key, value in (metadata or {}).items()}
    flags = {"state": state, "pid": pid, "live": int(live) or None, "env": int(env) or None}
    filters |= {name: str(value) for name, value in flags.items() if value is not None}
    return Listing(f"/v1/sandboxes/{segment(sandbox_id)}/sessions", "sessions", SessionInfo, filters)


def operations() -> Listing[Operation]:
    """The operations of the project."""
    return Listing("/v1/operations", "operations", Operation)


def templates() -> Listing[Template]:
    """The templates that are there."""
    return Listing("/v1/templates", "templates", Template)


def get_template(reference: str) -> Flow[Template]:
    """Asks for the release behind a reference."""
    reply = yield from exchange(Request("GET", "/v1/templates/" + quote(reference, safe="/:@")))
    return either(reply.body, "template", Template)


# Operations


def get_operation(operation_id: str) -> Flow[Operation]:
    """Asks for one operation."""
    reply = yield from exchange(_operation_request(operation_id, 0))
    return either(reply.body, "operation", Operation)


def _operation_request(operation_id: str, wait: int) -> Request:
    path = f"/v1/operations/{segment(operation_id)}"
    if wait < 1:
        return Request("GET", path)
    return Request("GET", path, headers={"Prefer": f"wait={wait}"}, timeout_s=wait + 30)


def cancel_operation(operation_id: str) -> Flow[Operation]:
    """Asks that an operation be given up."""
    reply = yield from exchange(Request("POST", f"/v1/operations/{segment(operation_id)}/cancel"))
    return either(reply.body, "operation", Operation)


def wait_operation(operation_id: str, *, timeout_s: float) -> Flow[Operation]:
    """Stays until an operation has succeeded; the errors are those of `await_operation`."""
    operation = yield from get_operation(operation_id)
    return (yield from await_operation(operation, timeout_s=timeout_s))


# Sessions


def create_session(sandbox_id: str, body: Mapping[str, object]) -> Flow[Opened]:
    """Makes a command session; its process starts when somebody attaches."""
    reply = yield from exchange(
        Request(
            "POST",
            f"/v1/sandboxes/{segment(sandbox_id)}/sessions",
            json=body,
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )
    )
    return _opened(reply.body)


def get_session(session_id: str) -> Flow[SessionInfo]:
    """Asks for one session."""
    reply = yield from exchange(Request("GET", f"/v1/sessions/{segment(session_id)}"))
    return either(reply.body, "session", SessionInfo)


def renew_access(session_id: str) -> Flow[Access]:
    """Asks for a fresh token of a session."""
    reply = yield from exchange(Request("POST", f"/v1/sessions/{segment(session_id)}/token"))
    return either(reply.body, "session", Access)


def delete_session(session_id: str) -> Flow[None]:
    """Kills what runs and drops what was kept."""
    yield from exchange(Request("DELETE", f"/v1/sessions/{segment(session_id)}"))


def _opened(body: bytes) -> Opened:
    return Opened(either(body, "session", SessionInfo), either(body, "session", Access))


# Keys and templates


def create_key(body: Mapping[str, object]) -> Flow[NewKey]:
    """Makes an API key."""
    reply = yield from exchange(Request("POST", "/v1/keys", json=body, headers={"Idempotency-Key": uuid.uuid4().hex}))
    return either(reply.body, "key", NewKey)


def key_body(
    name: str,
    scopes: Sequence[str] | None,
    expires_in_s: float | None,
    project: str | None = None,
    e2b: bool = False,
) -> dict[str, object]:
    """Builds the body of a key request."""
    return compact(
        name=name,
        scopes=None if scopes is None else list(scopes),
        expires_in_s=expires_in_s,
        project=project,
        e2b=e2b or None,
    )


def get_key(key_id: str) -> Flow[Key]:
    """Asks for one API key."""
    reply = yield from exchange(Request("GET", f"/v1/keys/{segment(key_id)}"))
    return either(reply.body, "key", Key)


def own_key() -> Flow[Key]:
    """Asks for the API key that asks."""
    reply = yield from exchange(Request("GET", "/v1/key"))
    return either(reply.body, "key", Key)


def delete_key(key_id: str) -> Flow[None]:
    """Revokes an API key."""
    yield from exchange(Request("DELETE", f"/v1/keys/{segment(key_id)}"))


def session_body(
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: bool,
    pty: tuple[int, int] | None,
    timeout_s: float | None,
    retain_s: float | None,
    limits: Limits | None = None,
    timeout_scope: str | None = None,
    linger_s: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Builds the body of a session request. A string is run by the sandbox's shell, a list is an argument vector."""
    body = compact(
        env=dict(env) if env else None,
        cwd=cwd,
        user=user,
        pty={"rows": pty[0], "cols": pty[1]} if pty else None,
        timeout_s=timeout_s,
        retain_s=retain_s,
        limits=compact(**limits.as_dict()) if limits else None,
        timeout_scope=timeout_scope,
        linger_s=linger_s,
        metadata=dict(metadata) if metadata else None,
    )
    body["stdin"] = stdin
    if isinstance(command, str):
        body["command"] = command
    else:
        body["argv"] = list(command)
    return body


def segment(text: str) -> str:
    """An id as a part of a path. Raises `InvalidRequest("missing_id")`."""
    if not text:
        raise InvalidRequest("missing_id", "The id is empty.", "Give the id of the thing.")
    return quote(text, safe="")
