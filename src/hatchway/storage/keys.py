"""API keys. Of a secret only its SHA-256 is stored: it holds 190 random bits, so that a slow hash would add nothing."""

import hashlib
import secrets
import time
from collections.abc import Collection, Iterable

import msgspec
from sqlalchemy import Connection, RowMapping, bindparam, insert, select, update

from hatchway.domain.errors import NotFound
from hatchway.domain.ids import ALPHABET, new_id
from hatchway.domain.key_forms import E2B_OCTETS, E2B_PREFIX, LENGTH, NATIVE_PREFIX
from hatchway.storage import outbox
from hatchway.storage.rows import KeyRow
from hatchway.storage.tables import api_keys, projects

DEFAULT_PROJECT = "default"
SCOPES = ("read", "exec", "write", "admin", "installation")
"""`read`: GET; `exec`: what is done inside sandboxes that are there (sessions, tokens); `write`: that, and everything else but what
follows; `admin`: keys and settings of its project; `installation`: projects, their quotas, keys of any project, events of the nodes."""
ADMITTED = {"exec": ("exec", "write"), "admin": ("admin", "installation")}
"""Which scopes do where one is asked for; of those that are not here, itself alone."""

SHOWN_LENGTH = 9

_COLUMNS = [column for column in api_keys.c if column.name != "secret_hash"]
_BY_HASH = select(*_COLUMNS).where(api_keys.c.secret_hash == bindparam("hash"))


def hash_secret(secret: str) -> bytes:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def ensure_project(connection: Connection, name: str) -> None:
    """Makes the project when it is not there."""
    if connection.execute(select(projects.c.name).where(projects.c.name == name)).one_or_none() is None:
        connection.execute(insert(projects), {"name": name, "created_at": time.time()})


def create(
    connection: Connection,
    *,
    project: str,
    name: str,
    scopes: tuple[str, ...],
    expires_at: float | None = None,
    development: bool = False,
    e2b: bool = False,
) -> tuple[KeyRow, str]:
    """Stores a new key and returns it with its secret, which nobody can find out again. `e2b`: one that SDKs of E2B send too."""
    if e2b:
        secret = E2B_PREFIX + secrets.token_hex(E2B_OCTETS)
    else:
        secret = NATIVE_PREFIX + "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
    row = KeyRow(
        id=new_id(),
        project=project,
        name=name,
        prefix=secret[:SHOWN_LENGTH],
        scopes=scopes,
        created_at=time.time(),
        expires_at=expires_at,
        last_used_at=None,
        revoked_at=None,
        development=development,
    )
    connection.execute(insert(api_keys), {**msgspec.structs.asdict(row), "secret_hash": hash_secret(secret)})
    outbox.append(connection, project, "key.created", row.id, {"name": name, "scopes": list(scopes)})
    return row, secret


def find_by_secret(connection: Connection, secret: str) -> KeyRow | None:
    """The key of this secret, revoked and expired ones included; None when there is none."""
    row = connection.execute(_BY_HASH, {"hash": hash_secret(secret)}).mappings().one_or_none()
    return None if row is None else _row(row)


def list_all(connection: Connection, project: str) -> list[KeyRow]:
    """The project's keys, oldest first, without the revoked ones."""
    query = (
        select(*_COLUMNS)
        .where(api_keys.c.project == project, api_keys.c.revoked_at.is_(None))
        .order_by(api_keys.c.created_at, api_keys.c.id)
    )
    return [_row(row) for row in connection.execute(query).mappings()]


def development_keys(connection: Connection) -> list[KeyRow]:
    """Keys of any project that were made for development and still work."""
    query = select(*_COLUMNS).where(api_keys.c.development.is_(True), api_keys.c.revoked_at.is_(None))
    return [_row(row) for row in connection.execute(query).mappings()]


def find(connection: Connection, key_id: str) -> KeyRow | None:
    """The key of any project, or None."""
    row = connection.execute(select(*_COLUMNS).where(api_keys.c.id == key_id)).mappings().one_or_none()
    return None if row is None else _row(row)


def get(connection: Connection, project: str | None, key_id: str) -> KeyRow:
    """A key of the project, of any where that is None. Raises `NotFound("unknown_key")`."""
    row = find(connection, key_id)
    if row is None or project not in (None, row.project):
        raise unknown(key_id)
    return row


def unknown(key_id: str) -> NotFound:
    """The error of a key that is not there any more, or is another project's."""
    return NotFound("unknown_key", f"There is no key {key_id}.", "GET /v1/keys lists those that there are.")


def may(scopes: Collection[str], wanted: str) -> bool:
    """Whether a key with `scopes` may do what asks for the scope `wanted`."""
    return any(scope in scopes for scope in ADMITTED.get(wanted, (wanted,)))


def revoke(connection: Connection, project: str | None, key_id: str) -> KeyRow:
    """Ends a key for ever. Idempotent. Raises what `get` does."""
    row = get(connection, project, key_id)
    if row.revoked_at is None:
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=time.time()))
        outbox.append(connection, row.project, "key.revoked", key_id, {"name": row.name})
    return get(connection, project, key_id)


def revoke_all(connection: Connection, project: str) -> list[str]:
    """Ends every key of a project; returns their ids."""
    return [revoke(connection, project, row.id).id for row in list_all(connection, project)]


def rotate(
    connection: Connection, project: str | None, key_id: str, *, overlap_s: float, expires_at: float | None
) -> tuple[KeyRow, str]:
    """Makes a key with name, scopes and project of another one, which ends `overlap_s` from now, or earlier if it would have anyway.

    Returns the new key with its secret. Raises `NotFound("unknown_key")`, for a key that was revoked too.
    """
    row = get(connection, project, key_id)
    now = time.time()
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        raise unknown(key_id)
    made, secret = create(
        connection,
        project=row.project,
        name=row.name,
        scopes=row.scopes,
        expires_at=expires_at,
        e2b=row.prefix.startswith(E2B_PREFIX),
    )
    outbox.append(connection, row.project, "key.rotated", key_id, {"name": row.name, "key": made.id})
    if overlap_s <= 0:
        revoke(connection, project, key_id)
    else:
        ends = min(now + overlap_s, row.expires_at or now + overlap_s)
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(expires_at=ends))
    return made, secret


def note_used(connection: Connection, used: Iterable[tuple[str, float]]) -> None:
    """Writes when keys were last used: (id, time)."""
    for key_id, when in used:
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(last_used_at=when))


def _row(row: RowMapping) -> KeyRow:
    values = dict(row)
    values["scopes"] = tuple(values["scopes"])
    return KeyRow(**values)
