"""Who calls: bearer keys, looked up by their hash, kept in memory until they are revoked."""

import asyncio
import contextlib
import logging
import time

from starlette.requests import Request

from hatchway.domain.errors import Forbidden, HatchwayError, Unauthenticated
from hatchway.domain.key_forms import PREFIXES
from hatchway.storage import keys
from hatchway.storage.database import Database
from hatchway.storage.rows import KeyRow
from hatchway.wire import tracing

MAX_CACHED = 4096
MAX_SECRET_LENGTH = 200
TRUSTED_S = 2.0
"""How long a key that was looked up is believed: another control process may have revoked it meanwhile."""
TRUSTED_ALONE_S = 60.0
"""The same where no other process can: what is revoked here is forgotten here (`Authenticator.forget`)."""

LOOK_EVERY_S = 15.0
"""How often the key of an open stream is looked at though nobody said that it changed."""

log = logging.getLogger(__name__)


class Authenticator:
    """Checks keys. The secret is hashed before it is looked up, so that the time of a look-up says nothing about any secret."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[bytes, tuple[KeyRow, float]] = {}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._used: dict[str, float] = {}
        self._revocations = 0
        self._trusted_s = TRUSTED_S if database.shared else TRUSTED_ALONE_S

    async def key_of(self, request: Request, scope: str) -> KeyRow:
        """Returns the caller's key. Raises `Unauthenticated` with `key_missing`, `key_unknown`, `key_revoked` or `key_expired`, and `Forbidden`."""
        header = request.headers.get("authorization")
        if header is None:
            raise Unauthenticated("key_missing", "The request has no key.", "Send `Authorization: Bearer hw_…`.")
        kind, _, secret = header.partition(" ")
        secret = secret.strip()
        if kind.lower() != "bearer" or not secret.startswith(PREFIXES) or len(secret) > MAX_SECRET_LENGTH:
            raise Unauthenticated(
                "key_unknown",
                "The Authorization header holds no key of Hatchway.",
                "Send `Authorization: Bearer hw_…`.",
            )
        hashed = keys.hash_secret(secret)
        key, looked_up = self._cache.get(hashed, (None, 0.0))
        if key is None or time.monotonic() - looked_up > self._trusted_s:
            revocations = self._revocations
            key = await self._database.read(keys.find_by_secret, secret)
            if key is None:
                raise Unauthenticated(
                    "key_unknown", "There is no such key.", "Check the key, or make one: POST /v1/keys."
                )
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            # What was read before a revocation, and arrives behind it, must not be kept.
            if key.revoked_at is None and revocations == self._revocations:
                self._cache[hashed] = (key, time.monotonic())
        tracing.bind(project=key.project, key_id=key.id)
        now = time.time()
        if key.revoked_at is not None:
            raise Unauthenticated("key_revoked", "The key was revoked.", "Use another one.")
        if key.expires_at is not None and key.expires_at <= now:
            raise Unauthenticated("key_expired", "The key has expired.", "Make a new one: POST /v1/keys.")
        require_scope(key, scope)
        self._used[key.id] = now
        return key

    def forget(self, *key_ids: str) -> None:
        """Makes a revocation, or an earlier expiry, hold from now on; what is open by those keys looks at them again."""
        self._revocations += 1
        self._cache = {hashed: found for hashed, found in self._cache.items() if found[0].id not in key_ids}
        for key_id in key_ids:
            for watcher in self._watchers.get(key_id, ()):
                watcher.set()

    async def until_ended(self, key: KeyRow) -> None:
        """Returns when the key has expired or was revoked: for what is open by the right of it."""
        changed = asyncio.Event()
        self._watchers.setdefault(key.id, set()).add(changed)
        try:
            while True:
                # Now and then, too, and first of all: it may have been revoked since it was checked, or by another process.
                changed.clear()
                row = await self._database.read(keys.find, key.id)
                now = time.time()
                if row is None or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
                    return
                left = LOOK_EVERY_S if row.expires_at is None else min(LOOK_EVERY_S, row.expires_at - now)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left)
        finally:
            watchers = self._watchers[key.id]
            watchers.discard(changed)
            if not watchers:
                del self._watchers[key.id]

    async def flush(self) -> None:
        """Writes when keys were last used: now and then, not at every request."""
        used, self._used = self._used, {}
        if used:
            try:
                await self._database.write(keys.note_used, list(used.items()))
            except HatchwayError as error:
                log.warning("last use of keys not written: %s", error)


def require_scope(key: KeyRow, scope: str) -> None:
    """Raises `Forbidden("scope_missing")`."""
    if not keys.may(key.scopes, scope):
        raise Forbidden(
            "scope_missing",
            f"The key may not do this: it lacks the scope `{scope}`.",
            f"Use a key with the scope `{scope}`.",
            scope=scope,
        )
