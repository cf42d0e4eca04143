"""Sources on the disk: one file each, the value in it sealed with the master key, replaced at once and flushed.

```
FOLDER/master.keys            keys in Base64, one a line, 0600, where the operator named no place of his own; the first one seals
FOLDER/sources/DIGEST.sealed  "HWS1", length of the header (4 octets, big-endian), header (MessagePack: what is no secret, key and nonce),
                              the value by AES-256-GCM; header and file name are authenticated with it
```
A master key is changed by adding a new one in front: all files are sealed anew, and only when none is left that needs an old one is
it dropped. A process that ends in between goes on with that at its next start.
"""

import base64
import binascii
import contextlib
import hashlib
import logging
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hatchway.broker.secret import Secret, wipe
from hatchway.domain.errors import Conflict, HatchwayError, Unavailable
from hatchway.wire.broker import Source
from hatchway.wire.small_files import replace_file, sync_folder

MAGIC = b"HWS1"
KEY_OCTETS = 32
NONCE_OCTETS = 12
TAG_OCTETS = 16
MAX_FILE = 64 * 1024
MAX_SOURCES = 10_000

_LENGTH = struct.Struct(">I")

log = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    nonce: bytes
    source: Source
    """Without its value."""
    sealed: bool
    """A value follows."""


class MasterKey:
    """A key that values are sealed with; `id` names it and says nothing of it."""

    __slots__ = ("_aead", "_octets", "id")

    def __init__(self, octets: bytes) -> None:
        if len(octets) != KEY_OCTETS:
            raise ValueError(f"a master key has {KEY_OCTETS} octets")
        self._octets = bytearray(octets)
        self._aead = AESGCM(octets)
        self.id = hashlib.sha256(b"hatchway master key\0" + octets).hexdigest()[:16]

    def seal(self, nonce: bytes, value: bytes, bound: bytes) -> bytes:
        """Encrypts; `bound` has to be the same when it is opened."""
        return self._aead.encrypt(nonce, value, bound)

    def open(self, nonce: bytes, sealed: bytes, bound: bytes) -> bytearray:
        """Decrypts into a buffer that the caller wipes. Raises `InvalidTag`."""
        buffer = bytearray(max(0, len(sealed) - TAG_OCTETS))
        self._aead.decrypt_into(nonce, sealed, bound, buffer)
        return buffer

    def line(self) -> bytes:
        """How it is written into a file of keys."""
        return base64.b64encode(self._octets)

    def __repr__(self) -> str:
        return f"MasterKey({self.id})"


def read_keys(text: bytes, where: str) -> list[MasterKey]:
    """Keys in Base64, apart by line ends or commas. Raises `Unavailable("master_key_invalid")`, which has nothing of them in it."""
    keys: list[MasterKey] = []
    for number, part in enumerate(text.replace(b",", b"\n").split(), 1):
        try:
            keys.append(MasterKey(base64.b64decode(part, validate=True)))
        except (binascii.Error, ValueError):
            raise Unavailable(
                "master_key_invalid",
                f"Key {number} of {where} is not {KEY_OCTETS} octets in Base64.",
                "`openssl rand -base64 32` makes one.",
            ) from None
    if not keys:
        raise Unavailable("master_key_invalid", f"There is no key in {where}.", "`openssl rand -base64 32` makes one.")
    return keys


class Store:
    """The sources. For one process; its calls touch the disk."""

    def __init__(self, folder: Path, keys: Sequence[MasterKey] | None = None) -> None:
        """Opens the store, with the operator's `keys` or with its own, and seals anew what an earlier key sealed.

        Raises `Unavailable("master_key_missing")` where there are sealed values and no key any more, `Unavailable("unsafe_file")`, `OSError`.
        """
        self._folder = folder / "sources"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key_file = None if keys else folder / "master.keys"
        self._sources: dict[tuple[str, str], Source] = {}
        self._damaged: set[str] = set()
        for left in self._folder.glob(".*.new"):
            left.unlink()
        files = sorted(self._folder.glob("*.sealed"))
        self._keys = list(keys) if keys else self._own_keys(bool(files))
        for file in files:
            self._load(file)
        if self._reseal() == 0 and self._key_file is not None and len(self._keys) > 1:
            self._drop_old_keys()

    @property
    def key_id(self) -> str:
        """Which key seals."""
        return self._keys[0].id

    def find(self, project: str, name: str) -> Source | None:
        """A source without its value; None when there is none. Raises `Unavailable("source_damaged")`."""
        if _file_name(project, name) in self._damaged:
            raise damaged()
        return self._sources.get((project, name))

    def all(self, project: str | None = None) -> Iterator[Source]:
        """The sources, without values."""
        return iter([one for one in self._sources.values() if project in (None, one.project)])

    def put(self, source: Source) -> None:
        """Keeps a source. Raises `Conflict("stale_version")`, `Unavailable("store_full")`, `OSError` (then the former one is there)."""
        before = self._sources.get((source.project, source.name))
        if before is not None and source.version < before.version:
            raise Conflict(
                "stale_version",
                f"Version {before.version} of {source.name} is here already.",
                "Read it, and try again.",
            )
        if before is None and len(self._sources) >= MAX_SOURCES:
            raise Unavailable("store_full", f"The broker has {MAX_SOURCES} sources.", "Delete some.", limit=MAX_SOURCES)
        self._write(source, source.value)

    def delete(self, project: str, name: str) -> bool:
        """Forgets a source, also a damaged one; tells whether it was there. Raises `OSError`."""
        file = self._folder / _file_name(project, name)
        try:
            file.unlink()
        except FileNotFoundError:
            return False
        sync_folder(self._folder)
        self._sources.pop((project, name), None)
        self._damaged.discard(file.name)
        return True

    def secret(self, project: str, name: str) -> Secret:
        """Opens the value of a source that has one. Raises `Unavailable("source_damaged")`, `Unavailable("source_unknown")`, `OSError`."""
        file = self._folder / _file_name(project, name)
        try:
            header, bound, sealed = _read(file)
        except FileNotFoundError:
            raise unknown(name) from None
        except ValueError:
            raise damaged() from None
        if not header.sealed:
            raise unknown(name)
        buffer = self._open(header, sealed, bound)
        try:
            return Secret(buffer)
        finally:
            wipe(buffer)

    def rotate(self) -> int:
        """Makes a new master key and seals everything with it; tells how many files. Raises `Conflict("master_key_foreign")`, `OSError`."""
        if self._key_file is None:
            raise Conflict(
                "master_key_foreign",
                "The master key comes from a place that the configuration names; the broker does not write there.",
                "Put a new key before the old one in that place and restart the broker; when it serves, take the old one out.",
            )
        self._keys.insert(0, MasterKey(os.urandom(KEY_OCTETS)))
        try:
            self._write_keys()
        except BaseException:
            del self._keys[0]
            raise
        left = self._reseal()
        if left == 0:
            self._drop_old_keys()
        return len(self._sources)

    def _load(self, file: Path) -> None:
        try:
            header, bound, sealed = _read(file)
            if _file_name(header.source.project, header.source.name) != file.name:
                raise ValueError("another source's file")
            if header.sealed:
                wipe(self._open(header, sealed, bound))
            self._sources[header.source.project, header.source.name] = header.source
        except (ValueError, HatchwayError) as error:
            # The others are served; this one is missing until it is put anew.
            log.error("the sealed source %s cannot be read: %s", file.name, error)
            self._damaged.add(file.name)

    def _open(self, header: _Header, sealed: bytes, bound: bytes) -> bytearray:
        for key in self._keys:
            if key.id == header.key:
                try:
                    return key.open(header.nonce, sealed, bound)
                except InvalidTag:
                    raise damaged() from None
        raise Unavailable(
            "master_key_missing",
            f"It was sealed with the master key {header.key}, which is not here.",
            "Put that key behind the new one, or put the credential anew.",
        )

    def _write(self, source: Source, value: bytes | bytearray | None) -> None:
        public = msgspec.structs.replace(source, value=None)
        key, nonce, name = self._keys[0], os.urandom(NONCE_OCTETS), _file_name(source.project, source.name)
        header = msgspec.msgpack.encode(_Header(key=key.id, nonce=nonce, source=public, sealed=value is not None))
        head = MAGIC + _LENGTH.pack(len(header)) + header
        sealed = b"" if value is None else key.seal(nonce, bytes(value), head + name.encode())
        replace_file(self._folder / name, head + sealed)
        self._sources[source.project, source.name] = public
        self._damaged.discard(name)

    def _reseal(self) -> int:
        """Seals with the first key what another one sealed; tells how many files need another one still."""
        left = len(self._damaged)
        for source in list(self._sources.values()):
            file = self._folder / _file_name(source.project, source.name)
            header, bound, sealed = _read(file)
            if header.key == self.key_id:
                continue
            if not header.sealed:
                self._write(source, None)
                continue
            buffer = self._open(header, sealed, bound)
            try:
                self._write(source, buffer)
            finally:
                wipe(buffer)
        return left

    def _own_keys(self, needed: bool) -> list[MasterKey]:
        assert self._key_file is not None
        with contextlib.suppress(FileNotFoundError):
            return read_keys(read_private(self._key_file), str(self._key_file))
        if needed:
            raise Unavailable(
                "master_key_missing",
                f"There are sealed credentials, and {self._key_file}, which they were sealed with, is gone.",
                "Put the key file back from a copy; or remove the folder `sources` beside it and put the credentials anew.",
            )
        self._keys = [MasterKey(os.urandom(KEY_OCTETS))]
        self._write_keys()
        return self._keys

    def _write_keys(self) -> None:
        assert self._key_file is not None
        replace_file(self._key_file, b"".join(key.line() + b"\n" for key in self._keys))

    def _drop_old_keys(self) -> None:
        kept = self._keys
        self._keys = kept[:1]
        try:
            self._write_keys()
        except BaseException:
            self._keys = kept
            raise


def read_private(path: Path) -> bytes:
    """A file that only our user can read. Raises `Unavailable("unsafe_file")`, `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            raise Unavailable(
                "unsafe_file",
                f"{path} is not a file that only the broker's user can read.",
                f"`chmod 600 {path}`, and let it belong to the broker's user.",
            )
        return file.read(MAX_FILE)


def damaged() -> HatchwayError:
    """The error of a sealed file that is not what was written."""
    return Unavailable(
        "source_damaged", "What is kept of this credential was changed, or is damaged.", "Put the credential anew."
    )


def unknown(name: str) -> HatchwayError:
    """The error of a source that the broker has not."""
    return Unavailable(
        "source_unknown", f"The broker has no source {name[:64]!r}.", "Put the credential: PUT /v1/credentials."
    )


def _file_name(project: str, name: str) -> str:
    return hashlib.sha256(f"{project}\0{name}".encode()).hexdigest()[:40] + ".sealed"


def _read(file: Path) -> tuple[_Header, bytes, bytes]:
    """Header, what is authenticated with the value, and the sealed value. Raises `ValueError`, `OSError`."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as opened:
        content = opened.read(MAX_FILE + 1)
    at = len(MAGIC) + _LENGTH.size
    if len(content) > MAX_FILE or len(content) < at or not content.startswith(MAGIC):
        raise ValueError("it is no sealed source")
    end = at + _LENGTH.unpack_from(content, len(MAGIC))[0]
    if end > len(content):
        raise ValueError("it ends too early")
    try:
        header = msgspec.msgpack.decode(content[at:end], type=_Header)
    except msgspec.MsgspecError:
        raise ValueError("its header cannot be read") from None
    return header, content[:end] + file.name.encode(), content[end:]
