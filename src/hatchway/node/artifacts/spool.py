"""Archives on this node that are on their way: exports until they were fetched, uploads until they were imported.

```
FOLDER/ID.new        an export that is being written
FOLDER/ID.archive    a whole export; or an upload, of which there is as much as has come
FOLDER/ID.json       whose it is, and until when it stays
```
What is over is removed, and so is, at the start, what was not finished.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict, Exhausted, HostExhausted, NotFound
from hatchway.domain.ids import is_id
from hatchway.wire.small_files import replace_file, sync_folder

KEPT_S = 3600.0
"""How long an upload stays after its last octet."""
MAX_UPLOADS = 16
"""Of one project at one time."""
RESERVE = 256 << 20
"""Octets of the disk that an upload leaves free."""
SWEEP_EVERY_S = 30.0

log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Whose an archive is, and until when it stays (Unix seconds)."""

    project: str
    expires_at: float
    salt: bytes = b""
    """For its encrypted form, which is then the same however often it is fetched."""
    digest: str = ""
    url: str = ""
    """Where this node fetches it from; the next two are what is known of it then."""
    size: int | None = None
    version: str = ""


class Spool:
    """The archives of one folder, by id."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now

    def load(self) -> None:
        """Makes the folder, and removes what was not finished. Raises `OSError`."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self._folder.iterdir():
            name = path.name.split(".")[0]
            if path.suffix == ".new" or not is_id(name) or self._entry(name) is None:
                path.unlink(missing_ok=True)
        self.sweep()

    def find(self, archive_id: str) -> Entry | None:
        """Whose it is; None where there is none, or its time is over."""
        entry = self._entry(archive_id) if is_id(archive_id) else None
        return entry if entry is not None and entry.expires_at > self._now() else None

    def get(self, archive_id: str, what: str) -> tuple[Path, Entry]:
        """The archive and whose it is. Raises `NotFound` (`unknown_export unknown_upload`)."""
        entry = self.find(archive_id)
        path = self.path(archive_id)
        if entry is None or not path.exists():
            if what == "export":
                raise NotFound("unknown_export", "There is no such export here.", "It may be over: export again.")
            raise NotFound("unknown_upload", "There is no such upload here.", "It may be over: upload again.")
        return path, entry

    def path(self, archive_id: str, suffix: str = ".archive") -> Path:
        """Where an archive is, or will be."""
        return self._folder / f"{archive_id}{suffix}"

    def put(self, archive_id: str, entry: Entry) -> None:
        """Says whose it is, durably. Raises `OSError`."""
        replace_file(self._folder / f"{archive_id}.json", msgspec.json.encode(entry))

    def finish(self, archive_id: str, entry: Entry) -> None:
        """What was written is whole from now on. Raises `OSError`."""
        self.put(archive_id, entry)
        os.rename(self.path(archive_id, ".new"), self.path(archive_id))
        sync_folder(self._folder)

    def append(self, archive_id: str, project: str, offset: int, data: bytes) -> int:
        """Adds to an upload, which it begins at 0; returns its size. Raises `Conflict("upload_offset")`, `Exhausted`, `HostExhausted`, `OSError`."""
        path, entry = self.path(archive_id), self.find(archive_id)
        size = path.stat().st_size if entry is not None and path.exists() else 0
        if offset != size:
            raise Conflict(
                "upload_offset",
                f"{size} octets are here, and these begin at {offset}.",
                "Go on at `offset`.",
                offset=size,
            )
        if entry is None:
            self._check_number(project)
        self._require_room(len(data))
        if entry is None or entry.expires_at < self._now() + KEPT_S / 2:
            entry = entry or Entry(project=project, expires_at=0.0)
            self.put(archive_id, msgspec.structs.replace(entry, expires_at=self._now() + KEPT_S))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        return size + len(data)

    def begin(self, archive_id: str, project: str, url: str) -> None:
        """Says that an upload will be fetched from there, or goes on to be. Raises `Exhausted`, `OSError`."""
        entry = self.find(archive_id)
        if entry is None:
            self._check_number(project)
            entry = Entry(project=project, expires_at=0.0)
        self.put(archive_id, msgspec.structs.replace(entry, url=url, expires_at=self._now() + KEPT_S))

    def expect(self, archive_id: str, size: int, version: str, *, restart: bool) -> None:
        """Says how long an upload will be; with `restart` what is here is of no use. Raises `NotFound`, `HostExhausted`, `OSError`."""
        entry = self.find(archive_id)
        if entry is None:
            raise NotFound("unknown_upload", "There is no such upload here.", "It may be over: upload again.")
        path = self.path(archive_id)
        if restart:
            path.unlink(missing_ok=True)
        self._require_room(size - (path.stat().st_size if path.exists() else 0))
        self.put(archive_id, msgspec.structs.replace(entry, size=size, version=version))

    def opened(self, archive_id: str) -> None:
        """An upload was decrypted in its place: it is not what it was fetched from any more. Raises `OSError`."""
        entry = self.find(archive_id)
        if entry is not None:
            self.put(archive_id, msgspec.structs.replace(entry, url="", size=None, version=""))

    def _require_room(self, octets: int) -> None:
        found = os.statvfs(self._folder)
        if found.f_bavail * found.f_frsize < RESERVE + octets:
            raise HostExhausted("host_disk_full", "The host's disk is full.", "Free space there, then try again.")

    def remove(self, archive_id: str) -> None:
        """Removes all of an archive. Idempotent. Raises `OSError`."""
        if is_id(archive_id):
            for suffix in (".archive", ".new", ".json"):
                self.path(archive_id, suffix).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes what is over. Raises `OSError`."""
        for path in self._folder.glob("*.json"):
            if self.find(path.stem) is None:
                self.remove(path.stem)

    async def run_sweeper(self) -> None:
        """Sweeps until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await asyncio.to_thread(self.sweep)
            except OSError as error:
                log.error("what is over of %s was not removed: %s", self._folder, error)

    def _check_number(self, project: str) -> None:
        entries = [self.find(path.stem) for path in self._folder.glob("*.json")]
        if sum(entry is not None and entry.project == project for entry in entries) >= MAX_UPLOADS:
            raise Exhausted(
                "too_many_uploads",
                f"The project has {MAX_UPLOADS} uploads here.",
                "Import or delete one, then try again.",
            )

    def _entry(self, archive_id: str) -> Entry | None:
        try:
            return msgspec.json.decode((self._folder / f"{archive_id}.json").read_bytes(), type=Entry)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None
