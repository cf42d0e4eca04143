"""Baked snapshots on disk: which are there and whole, which has to go when there are too many.

```
FOLDER/KEY/       memory, state, upper.qcow2, manifest.json (the driver's), bake.json (ours)      read-only, never changed
FOLDER/.work/ID/  a bake in progress; ID is also its VM's id
```
A bake may be removed at any time: running VMs hold its memory open, and sandboxes have their own links to its disk.
"""

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from hatchway.domain.errors import HostExhausted
from hatchway.domain.shapes import Shape
from hatchway.node.images import files
from hatchway.node.images.manifest import MAX_MANIFEST
from hatchway.node.vmm.seam import UPPER_NAMES, Baked

FORMAT = 1
DEFAULT_BUDGET = 20 << 30
SPARE = 512 << 20
"""Octets of the disk that bakes leave free for the sandboxes."""
JUST_USED_S = 60.0
"""A bake that was asked for within this time is not removed: a VM may be about to start from it."""

log = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@=+-]{0,199}")
_NEEDED = ("memory", "state")
"""What a driver's `Vm.snapshot` leaves at least, beside the disk; its other files, such as its manifest.json, are kept with them."""
BAKE_FILE = "bake.json"
"""What is written last: a folder without it is no bake."""


class BakedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its size, and its digest by `files.sha256_sparse`."""

    size_bytes: int
    sha256_sparse: str


class BakeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a bake's bake.json."""

    format: int
    key: str
    template: str
    vmm: str
    shape: Shape
    files: dict[str, BakedFile]
    created_at: float
    host_keys: bool = True
    """Whether there are host keys of ssh on its disk; bakes of older releases may have some."""


class Bakes:
    """The bakes in one folder, which only this node writes."""

    def __init__(self, folder: Path, budget: int = DEFAULT_BUDGET) -> None:
        self.folder = folder
        self.work = folder / ".work"
        self._budget = budget
        self._used: dict[str, float] = {}
        """When each was last asked for (monotonic)."""

    def prepare(self) -> tuple[str, ...]:
        """Makes the folders; returns the ids of VMs whose bakes were interrupted."""
        self.work.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tuple(path.name for path in sorted(self.work.iterdir()))

    def find(self, key: str) -> Baked | None:
        """Returns the bake when it is there and whole, as far as sizes and the digests of its small files tell; a damaged one is removed."""
        folder = self._folder(key)
        if not folder.is_dir():
            return None
        try:
            manifest = self._manifest(folder)
            if manifest.key != key:
                raise ValueError(f"it is the bake {manifest.key}")
            if not any(name in manifest.files for name in UPPER_NAMES):
                raise ValueError("it has no disk")
            for name in {*_NEEDED, *manifest.files}:
                known = manifest.files[name]
                if (folder / name).stat().st_size != known.size_bytes:
                    raise ValueError(f"{name} has another size")
                if name != "memory" and files.sha256_sparse(folder / name) != known.sha256_sparse:
                    raise ValueError(f"{name} was changed")
        except (OSError, KeyError, ValueError) as error:
            log.warning("the baked snapshot %s is damaged (%s); it is made anew", key, error)
            self.remove(key)
            return None
        return Baked(key, folder, manifest.shape, manifest.host_keys)

    def verify(self, baked: Baked) -> bool:
        """Reads all of a bake and compares it with its manifest."""
        try:
            manifest = self._manifest(baked.folder)
            return all(
                files.sha256_sparse(baked.folder / name) == known.sha256_sparse
                for name, known in manifest.files.items()
            )
        except (OSError, KeyError, ValueError):
            return False

    def publish(self, key: str, made: Path, *, template: str, vmm: str, shape: Shape, host_keys: bool = True) -> Baked:
        """Takes over the folder `made` with the files of a bake under its key, for good."""
        names = {path.name for path in made.iterdir()}
        if not names.issuperset(_NEEDED) or names.isdisjoint(UPPER_NAMES):
            raise ValueError(f"the driver left {sorted(names)}, not {sorted(_NEEDED)} and a disk")
        manifest = BakeManifest(
            format=FORMAT,
            key=key,
            template=template,
            vmm=vmm,
            shape=shape,
            files={
                name: BakedFile(size_bytes=(made / name).stat().st_size, sha256_sparse=files.sha256_sparse(made / name))
                for name in sorted(names)
            },
            created_at=time.time(),
            host_keys=host_keys,
        )
        (made / BAKE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        final = self._folder(key)
        files.publish_folder(made, final, file_mode=0o444)
        return Baked(key, final, shape, host_keys)

    def touch(self, key: str) -> None:
        """Notes that the bake is used now; the order of uses survives a restart of the node."""
        now = time.monotonic()
        if now - self._used.get(key, -JUST_USED_S) < 1.0:
            return
        self._used[key] = now
        try:
            os.utime(self._folder(key))
        except FileNotFoundError:
            log.info("the baked snapshot %s is gone", key)

    def remove(self, key: str) -> None:
        """Removes a bake; nothing there is fine. After a crash in the middle the rest is an interrupted bake."""
        folder = self._folder(key)
        doomed = self.work / f"removed-{key}-{time.monotonic_ns()}"
        self.work.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return
        files.remove_tree(doomed)

    def make_room(self, needed: int, in_use: Collection[str] = ()) -> None:
        """Removes the least recently used bakes until `needed` octets fit the budget and the disk.

        Those in `in_use` and those used a moment ago stay. Raises `HostExhausted("host_disk_full")` when it cannot be.
        """
        now = time.monotonic()
        present = sorted((path for path in self.folder.iterdir() if _KEY.fullmatch(path.name)), key=_last_use)
        sizes = {path.name: files.size_on_disk(path) for path in present}
        for path in present:
            if self._fits(sum(sizes.values()), needed):
                return
            fresh = now - self._used.get(path.name, -JUST_USED_S) < JUST_USED_S
            if path.name in in_use or fresh:
                continue
            log.info("removing the baked snapshot %s to make room", path.name)
            self.remove(path.name)
            del sizes[path.name]
        total = sum(sizes.values())
        if not self._fits(total, needed):
            free = shutil.disk_usage(self.folder).free
            raise HostExhausted(
                "host_disk_full",
                f"A baked snapshot needs {needed >> 20} MiB: {free >> 20} MiB of disk are free ({SPARE >> 20} MiB stay so), "
                f"and {total >> 20} of {self._budget >> 20} MiB for baked snapshots are in use.",
                "Free disk space, delete sandboxes, or use fewer different shapes.",
            )

    def _fits(self, total: int, needed: int) -> bool:
        return total + needed <= self._budget and shutil.disk_usage(self.folder).free >= needed + SPARE

    def _folder(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"not the key of a bake: {key!r}")
        return self.folder / key

    def _manifest(self, folder: Path) -> BakeManifest:
        with (folder / BAKE_FILE).open("rb") as file:
            manifest = msgspec.json.decode(file.read(MAX_MANIFEST), type=BakeManifest)
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}")
        return manifest


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def warm_page_cache(baked: Baked) -> None:
    """Asks the kernel to read the bake into its page cache, holes left out: a restore then waits for no disk, and the pages belong to
    this process's cgroup, not to the first VM's."""
    for path in (baked.memory, baked.state, baked.upper):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            for start, end in files.data_ranges(descriptor):
                os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def disk_is_full(error: OSError) -> bool:
    """Tells whether an error says that disk or quota is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
