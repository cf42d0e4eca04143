"""The layers of a sandbox's writable disk, as files of its own folder: for a VMM that has layers, and for one that has not.

```
lower.raw       hard link to the template's empty file system
layer-1.qcow2   hard link to the baked snapshot's disk (only where the sandbox was restored from one)
upper.qcow2     what the guest writes
disk.json       the names above, from the lowest to the topmost, with their formats
```
or, where the VMM knows no layers:
```
upper.raw       a sparse copy of the template's empty file system, or of the baked disk, with all that the guest writes
disk.json
```
The links keep a lower layer alive for as long as any sandbox needs it, whatever is pruned elsewhere. Only the topmost file is
ever written, and its octets are the VMM's: nothing here believes more of it than the size in its header.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.node.vmm import qcow2
from hatchway.node.vmm.seam import VmmError
from hatchway.wire.fault_points import reached
from hatchway.wire.small_files import replace_file, sync_folder

TOP = "upper.qcow2"
RAW_TOP = "upper.raw"
RECORD = "disk.json"
LOWEST = "lower.raw"
_PIECE = 1024 * 1024
_SPARSE_PIECE = 65_536


class LayerFile(msgspec.Struct, frozen=True):
    """One layer: a file name in the folder, and `raw` or `qcow2`."""

    name: str
    format: str


@dataclass(frozen=True)
class Disk:
    """A disk that is complete in its folder."""

    folder: Path
    layers: tuple[LayerFile, ...]

    @property
    def top(self) -> Path:
        """The file that the guest writes to."""
        return self.folder / self.layers[-1].name

    def size(self) -> int:
        """The size in octets that the guest sees, as the topmost file's header states it. Raises `VmmError` when it is damaged."""
        fd = os.open(self.top, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if self.layers[-1].format == "raw":
                return os.fstat(fd).st_size
            return qcow2.virtual_size(fd)
        except ValueError as error:
            raise VmmError(f"The sandbox's disk {self.top} is damaged: {error}.") from error
        finally:
            os.close(fd)

    def open(self) -> list[int]:
        """Opens every layer, the lowest first, all but the topmost read-only. The caller closes them. Raises `OSError`."""
        opened: list[int] = []
        try:
            for layer in self.layers:
                mode = os.O_RDWR if layer is self.layers[-1] else os.O_RDONLY
                opened.append(os.open(self.folder / layer.name, mode | os.O_CLOEXEC | os.O_NOFOLLOW))
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return opened


def load(folder: Path) -> Disk | None:
    """Returns the disk that is in `folder`, None when none was made. Raises `VmmError` when its record is damaged."""
    try:
        octets = (folder / RECORD).read_bytes()
    except FileNotFoundError:
        return None
    try:
        layers = msgspec.json.decode(octets, type=tuple[LayerFile, ...])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise VmmError(f"{folder / RECORD} is damaged: {error}") from error
    if not layers or any("/" in layer.name or layer.name.startswith(".") for layer in layers):
        raise VmmError(f"{folder / RECORD} names files that are not its own.")
    return Disk(folder, layers)


def own(source: Path, folder: Path) -> Path:
    """Returns a copy of a template's file below `folder` that belongs to us, made once.

    A file of another owner cannot be given a second name where the kernel protects hard links; ours can, by every sandbox. Raises `OSError`.
    """
    found = source.stat()
    copy = folder / f"{found.st_dev:x}-{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}.raw"
    if copy.exists() or found.st_uid == os.geteuid():
        return copy if copy.exists() else source
    folder.mkdir(exist_ok=True, mode=0o700)
    temporary = copy.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    copy_sparse(source, temporary)
    os.rename(temporary, copy)
    sync_folder(folder)
    return copy


def prepare(folder: Path, lowest: Path, above: Path | None, size: int) -> Disk:
    """Returns the disk of `folder`; makes it, `size` octets large, over `lowest` (raw) and `above` (qcow2) when there is none.

    A crash in the middle leaves no record, and the next call starts afresh. It is not durable until `make_durable`. Raises `OSError`
    (ENOSPC), `VmmError`.
    """
    disk = load(folder)
    if disk is not None:
        if disk.layers[-1].format == "raw":
            raise VmmError(
                'The sandbox\'s disk is one raw file, made for Firecracker. Set `driver = "firecracker"` in [vmm] of hatchway.toml.'
            )
        return disk
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in (folder / TOP, folder / RAW_TOP, folder / LOWEST, *folder.glob("layer-*.qcow2")):
        left.unlink(missing_ok=True)
    layers = [LayerFile(LOWEST, "raw")]
    link_or_copy(lowest, folder / LOWEST)
    if above is not None:
        layers.append(LayerFile("layer-1.qcow2", "qcow2"))
        link_or_copy(above, folder / "layer-1.qcow2")
    below = layers[-1]
    qcow2.create(folder / TOP, size, below.name, below.format)
    layers.append(LayerFile(TOP, "qcow2"))
    replace_file(folder / RECORD, msgspec.json.encode(layers), durable=False)
    return Disk(folder, tuple(layers))


def prepare_raw(folder: Path, source: Path, size: int) -> Disk:
    """Returns the disk of `folder` as one raw file of `size` octets at least; makes it as a copy of `source` when there is none.

    The copy costs as much as `source` holds, nothing where the file system shares blocks. Durable. Raises `VmmError` for a disk that
    another VMM made in layers, `OSError` (ENOSPC).
    """
    disk = load(folder)
    if disk is None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in (folder / TOP, folder / RAW_TOP, folder / LOWEST, *folder.glob("layer-*.qcow2")):
            left.unlink(missing_ok=True)
        copy_sparse(source, folder / RAW_TOP)
        os.chmod(folder / RAW_TOP, 0o600)
        os.truncate(folder / RAW_TOP, max(size, source.stat().st_size))
        disk = Disk(folder, (LayerFile(RAW_TOP, "raw"),))
        replace_file(folder / RECORD, msgspec.json.encode(disk.layers))
    if [layer.format for layer in disk.layers] != ["raw"]:
        raise VmmError(
            'The sandbox\'s disk is in layers, which only QEMU can use. Set `driver = "qemu"` in [vmm] of hatchway.toml.'
        )
    if disk.size() < size:
        os.truncate(disk.top, size)
    return disk


def without_zeros(path: Path) -> None:
    """Rewrites a file so that what is zero in it takes no space. Raises `OSError` (ENOSPC), leaving it as it was."""
    temporary = path.with_name(f".{path.name}.sparse")
    temporary.unlink(missing_ok=True)
    zeros = bytes(_SPARSE_PIECE)
    try:
        with path.open("rb", buffering=0) as reader, temporary.open("xb", buffering=0) as writer:
            os.ftruncate(writer.fileno(), os.fstat(reader.fileno()).st_size)
            offset = 0
            while octets := os.pread(reader.fileno(), _PIECE, offset):
                for start in range(0, len(octets), _SPARSE_PIECE):
                    piece = octets[start : start + _SPARSE_PIECE]
                    if piece != zeros[: len(piece)]:
                        os.pwrite(writer.fileno(), piece, offset + start)
                offset += len(octets)
            os.fchmod(writer.fileno(), os.fstat(reader.fileno()).st_mode & 0o777)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_durable(disk: Disk) -> None:
    """Flushes a disk that `prepare` made; it may run beside the start of the VMM. Raises `OSError` (ENOSPC)."""
    for path in (disk.top, disk.folder / RECORD):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(disk.folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file that is never written again a second name, or a copy where it cannot have one. Raises `OSError`."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Another file system, or one without links: a sparse copy costs more and is as good.
        copy_sparse(source, target)


def copy_sparse(source: Path, target: Path, *, durable: bool = True) -> None:
    """Copies a file, sharing its blocks where the file system can, else leaving its holes out. Raises `OSError`; no part is left then."""
    with source.open("rb") as reader, target.open("xb") as writer, _whole_or_none(target):
        _copy_data(reader.fileno(), writer.fileno(), source.name)
        if durable:
            os.fsync(writer.fileno())


def fill(source: Path, target: Path) -> None:
    """Gives a file that somebody may have open the content of another one, as `copy_sparse` copies. Not durable. Raises `OSError` (ENOSPC)."""
    with source.open("rb") as reader, target.open("r+b") as writer:
        os.ftruncate(writer.fileno(), 0)
        _copy_data(reader.fileno(), writer.fileno(), source.name)


def _copy_data(reader: int, writer: int, name: str) -> None:
    size = os.fstat(reader).st_size
    os.ftruncate(writer, size)
    reached("copy", name)
    offset = 0
    while offset < size:
        try:
            start = os.lseek(reader, offset, os.SEEK_DATA)
        except OSError:
            break  # only a hole is left
        offset = os.lseek(reader, start, os.SEEK_HOLE)
        _copy_range(reader, writer, start, offset)


@contextlib.contextmanager
def _whole_or_none(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    while start < end:
        try:
            copied = os.copy_file_range(reader, writer, end - start, start, start)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            octets = os.pread(reader, min(_PIECE, end - start), start)
            copied = os.pwrite(writer, octets, start)
        if copied == 0:
            return
        start += copied
