"""Signatures of E2B's links to files: whoever has one may read, or write, one path without a token."""

import base64
import hashlib
import hmac
import time

PREFIX = "v1_"
READ, WRITE = "read", "write"


def sign(path: str, operation: str, user: str, token: str, expiration: int | None) -> str:
    """The signature of a path as it stands in the query; `user` is "" where none is named, `expiration` in Unix seconds."""
    signed = f"{path}:{operation}:{user}:{token}" + ("" if expiration is None else f":{expiration}")
    digest = hashlib.sha256(signed.encode()).digest()
    return PREFIX + base64.b64encode(digest).decode().rstrip("=")


def refusal(
    given: str | None,
    path: str,
    operation: str,
    user: str,
    token: str,
    expiration: int | None,
    now: float | None = None,
) -> str | None:
    """Why a signature gives no right, in the words that SDKs know; None: it does."""
    if not given:
        return "missing signature query parameter"
    if not hmac.compare_digest(given.encode(), sign(path, operation, user, token, expiration).encode()):
        return "invalid signature"
    if expiration is not None and expiration < (time.time() if now is None else now):
        return "signature is already expired"
    return None
