"""Octets under a passphrase, as a stream: how an archive is encrypted on its way out, and decrypted on its way in.

```
0    "HWSEALED" | format (u32, big-endian) | salt (16) | check (32): HMAC-SHA256 of the 28 octets before, by half of the derived key
60   chunks of 65,536 octets (the last may be shorter, and empty only where it is the only one), each with 16 octets of tag
```
scrypt (N=2^16, r=8, p=1: 64 MiB) makes 64 octets of key of salt and passphrase: the first half seals chunks by ChaCha20-Poly1305, the
second makes the check. The nonce of a chunk is its number (11 octets) and whether it is the last (1), so that none can be left out, moved or
cut off. Keys and passphrases are kept nowhere.
"""

import hmac
import struct
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.node.artifacts.refusals import altered, invalid, too_new

MAGIC = b"HWSEALED"
FORMAT = 1
CHUNK = 65_536
TAG = 16
SALT = 16
_FIXED = struct.Struct(f">8sI{SALT}s")
HEAD = _FIXED.size + 32
MAX_PASSPHRASE = 1024


class Sealer:
    """Seals octets of a known length; any part of the sealed form can be made by itself, so that a broken download goes on."""

    def __init__(self, passphrase: bytes, salt: bytes) -> None:
        fixed = _FIXED.pack(MAGIC, FORMAT, salt)
        key, check = _derive(passphrase, salt)
        self._cipher = ChaCha20Poly1305(key)
        self.head = fixed + hmac.digest(check, fixed, "sha256")

    @staticmethod
    def size(plain: int) -> int:
        """How long the sealed form of so many octets is."""
        return HEAD + plain + TAG * max(1, -(-plain // CHUNK))

    def chunk(self, number: int, data: bytes, *, last: bool) -> bytes:
        """Seals one chunk."""
        return self._cipher.encrypt(_nonce(number, last), data, None)


class Opener:
    """Takes the sealed form piece by piece and gives what is in it. Raises `passphrase_wrong`, `archive_altered archive_invalid`."""

    def __init__(self, passphrase: bytes) -> None:
        self._passphrase = passphrase
        self._cipher: ChaCha20Poly1305 | None = None
        self._held = bytearray()
        self._number = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Gives what can be opened with what has come: all but the last chunk, whose end is not known yet. Blocks, at first, for the key."""
        self._held += data
        if self._cipher is None:
            if len(self._held) < HEAD:
                return
            self._cipher = _opened(bytes(self._held[:HEAD]), self._passphrase)
            del self._held[:HEAD]
        while len(self._held) > CHUNK + TAG:
            sealed = bytes(self._held[: CHUNK + TAG])
            del self._held[: CHUNK + TAG]
            yield self._open(sealed, last=False)

    def finish(self) -> bytes:
        """Gives the last chunk."""
        if self._cipher is None or len(self._held) < TAG or (self._number and len(self._held) == TAG):
            raise invalid("it is cut off")
        return self._open(bytes(self._held), last=True)

    def _open(self, sealed: bytes, *, last: bool) -> bytes:
        assert self._cipher is not None
        try:
            data = self._cipher.decrypt(_nonce(self._number, last), sealed, None)
        except InvalidTag:
            raise altered("it was changed or cut off after it was encrypted") from None
        self._number += 1
        return data


def is_sealed(beginning: bytes) -> bool:
    """Whether octets begin like a sealed form."""
    return beginning[: len(MAGIC)] == MAGIC


def seal_all(passphrase: bytes, salt: bytes, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Seals a stream whose length is not known before."""
    sealer, held, number = Sealer(passphrase, salt), b"", 0
    yield sealer.head
    for data in chunks:
        held += data
        while len(held) > CHUNK:
            yield sealer.chunk(number, held[:CHUNK], last=False)
            held, number = held[CHUNK:], number + 1
    yield sealer.chunk(number, held, last=True)


def passphrase_needed() -> HatchwayError:
    """The error of an encrypted archive without a passphrase."""
    return Unprocessable(
        "passphrase_needed",
        "The archive is encrypted, and no passphrase came with it.",
        "Give the passphrase that it was exported with.",
    )


def _opened(head: bytes, passphrase: bytes) -> ChaCha20Poly1305:
    magic, version, salt = _FIXED.unpack_from(head)
    if magic != MAGIC:
        raise invalid("it does not begin like an encrypted one")
    if version != FORMAT:
        raise too_new(version, FORMAT)
    key, check = _derive(passphrase, salt)
    if not hmac.compare_digest(hmac.digest(check, head[: _FIXED.size], "sha256"), head[_FIXED.size :]):
        raise Unprocessable(
            "passphrase_wrong", "The passphrase is not the one that the archive was encrypted with.", "Try another one."
        )
    return ChaCha20Poly1305(key)


def _derive(passphrase: bytes, salt: bytes) -> tuple[bytes, bytes]:
    derived = Scrypt(salt=salt, length=64, n=2**16, r=8, p=1).derive(passphrase)
    return derived[:32], derived[32:]


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])
