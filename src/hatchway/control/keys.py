"""/v1/keys: who may call. Only keys with the scope `admin` see and make keys."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.errors import Conflict, Forbidden, NotFound
from hatchway.storage import idempotency, keys
from hatchway.storage.database import Connection, Database
from hatchway.storage.idempotency import Answered, IdempotencyKey
from hatchway.storage.rows import KeyRow
from hatchway.wire.small_files import replace_file

DEVELOPMENT_NAME = "development"

Scope = Literal["read", "write", "admin"]


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key of the caller's project."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}$")]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=3)] = ("read", "write")
    expires_in_s: Annotated[float, Meta(ge=1, le=10 * 366 * 24 * 3600.0)] | None = None


async def create(call: Call[CreateKey]) -> Response:
    """Makes a key; its secret is in this answer and nowhere else."""
    body = call.body
    expires_at = None if body.expires_in_s is None else time.time() + body.expires_in_s
    scopes = tuple(sorted(set(body.scopes), key=keys.SCOPES.index))
    try:
        row, secret = await call.plane.database.write(
            _create, call.project, body.name, scopes, expires_at, call.idempotency
        )
    except Answered as earlier:
        raise Conflict(
            "key_already_made",
            "This Idempotency-Key made a key already; its secret was shown then and is stored nowhere.",
            "If the answer was lost, revoke that key and make another with a new Idempotency-Key.",
            key=earlier.answer["key"],
        ) from None
    return answer(views.NewKeyAnswer(key=views.NewKey(**views.key_fields(row), key=secret)), 201)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's keys."""
    rows = await call.plane.database.read(keys.list_all, call.project)
    return answer(views.KeyPage(keys=tuple(views.Key(**views.key_fields(row)) for row in rows), next_cursor=None))


async def get(call: Call[NoBody]) -> Response:
    """Shows one key; a revoked one is unknown."""
    row = await call.plane.database.read(keys.get, call.project, _id(call))
    if row.revoked_at is not None:
        raise NotFound("unknown_key", f"There is no key {row.id}.", "GET /v1/keys lists those that there are.")
    return answer(views.KeyAnswer(key=views.Key(**views.key_fields(row))))


async def delete(call: Call[NoBody]) -> Response:
    """Revokes a key, from the next request on."""
    row = await call.plane.database.write(keys.revoke, call.project, _id(call))
    call.plane.auth.forget(row.id)
    return answer(None, 204)


def _create(
    connection: Connection,
    project: str,
    name: str,
    scopes: tuple[str, ...],
    expires_at: float | None,
    key: IdempotencyKey | None,
) -> tuple[KeyRow, str]:
    idempotency.check(connection, project, key)
    row, secret = keys.create(connection, project=project, name=name, scopes=scopes, expires_at=expires_at)
    idempotency.keep(connection, project, key, {"key": row.id})
    return row, secret


def _id(call: Call[Any]) -> str:
    return requests.check_id(call.path["id"], "key", NotFound)


async def ensure_development_key(database: Database, path: Path) -> str:
    """Returns the secret of the development key, which lies in the file `path` (0600); makes both where one is missing or revoked.

    It may do everything in the project `default`. Raises `OSError` when the file cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd) as file:
            secret = file.read(512).strip()
        row = await database.read(keys.find_by_secret, secret)
        if row is not None and row.revoked_at is None:
            return secret
    secret = await database.write(_new_development_key, alone=not database.shared)
    replace_file(path, f"{secret}\n".encode())
    return secret


async def no_development_keys(database: Database) -> None:
    """Raises `Forbidden("development_keys")` where a key that was made for development still works."""
    if await database.read(keys.development_keys):
        raise Forbidden(
            "development_keys",
            "A key that was made for development still works here.",
            "`hatchway keys revoke --development --offline` revokes it.",
        )


def _new_development_key(connection: Connection, *, alone: bool) -> str:
    """Where this process is `alone`, the file of an earlier one was lost: nobody can use that one any more."""
    keys.ensure_project(connection, keys.DEFAULT_PROJECT)
    for row in keys.list_all(connection, keys.DEFAULT_PROJECT):
        if row.development and alone:
            keys.revoke(connection, keys.DEFAULT_PROJECT, row.id)
    _, secret = keys.create(
        connection, project=keys.DEFAULT_PROJECT, name=DEVELOPMENT_NAME, scopes=keys.SCOPES, development=True
    )
    return secret


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/keys",
        create,
        "Make a key",
        {201: views.NewKeyAnswer},
        "keys",
        scope="admin",
        body=CreateKey,
        errors=(409,),
        idempotent=True,
    ),
    Endpoint("GET", "/v1/keys", list_, "List keys", {200: views.KeyPage}, "keys", scope="admin"),
    Endpoint("GET", "/v1/keys/{id}", get, "Show a key", {200: views.KeyAnswer}, "keys", scope="admin", errors=(404,)),
    Endpoint(
        "DELETE",
        "/v1/keys/{id}",
        delete,
        "Revoke a key",
        {204: None},
        "keys",
        scope="admin",
        body=NoBody,
        errors=(404,),
    ),
)
