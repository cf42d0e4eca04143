"""/v1/keys: who may call. Only keys with the scope `admin` see and make keys; /v1/key is one's own."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.plane import Plane
from hatchway.domain.errors import Conflict, Forbidden, NotFound
from hatchway.storage import idempotency, keys, projects
from hatchway.storage.database import Connection, Database
from hatchway.storage.idempotency import Answered, IdempotencyKey
from hatchway.storage.rows import KeyRow
from hatchway.wire.small_files import replace_file

DEVELOPMENT_NAME = "development"

ProjectName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]

Scope = Literal["read", "exec", "write", "admin", "installation"]
Span = Annotated[float, Meta(ge=1, le=10 * 366 * 24 * 3600.0)]
MAX_OVERLAP_S = 7 * 24 * 3600.0


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new key: of the caller's project, or of the one that `project` names, which needs the scope `installation`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}$")]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=5)] = ("read", "write")
    expires_in_s: Span | None = None
    project: ProjectName | None = None
    e2b: bool = False
    """In the form that SDKs of E2B send: `e2b_` and hexadecimal digits. It may do the same, on either API."""


class RotateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the old key goes on beside the new one, and how long the new one is valid: as long as the old one was, unless it is said."""

    overlap_s: Annotated[float, Meta(ge=0, le=MAX_OVERLAP_S)] = 0.0
    expires_in_s: Span | UnsetType | None = UNSET


class ListKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose: the key's own project, or with the scope `installation` any."""

    project: str | None = None


async def create(call: Call[CreateKey]) -> Response:
    """Makes a key; its secret is in this answer and nowhere else. What a key may not do, no key that it makes may."""
    body = call.body
    project = _project(call, body.project)
    if "installation" in body.scopes:
        require_scope(call.key, "installation")
    expires_at = None if body.expires_in_s is None else time.time() + body.expires_in_s
    scopes = tuple(sorted(set(body.scopes), key=keys.SCOPES.index))
    row, secret = await call.plane.database.write(
        _create, call.project, project, body.name, scopes, expires_at, body.e2b, call.idempotency
    )
    return answer(views.NewKeyAnswer(key=views.NewKey(**views.key_fields(row), key=secret)), 201)


async def rotate(call: Call[RotateKey]) -> Response:
    """Makes a key in the place of another, which ends now or after the overlap; its tokens end with it."""
    old = await call.plane.database.read(keys.get, _seen(call), _id(call))
    if "installation" in old.scopes:
        require_scope(call.key, "installation")
    wanted, now = call.body.expires_in_s, time.time()
    if wanted is UNSET:
        wanted = None if old.expires_at is None else old.expires_at - old.created_at
    expires_at = None if wanted is None else now + wanted
    row, secret = await call.plane.database.write(
        _rotate, call.project, _seen(call), old.id, call.body.overlap_s, expires_at, call.idempotency
    )
    await ended(call.plane, old.id)
    return answer(views.NewKeyAnswer(key=views.NewKey(**views.key_fields(row), key=secret)), 201)


async def ended(plane: Plane, *key_ids: str) -> None:
    """Makes the end of keys, which is stored, hold everywhere: for requests, open event streams, and on the nodes for their tokens."""
    plane.auth.forget(*key_ids)
    await plane.nodes.configure_all()


async def _repeat(_: Call[Any], earlier: Answered) -> Response:
    raise Conflict(
        "key_already_made",
        "This Idempotency-Key made a key already; its secret was shown then and is stored nowhere.",
        "If the answer was lost, revoke that key and make another with a new Idempotency-Key.",
        key=earlier.answer["key"],
    )


def _seen(call: Call[Any]) -> str | None:
    """The project whose keys the caller may deal with by their ids; None: of any."""
    return None if "installation" in call.key.scopes else call.project


def _project(call: Call[Any], named: str | None) -> str:
    """The project that a request is about. One that names another than its key's needs the scope, whether that project is there or not."""
    if named not in (None, call.project):
        require_scope(call.key, "installation")
    return named or call.project


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's keys."""
    query: ListKeys = call.query
    project = _project(call, query.project)
    await call.plane.database.read(projects.get, project)
    rows = await call.plane.database.read(keys.list_all, project)
    return answer(views.KeyPage(keys=tuple(views.Key(**views.key_fields(row)) for row in rows), next_cursor=None))


async def get(call: Call[NoBody]) -> Response:
    """Shows one key; a revoked one is unknown."""
    row = await call.plane.database.read(keys.get, _seen(call), _id(call))
    if row.revoked_at is not None:
        raise keys.unknown(row.id)
    return answer(views.KeyAnswer(key=views.Key(**views.key_fields(row))))


async def own(call: Call[NoBody]) -> Response:
    """Shows the key that asks: its project, and what it may do."""
    return answer(views.KeyAnswer(key=views.Key(**views.key_fields(call.key))))


async def delete(call: Call[NoBody]) -> Response:
    """Revokes a key, and with it its open event streams and its tokens on the data plane."""
    row = await call.plane.database.write(_revoke, _seen(call), _id(call), "installation" in call.key.scopes)
    await ended(call.plane, row.id)
    return answer(None, 204)


def _revoke(connection: Connection, project: str | None, key_id: str, any_scope: bool) -> KeyRow:
    if not any_scope and "installation" in keys.get(connection, project, key_id).scopes:
        raise Forbidden(
            "scope_missing",
            "Keys of the installation are revoked by keys of the installation.",
            "Use a key with the scope `installation`.",
            scope="installation",
        )
    return keys.revoke(connection, project, key_id)


def _rotate(
    connection: Connection,
    caller: str,
    project: str | None,
    key_id: str,
    overlap_s: float,
    expires_at: float | None,
    key: IdempotencyKey | None,
) -> tuple[KeyRow, str]:
    idempotency.check(connection, caller, key)
    row, secret = keys.rotate(connection, project, key_id, overlap_s=overlap_s, expires_at=expires_at)
    idempotency.keep(connection, caller, key, {"key": row.id})
    return row, secret


def _create(
    connection: Connection,
    caller: str,
    project: str,
    name: str,
    scopes: tuple[str, ...],
    expires_at: float | None,
    e2b: bool,
    key: IdempotencyKey | None,
) -> tuple[KeyRow, str]:
    idempotency.check(connection, caller, key)
    projects.hold(connection, project)
    row, secret = keys.create(connection, project=project, name=name, scopes=scopes, expires_at=expires_at, e2b=e2b)
    idempotency.keep(connection, caller, key, {"key": row.id})
    return row, secret


def _id(call: Call[Any]) -> str:
    return requests.check_id(call.path["id"], "key", NotFound)


async def ensure_development_key(database: Database, path: Path) -> str:
    """Returns the secret of the development key, which lies in the file `path` (0600); makes both where one is missing or has ended.

    It may do everything: in the project `default`, and with the installation. Raises `OSError` when the file cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd) as file:
            secret = file.read(512).strip()
        row = await database.read(keys.find_by_secret, secret)
        if row is not None and row.revoked_at is None and (row.expires_at is None or row.expires_at > time.time()):
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
        errors=(404, 409),
        repeated=_repeat,
    ),
    Endpoint(
        "GET",
        "/v1/keys",
        list_,
        "List keys",
        {200: views.KeyPage},
        "keys",
        scope="admin",
        query=ListKeys,
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/keys/{id}/rotate",
        rotate,
        "Make a key in the place of another",
        {201: views.NewKeyAnswer},
        "keys",
        scope="admin",
        body=RotateKey,
        errors=(404, 409),
        repeated=_repeat,
    ),
    Endpoint("GET", "/v1/key", own, "Show the key that asks", {200: views.KeyAnswer}, "keys"),
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
