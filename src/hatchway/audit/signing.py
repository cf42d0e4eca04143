"""The journal's key: signs heads of the chain and what retention removes. Its public half is what a check is pinned to."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hatchway.domain.errors import Unavailable
from hatchway.wire.small_files import replace_file

KEY_FILE = "signing.key"
PUBLIC_FILE = "signing.pub"


class Signer:
    """The writer's key, made the first time. Raises `Unavailable("audit_key")` for a file that is none, or that others may read."""

    def __init__(self, folder: Path) -> None:
        file = folder / KEY_FILE
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            replace_file(file, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode())
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as opened:
            if os.fstat(fd).st_mode & 0o077:
                raise Unavailable("audit_key", f"Others may read {file}.", f"`chmod 600 {file}`.")
            content = opened.read(256)
        try:
            self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(content.decode("ascii").strip()))
        except ValueError:
            raise Unavailable(
                "audit_key", f"{file} holds no key.", "Restore it from a backup; a new key begins a new journal."
            ) from None
        self.public = self._key.public_key().public_bytes_raw().hex()
        """32 octets in hexadecimal digits: what a check is pinned to."""
        self.key_id = key_id(self.public)
        replace_file(folder / PUBLIC_FILE, f"{self.public}\n".encode(), mode=0o644)

    def head(self, sequence: int, previous: str) -> str:
        """Signs that the record before `sequence` has the hash `previous`, and with it all before it."""
        return self._key.sign(_head(sequence, previous)).hex()

    def removal(self, statement: Mapping[str, Any]) -> str:
        """Signs what was removed."""
        return self._key.sign(_removal(statement)).hex()


def key_id(public: str) -> str:
    """The short name of a public key."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]


def head_is_signed(public: str, signature: str, sequence: int, previous: str) -> bool:
    """Whether it is this key's signature of this head."""
    return _verifies(public, signature, _head(sequence, previous))


def removal_is_signed(public: str, signature: str, statement: Mapping[str, Any]) -> bool:
    """Whether it is this key's signature of this removal."""
    return _verifies(public, signature, _removal(statement))


def _head(sequence: int, previous: str) -> bytes:
    return f"hatchway audit head 1\n{sequence} {previous}\n".encode("ascii")


def _removal(statement: Mapping[str, Any]) -> bytes:
    return b"hatchway audit removal 1\n" + json.dumps(statement, sort_keys=True, separators=(",", ":")).encode("ascii")


def _verifies(public: str, signature: str, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
