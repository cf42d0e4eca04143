"""Rows as values. A row that came out of a transaction is a snapshot: nobody else sees changes to it."""

from typing import Any

import msgspec
from sqlalchemy import RowMapping

from hatchway.domain.lifecycle import State, Verb


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox: what is wanted of it, what is known of it, and the operation in flight."""

    id: str
    project: str
    name: str | None
    state: State
    desired: State
    version: int
    generation: int
    node_id: str
    observed_sequence: int
    operation_id: str | None
    template: str
    template_digest: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    metadata: dict[str, str]
    env: dict[str, str]
    require_isolation: str | None
    isolation: str | None
    boot_id: str | None
    cause: str | None
    reason: str
    last_process_id: int
    created_at: float
    updated_at: float
    deleted_at: float | None


class OperationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One asynchronous request, from its acceptance to its end; `target` is the sandbox's id."""

    id: str
    project: str
    target: str
    kind: Verb
    status: str
    phase: str
    progress: float | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    created_at: float
    started_at: float | None
    finished_at: float | None


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One command session. `spec` is a `wire.node.SessionSpec`, `status` the last `wire.node.SessionStatus` heard, as plain data."""

    id: str
    project: str
    sandbox_id: str
    process_id: int
    spec: dict[str, Any]
    state: str
    status: dict[str, Any] | None
    created_at: float
    updated_at: float


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One API key, without its secret."""

    id: str
    project: str
    name: str
    prefix: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None
    development: bool


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the outbox; `subject` is the id of what it is about."""

    sequence: int
    project: str
    kind: str
    subject: str
    data: dict[str, Any]
    created_at: float


def sandbox(row: RowMapping) -> SandboxRow:
    """From a row of the table."""
    values = dict(row)
    values["state"] = State(values["state"])
    values["desired"] = State(values["desired"])
    return SandboxRow(**values)


def operation(row: RowMapping) -> OperationRow:
    """From a row of the table."""
    values = dict(row)
    values["kind"] = Verb(values["kind"])
    return OperationRow(**values)
