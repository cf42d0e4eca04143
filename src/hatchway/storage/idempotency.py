"""Idempotency keys: the answer that a key got, kept in the transaction that did what was asked."""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, RowMapping, delete, insert, select

from hatchway.domain.errors import Unprocessable
from hatchway.storage.tables import idempotency_keys

KEPT_S = 24 * 3600.0


class IdempotencyKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a client sent: its key, and a digest of method, path and body."""

    key: str
    request_hash: bytes


class Answered(Exception):
    """The key was used before, for the same request: `answer` is what was kept of it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self.answer = answer


def look(connection: Connection, project: str, key: IdempotencyKey) -> None:
    """Raises `Answered` for a repetition and `Unprocessable("idempotency_key_reused")` when another request used the key. Only reads."""
    row = _find(connection, project, key)
    if row is not None and row["expires_at"] >= time.time():
        raise _used(row, key)


def check(connection: Connection, project: str, key: IdempotencyKey | None) -> None:
    """Like `look`, in the transaction that does what is asked: afterwards the key is free to be kept."""
    row = None if key is None else _find(connection, project, key)
    if key is None or row is None:
        return
    if row["expires_at"] >= time.time():
        raise _used(row, key)
    connection.execute(
        delete(idempotency_keys).where(idempotency_keys.c.project == project, idempotency_keys.c.key == key.key)
    )


def _find(connection: Connection, project: str, key: IdempotencyKey) -> RowMapping | None:
    query = select(idempotency_keys.c.request_hash, idempotency_keys.c.answer, idempotency_keys.c.expires_at).where(
        idempotency_keys.c.project == project, idempotency_keys.c.key == key.key
    )
    return connection.execute(query).mappings().one_or_none()


def _used(row: RowMapping, key: IdempotencyKey) -> Exception:
    if row["request_hash"] == key.request_hash:
        return Answered(row["answer"])
    return Unprocessable(
        "idempotency_key_reused",
        "This Idempotency-Key came with another request before.",
        "Use a new key for every request that is not a repetition.",
    )


def keep(connection: Connection, project: str, key: IdempotencyKey | None, answer: dict[str, Any]) -> None:
    """Stores the answer beside what the transaction did."""
    if key is None:
        return
    now = time.time()
    connection.execute(
        insert(idempotency_keys),
        {
            "project": project,
            "key": key.key,
            "request_hash": key.request_hash,
            "answer": answer,
            "created_at": now,
            "expires_at": now + KEPT_S,
        },
    )
