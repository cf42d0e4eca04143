"""What a baked snapshot says of itself, and how its folder is made durable and read-only.

```
memory        the guest's memory, 0444; mapped privately by every VM restored from it
state         the devices' state, 0444
upper.qcow2   the disk at that instant, over the template's empty file system, 0444; upper.raw, all of it, where the VMM knows no layers
manifest.json written last: a folder without it is no snapshot
```
"""

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from hatchway.domain.shapes import Shape
from hatchway.node.vmm import disk as disks
from hatchway.node.vmm.seam import Baked, SnapshotMismatch, VmmError
from hatchway.wire.small_files import replace_file

FORMAT = 1
FILE = "manifest.json"
_MAX_STATE = 64 * 1024 * 1024


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions under which the memory can be loaded again."""

    format: int = FORMAT
    vmm: str
    build: str
    """Digest of the VMM tree."""
    arguments: int
    """`qemu_args.ARGS_VERSION`."""
    isolation: str
    cpu: str
    tsc_khz: int
    network: bool
    shape: Shape
    state_sha256: str = ""
    state_size: int = 0
    parts: dict[str, tuple[str, int]] = {}
    """Of a capture, the other files that are its own: name, SHA-256 in hex and size in octets."""

    def conditions(self) -> dict[str, object]:
        """The members that must be equal for a load, with names for people."""
        return {
            "format": self.format,
            "build of the VMM": self.build,
            "version of its arguments": self.arguments,
            "isolation": self.isolation,
            "CPU": self.cpu,
            "frequency of the time-stamp counter": self.tsc_khz,
            "network": self.network,
            "virtual CPUs": self.shape.vcpus,
            "memory": self.shape.memory_mib,
        }


def create_state(folder: Path) -> int:
    """Opens the new file of the devices' state in `folder`, which is made. The caller closes it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / "state", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def close(fd: int) -> None:
    """Closes a descriptor."""
    with contextlib.suppress(OSError):
        os.close(fd)


def seal_bake(folder: Path, described: Manifest, state: int, memory: Path, disk: disks.Disk) -> None:
    """Moves memory and disk of a VM that ended into `folder`, fsyncs all, makes it read-only, writes the manifest last.

    Raises `VmmError` for a disk with more than the template's layer below, `OSError`.
    """
    if [layer.format for layer in disk.layers] not in (["raw", "qcow2"], ["raw"]):
        raise VmmError("Only a VM on a fresh disk can be baked.")
    upper = disk.top.name
    size = os.fstat(state).st_size
    if not 0 < size <= _MAX_STATE:
        raise VmmError(f"The VMM saved {size} octets of device state: at most {_MAX_STATE} are expected.")
    os.rename(memory, folder / "memory")
    os.rename(disk.top, folder / upper)
    for name in ("memory", "state", upper):
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
            os.fchmod(fd, 0o444)
        finally:
            os.close(fd)
    complete = msgspec.structs.replace(described, state_sha256=_sha256(state), state_size=size)
    replace_file(folder / FILE, msgspec.json.encode(complete))


def verify(baked: Baked, expected: Manifest) -> None:
    """Checks that `baked` can be loaded by the VMM that `expected` describes and that its state is whole.

    Raises `SnapshotMismatch` saying what differs, `OSError`.
    """
    found = verify_conditions(baked.folder / FILE, baked.key, expected)
    memory = baked.memory.stat().st_size if baked.memory.exists() else -1
    if memory != found.shape.memory_mib * 2**20:
        raise SnapshotMismatch(f"The memory of the snapshot {baked.key} is missing or of the wrong size.")
    verify_state(baked.folder / FILE, baked.state, baked.key)


def verify_conditions(path: Path, name: str, expected: Manifest) -> Manifest:
    """Reads a manifest and compares it with what holds here. Raises `SnapshotMismatch`, `OSError`."""
    found = read(path, name)
    wanted = expected.conditions()
    for condition, value in found.conditions().items():
        if value != wanted[condition]:
            raise SnapshotMismatch(
                f"The snapshot {name} was made for another {condition}: {value}, and here it is {wanted[condition]}."
            )
    return found


def verify_state(path: Path, state: Path, name: str) -> None:
    """Compares the devices' state with its manifest at `path`. Raises `SnapshotMismatch`, `OSError`."""
    found = read(path, name)
    try:
        whole = digest_of(state) == (found.state_sha256, found.state_size)
    except FileNotFoundError:
        whole = False
    if not whole:
        raise SnapshotMismatch(f"The device state of the snapshot {name} is damaged.")


def digest_of(path: Path) -> tuple[str, int]:
    """Returns a file's SHA-256 in hex and its size in octets. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return digest_of_open(fd)
    finally:
        os.close(fd)


def digest_of_open(fd: int) -> tuple[str, int]:
    """The same for an open file. Raises `OSError`."""
    return _sha256(fd), os.fstat(fd).st_size


def read(path: Path, name: str) -> Manifest:
    """Reads a manifest. Raises `SnapshotMismatch`, `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise SnapshotMismatch(f"The snapshot {name} is incomplete: it has no manifest.") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SnapshotMismatch(f"The manifest of the snapshot {name} is damaged: {error}") from error


def _sha256(fd: int) -> str:
    total, offset = hashlib.sha256(), 0
    while octets := os.pread(fd, 1024 * 1024, offset):
        total.update(octets)
        offset += len(octets)
    return total.hexdigest()
