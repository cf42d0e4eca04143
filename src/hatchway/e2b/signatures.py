"""Signatures of E2B's links to files: whoever has one may read, or write, one path without a token."""

import base64
import hashlib
import hmac
import re
import time

PREFIX = "v1_"
READ, WRITE = "read", "write"
_SIGNATURE = re.compile(r"v1_[A-Za-z0-9+/]{43}", re.ASCII)


class Signer:
    """Signs one request with the token of one sandbox after the other: what is the same for all is hashed once, however long it is."""

    def __init__(self, path: str, operation: str, user: str, expiration: int | None) -> None:
        self._begun = hashlib.sha256(f"{path}:{operation}:{user}:".encode())
        self._rest = "" if expiration is None else f":{expiration}"

    def sign(self, token: str) -> str:
        """The signature with this token."""
        digest = self._begun.copy()
        digest.update(f"{token}{self._rest}".encode())
        return PREFIX + base64.b64encode(digest.digest()).decode().rstrip("=")


def looks_signed(given: str) -> bool:
    """Whether a text could be a signature at all."""
    return _SIGNATURE.fullmatch(given) is not None


def sign(path: str, operation: str, user: str, token: str, expiration: int | None) -> str:
    """The signature of a path as it stands in the query; `user` is "" where none is named, `expiration` in Unix seconds."""
    return Signer(path, operation, user, expiration).sign(token)


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
