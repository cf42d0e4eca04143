"""Tokens of sandboxes, and what of all tokens was revoked before its time.

A token of a sandbox is stored from its making until it expires, so that it can be listed and revoked by its id. A token of a session
is stored nowhere: there are as many as commands. It ends with its key, with its session, or with all tokens of its sandbox.
"""

import time

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from hatchway.domain.errors import NotFound
from hatchway.domain.lifecycle import State
from hatchway.storage import outbox, sandboxes
from hatchway.storage.tables import api_keys, token_cutoffs, tokens
from hatchway.storage.tables import sandboxes as sandboxes_table

LIVES_S = 24 * 3600.0
"""No token lives longer."""
MAX_LISTED = 1000


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a sandbox, without the token itself. `key_id` is the API key that asked for it."""

    id: str
    project: str
    sandbox_id: str
    key_id: str
    scopes: tuple[str, ...]
    created_at: float
    expires_at: float
    revoked_at: float | None


class Revocations(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has to be told: ids of tokens, ids of API keys, and by sandbox the time up to which its tokens are void."""

    tokens: tuple[str, ...]
    keys: tuple[str, ...]
    cutoffs: dict[str, float]


def create(connection: Connection, row: TokenRow) -> None:
    """Stores a token that is about to be given out."""
    connection.execute(insert(tokens), msgspec.structs.asdict(row))
    data = {"token": row.id, "scopes": list(row.scopes), "expires_at": row.expires_at, "key": row.key_id}
    outbox.append(connection, row.project, "token.created", row.sandbox_id, data)


def list_of(connection: Connection, project: str, sandbox_id: str) -> list[TokenRow]:
    """The sandbox's tokens that have neither expired nor been revoked, newest first, at most `MAX_LISTED`. Raises `NotFound("unknown_sandbox")`."""
    sandboxes.get(connection, project, sandbox_id)
    query = (
        select(tokens)
        .where(tokens.c.sandbox_id == sandbox_id, tokens.c.expires_at > time.time(), tokens.c.revoked_at.is_(None))
        .order_by(tokens.c.created_at.desc(), tokens.c.id.desc())
        .limit(MAX_LISTED)
    )
    return [_row(dict(row)) for row in connection.execute(query).mappings()]


def revoke(connection: Connection, project: str, token_id: str) -> TokenRow:
    """Ends a token before its time. Idempotent. Raises `NotFound("unknown_token")`, also for one that has expired long ago."""
    query = select(tokens).where(tokens.c.id == token_id, tokens.c.project == project)
    found = connection.execute(query).mappings().one_or_none()
    if found is None:
        raise NotFound(
            "unknown_token",
            f"There is no token {token_id}.",
            "GET /v1/sandboxes/{id}/tokens lists those of a sandbox; those of sessions end with DELETE of the same.",
        )
    row = _row(dict(found))
    if row.revoked_at is None:
        row = msgspec.structs.replace(row, revoked_at=time.time())
        connection.execute(update(tokens).where(tokens.c.id == token_id).values(revoked_at=row.revoked_at))
        outbox.append(connection, project, "token.revoked", row.sandbox_id, {"token": token_id})
    return row


def revoke_of_sandbox(connection: Connection, project: str, sandbox_id: str) -> None:
    """Ends every token of a sandbox, those of its sessions among them; new ones can be made at once. Raises `NotFound("unknown_sandbox")`."""
    sandboxes.get(connection, project, sandbox_id)
    now = time.time()
    connection.execute(
        update(tokens).where(tokens.c.sandbox_id == sandbox_id, tokens.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    done = connection.execute(update(token_cutoffs).where(token_cutoffs.c.sandbox_id == sandbox_id).values(before=now))
    if done.rowcount == 0:
        connection.execute(insert(token_cutoffs), {"sandbox_id": sandbox_id, "project": project, "before": now})
    outbox.append(connection, project, "token.revoked", sandbox_id, {"token": None})


def revocations(connection: Connection, now: float | None = None) -> Revocations:
    """What is void at this moment although it has not expired."""
    now = time.time() if now is None else now
    lately = now - LIVES_S
    cut = (
        select(token_cutoffs.c.sandbox_id, token_cutoffs.c.before)
        .join(sandboxes_table, sandboxes_table.c.id == token_cutoffs.c.sandbox_id)
        .where(token_cutoffs.c.before > lately, sandboxes_table.c.state != State.DELETED)
        .order_by(token_cutoffs.c.sandbox_id)
    )
    cutoffs = {str(row.sandbox_id): float(row.before) for row in connection.execute(cut)}
    single = (
        select(tokens.c.id, tokens.c.sandbox_id, tokens.c.created_at)
        .where(tokens.c.revoked_at.is_not(None), tokens.c.expires_at > now)
        .order_by(tokens.c.id)
    )
    ended = select(api_keys.c.id).where(
        (api_keys.c.revoked_at > lately) | ((api_keys.c.expires_at > lately) & (api_keys.c.expires_at <= now))
    )
    return Revocations(
        # Those that a cut-off covers need not be named one by one.
        tokens=tuple(
            row.id for row in connection.execute(single) if row.created_at > cutoffs.get(row.sandbox_id, -1.0)
        ),
        keys=tuple(connection.execute(ended.order_by(api_keys.c.id)).scalars()),
        cutoffs=cutoffs,
    )


def purge(connection: Connection, now: float) -> None:
    """Forgets what has expired."""
    connection.execute(delete(tokens).where(tokens.c.expires_at < now))
    connection.execute(delete(token_cutoffs).where(token_cutoffs.c.before < now - LIVES_S))


def _row(values: dict[str, object]) -> TokenRow:
    values["scopes"] = tuple(values["scopes"])  # type: ignore[arg-type]  # a list of JSON
    return TokenRow(**values)  # type: ignore[arg-type]  # the columns are the fields
