"""The `Idempotency-Key` header: a repeated request does nothing again and names the same things."""

import hashlib

from starlette.requests import Request

from hatchway.domain.errors import InvalidRequest
from hatchway.storage.idempotency import IdempotencyKey

MAX_LENGTH = 255
HEADER = "Idempotency-Key"
REPLAYED = {"Idempotency-Replayed": "true"}


def key_of(request: Request, body: bytes) -> IdempotencyKey | None:
    """The key of a request, with a digest of what is asked; None without the header. Raises `invalid_idempotency_key`."""
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_LENGTH or not key.isascii() or not key.isprintable():
        raise InvalidRequest(
            "invalid_idempotency_key",
            "The Idempotency-Key is empty, too long, or has other than printable ASCII characters.",
            f"Send 1 to {MAX_LENGTH} characters, for example a UUID.",
            field=HEADER,
        )
    digest = hashlib.sha256()
    for part in (request.method.encode(), request.url.path.encode(), body):
        digest.update(len(part).to_bytes(8, "big") + part)
    return IdempotencyKey(key=key, request_hash=digest.digest())
