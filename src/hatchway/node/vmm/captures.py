"""A live snapshot of one machine: what its memory and disk changed since their parents, and its devices' state.

```
memory-base    hard link to the file that the machine's memory was mapped from
memory.diff    the pages that it changed (format: docs/protocols/shim.md)
state          the devices' state
lower.raw, layer-1.qcow2, upper.qcow2, disk.json    its disk; the lower layers are hard links
capture.json   the conditions for loading it; written last
```
"""

import contextlib
import os
from pathlib import Path

import msgspec

from hatchway.node.vmm import disk as disks
from hatchway.node.vmm import manifest
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import SnapshotMismatch, VmmError
from hatchway.wire.small_files import replace_file

BASE = "memory-base"
DIFF = "memory.diff"
STATE = "state"
RECORD = "capture.json"


def keep_base(folder: Path, memory: Path) -> None:
    """Remembers, in a sandbox's folder, the file that its memory is mapped from; a link keeps it alive.

    Where it cannot be linked (another file system) the machine runs all the same, and cannot be captured. Raises `OSError`.
    """
    base = folder / BASE
    base.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.link(memory, base, follow_symlinks=False)


def create(folder: Path, name: str) -> int:
    """Opens a new file of a capture for writing. The caller closes it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Write-only: QEMU takes a descriptor for a file only with exactly the access that it asks for.
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def seal(folder: Path, sandbox: Path, described: Manifest) -> None:
    """Adds the base and the disk of the paused machine in `sandbox`, fsyncs all and writes the record last.

    Raises `VmmError` when the machine's memory base is not known, `OSError`.
    """
    base = sandbox / BASE
    if not base.exists():
        raise VmmError(
            "The file that the machine's memory was mapped from is on another file system: it cannot be captured."
        )
    (folder / BASE).unlink(missing_ok=True)
    os.link(base, folder / BASE, follow_symlinks=False)
    copy_disk(sandbox, folder)
    for name in (DIFF, STATE):
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sha256, size = manifest.digest_of(folder / STATE)
    complete = msgspec.structs.replace(described, state_sha256=sha256, state_size=size)
    replace_file(folder / RECORD, msgspec.json.encode(complete))


def copy_disk(source: Path, target: Path) -> disks.Disk:
    """Gives `target` the disk of `source` as it is now: links below, a copy of the topmost layer. Raises `VmmError`, `OSError`."""
    disk = disks.load(source)
    if disk is None:
        raise VmmError(f"There is no disk in {source}.")
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for layer in disk.layers:
        (target / layer.name).unlink(missing_ok=True)
        if layer is disk.layers[-1]:
            disks.copy_sparse(disk.top, target / layer.name)
            os.chmod(target / layer.name, 0o600)
        else:
            disks.link_or_copy(source / layer.name, target / layer.name)
    replace_file(target / disks.RECORD, msgspec.json.encode(disk.layers))
    return disks.Disk(target, disk.layers)


def verify(folder: Path, expected: Manifest) -> None:
    """Checks that a capture is whole and can be loaded here. Raises `SnapshotMismatch`, `OSError`."""
    manifest.verify_conditions(folder / RECORD, folder.name, expected)
    for name in (BASE, DIFF):
        if not (folder / name).exists():
            raise SnapshotMismatch(f"The capture {folder.name} is incomplete: {name} is missing.")
    manifest.verify_state(folder / RECORD, folder / STATE, folder.name)
