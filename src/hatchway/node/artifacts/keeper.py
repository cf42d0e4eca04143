"""What a suspended sandbox is, kept in the store that nodes share, so that any of them can go on with it.

A list of what there is (`kept.json`, beside the capture, and in the store by its digest) comes first and is durable before a piece is sent: whatever
happens then, it says what has to be released. What is to be released lies in `releases/` until that is done, also over a restart.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError
from hatchway.domain.ids import new_id
from hatchway.node.artifacts.backends import connect
from hatchway.node.artifacts.store import PIECE, Blob, Store, damaged
from hatchway.node.vmm import captures
from hatchway.node.vmm import disk as disks
from hatchway.wire.small_files import replace_file

FILE = "kept.json"
FORMAT = 1
AGAIN_S = 10.0
"""What could not be released is tried again after this."""
_DISK = re.compile(r"[a-z0-9][a-z0-9-]{0,40}\.(raw|qcow2)")
_CAPTURE = (captures.BASE, captures.DIFF, captures.STATE, captures.RECORD)

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One suspended sandbox in the store."""

    format: int = FORMAT
    owner: str
    """Whom the pieces are kept for: the sandbox, and its generation."""
    boot_id: str
    disk: tuple[disks.LayerFile, ...]
    disk_in_capture: bool
    """Its disk at the instant of the capture lies with that: it was not frozen."""
    files: dict[str, Blob]
    """By name: `capture/…` and `disk/…`. The template's file system is everywhere."""
    sessions: msgspec.Raw
    digest: str = ""
    """Of this list in the store, where it is known."""

    def pieces(self) -> set[str]:
        """All that is in the store of it."""
        own = {self.digest} if self.digest else set()
        return own.union(*(blob.pieces for blob in self.files.values()))


def owner_of(sandbox_id: str, generation: int) -> str:
    """Whom pieces are kept for."""
    return f"{sandbox_id}.{generation}"


class Keeper:
    """Keeps suspended sandboxes in one store. `folder` is ours: what is to be released lies there."""

    def __init__(self, url: str, folder: Path) -> None:
        self.store_id = hashlib.sha256(url.encode()).hexdigest()[:16]
        """The same on every node that has the same store."""
        self._store = Store(connect(url))
        self._folder = folder
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def start(self) -> None:
        """Begins to release what is to be released."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._wake.set()
        self._task = asyncio.get_running_loop().create_task(self._release_forever(), name="release of artifacts")

    async def close(self) -> None:
        """Stops; the next process goes on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def keep(self, owner: str, folder: Path, suspended: str, boot_id: str, sessions: bytes) -> str:
        """Stores the suspended sandbox in `folder`; returns the digest that it is fetched by. All of it has landed then.

        Raises `store_unavailable`, `OSError`; `forget` it then.
        """
        kept = await asyncio.to_thread(self._listed, owner, folder, suspended, boot_id, sessions)
        octets = msgspec.json.encode(kept)
        kept = msgspec.structs.replace(kept, digest=hashlib.sha256(octets).hexdigest())
        await asyncio.to_thread(replace_file, folder / suspended / FILE, msgspec.json.encode(kept))
        for name, blob in kept.files.items():
            await self._store.put(folder / _path(name, suspended), owner, known=blob)
        if len(octets) > PIECE:
            raise damaged("the list of a suspended sandbox is too long")
        return await self._store.put_octets(octets, owner)

    async def fetch(self, digest: str, owner: str, folder: Path, suspended: str) -> Kept:
        """Makes in `folder` what was kept, for a new owner, but for the template's file system. Raises `artifact_damaged store_unavailable`, `OSError`."""
        await self._store.need([digest], owner)
        octets = await self._store.get_octets(digest)
        try:
            kept = msgspec.structs.replace(msgspec.json.decode(octets, type=Kept), owner=owner, digest=digest)
        except (msgspec.DecodeError, msgspec.ValidationError):
            raise damaged(f"the list {digest} cannot be read") from None
        if kept.format != FORMAT or not kept.disk or not all(_DISK.fullmatch(layer.name) for layer in kept.disk):
            raise damaged(f"the list {digest} is of another version")
        (folder / suspended).mkdir(parents=True, mode=0o700)
        await asyncio.to_thread(replace_file, folder / suspended / FILE, msgspec.json.encode(kept))
        await self._store.need(kept.pieces(), owner)
        for name, blob in kept.files.items():
            await self._store.fetch(blob, folder / _path(name, suspended))
        os.chmod(folder / suspended / captures.BASE, 0o444)
        return kept

    def forget(self, folder: Path) -> None:
        """What the capture in this folder has in the store is needed no more: it is released behind. Nothing where there is none. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder / FILE, self._folder / f"{new_id()}.json")
            self._wake.set()

    @property
    def waiting(self) -> int:
        """How many are still to be released."""
        return len(list(self._folder.glob("*.json")))

    def _listed(self, owner: str, folder: Path, suspended: str, boot_id: str, sessions: bytes) -> Kept:
        capture = folder / suspended
        in_capture = (capture / disks.RECORD).exists()
        disk = disks.load(capture if in_capture else folder)
        assert disk is not None
        paths = {f"capture/{name}": capture / name for name in _CAPTURE}
        paths |= {f"disk/{layer.name}": disk.folder / layer.name for layer in disk.layers if layer.name != disks.LOWEST}
        return Kept(
            owner=owner,
            boot_id=boot_id,
            disk=disk.layers,
            disk_in_capture=in_capture,
            files={name: self._store.describe(path) for name, path in paths.items()},
            sessions=msgspec.Raw(sessions),
        )

    async def _release_forever(self) -> None:
        while True:
            self._wake.clear()
            left = False
            for path in sorted(self._folder.glob("*.json")):
                try:
                    kept = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=Kept)
                    await self._store.release(kept.pieces(), kept.owner)
                    path.unlink()
                except (HatchwayError, OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
                    left = True
                    log.warning("%s is not released yet: %s", path.name, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if left else None):
                    await self._wake.wait()


def _path(name: str, suspended: str) -> Path:
    """Where a file of the list lies below a sandbox's folder. Raises `artifact_damaged` for one that could be elsewhere."""
    room, _, file = name.partition("/")
    if room == "capture" and file in _CAPTURE:
        return Path(suspended) / file
    if room == "disk" and _DISK.fullmatch(file):
        return Path(file)
    raise damaged(f"a list names {name[:40]!r}")
