"""Who calls: bearer keys, looked up by their hash, kept in memory until they are revoked."""

import logging
import time

from starlette.requests import Request

from hatchway.domain.errors import Forbidden, HatchwayError, Unauthenticated
from hatchway.storage import keys
from hatchway.storage.database import Database
from hatchway.storage.rows import KeyRow

MAX_CACHED = 4096
MAX_SECRET_LENGTH = 200

log = logging.getLogger(__name__)


class Authenticator:
    """Checks keys. The secret is hashed before it is looked up, so that the time of a look-up says nothing about any secret."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[bytes, KeyRow] = {}
        self._used: dict[str, float] = {}
        self._revocations = 0

    async def key_of(self, request: Request, scope: str) -> KeyRow:
        """Returns the caller's key. Raises `Unauthenticated` with `key_missing`, `key_unknown`, `key_revoked` or `key_expired`, and `Forbidden`."""
        header = request.headers.get("authorization")
        if header is None:
            raise Unauthenticated("key_missing", "The request has no key.", "Send `Authorization: Bearer hw_…`.")
        kind, _, secret = header.partition(" ")
        secret = secret.strip()
        if kind.lower() != "bearer" or not secret.startswith(keys.SECRET_PREFIX) or len(secret) > MAX_SECRET_LENGTH:
            raise Unauthenticated(
                "key_unknown",
                "The Authorization header holds no key of Hatchway.",
                "Send `Authorization: Bearer hw_…`.",
            )
        hashed = keys.hash_secret(secret)
        key = self._cache.get(hashed)
        if key is None:
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
                self._cache[hashed] = key
        now = time.time()
        if key.revoked_at is not None:
            raise Unauthenticated("key_revoked", "The key was revoked.", "Use another one.")
        if key.expires_at is not None and key.expires_at <= now:
            raise Unauthenticated("key_expired", "The key has expired.", "Make a new one: POST /v1/keys.")
        if scope not in key.scopes:
            raise Forbidden(
                "scope_missing",
                f"The key may not do this: it lacks the scope `{scope}`.",
                f"Use a key with the scope `{scope}`.",
                scope=scope,
            )
        self._used[key.id] = now
        return key

    def forget(self, key_id: str) -> None:
        """Makes a revocation hold from now on."""
        self._revocations += 1
        self._cache = {hashed: key for hashed, key in self._cache.items() if key.id != key_id}

    async def flush(self) -> None:
        """Writes when keys were last used: now and then, not at every request."""
        used, self._used = self._used, {}
        if used:
            try:
                await self._database.write(keys.note_used, list(used.items()))
            except HatchwayError as error:
                log.warning("last use of keys not written: %s", error)
