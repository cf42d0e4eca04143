"""Tokens of sandboxes. They follow from a secret and the sandbox's id, so that they stay what they are through pause, resume and restart."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from hatchway.domain.errors import Forbidden
from hatchway.wire.small_files import replace_file

MIN_SECRET = 16
SECRET_OCTETS = 32
DIGITS = 64
"""Of what is derived, in hexadecimal."""
NAME = "secret"
"""File in the role's folder."""


class Identity:
    """Derives the tokens of sandboxes from the secret of an installation."""

    def __init__(self, secret: bytes) -> None:
        """Raises `Forbidden("secret_too_short")`."""
        if len(secret) < MIN_SECRET:
            raise Forbidden(
                "secret_too_short",
                f"The secret that tokens of E2B's sandboxes are derived from has {len(secret)} octets.",
                "`openssl rand -hex 32` makes one.",
            )
        self._secret = secret

    def envd_token(self, sandbox_id: str) -> str:
        """What `X-Access-Token` must be: the right to commands and files of the sandbox, whose id it begins with."""
        return sandbox_id + self._derive("envd", sandbox_id)

    def sandbox_of(self, envd_token: str) -> str | None:
        """The sandbox that a token gives the right to; None for what is no token of this installation."""
        sandbox_id = envd_token[:-DIGITS]
        return sandbox_id if sandbox_id and same(envd_token, self.envd_token(sandbox_id)) else None

    def traffic_token(self, sandbox_id: str) -> str:
        """What `E2B-Traffic-Access-Token` must be, where the ports of the sandbox are not public."""
        return self._derive("traffic", sandbox_id)

    def _derive(self, kind: str, sandbox_id: str) -> str:
        return hmac.new(self._secret, f"{kind}\0{sandbox_id}".encode(), hashlib.sha256).hexdigest()


def same(given: str | None, wanted: str) -> bool:
    """Whether a token that came is the one that is wanted; takes as long whichever it is."""
    return given is not None and hmac.compare_digest(given.encode(), wanted.encode())


def load(folder: Path) -> bytes:
    """The secret of this installation, made at first. Raises `OSError`."""
    path = folder / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        secret = secrets.token_bytes(SECRET_OCTETS)
        replace_file(path, secret)
        return secret
    with os.fdopen(fd, "rb") as file:
        return file.read(4096)
