"""The VMM tree: the folder that becomes the root of every VM's jail, with the VMM, its libraries and firmware, and nothing else.

It is content-addressed and read-only. Its digest is the VMM's build: memory that was saved under one build is only loaded
under the same one, so a tree stays for as long as a snapshot names it, also after the package was upgraded.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm.seam import VmmError, VmmMissing
from hatchway.wire.small_files import sync_folder

VMM_PATH = "/vmm"
FIRMWARE_PATH = "/firmware"
PRELOAD_PATH = "/hatchway-ram.so"
MODULES_PATH = "/modules"
LIBRARIES_PATH = "/libraries"
KERNEL_PATH = "/kernel"
INITRD_PATH = "/initrd"
_MOUNT_POINTS = ("dev", "tmp", "proc")
MAX_FILE = 512 * 1024 * 1024
_DIGEST_VERSION = b"hatchway vmm tree 2\n"
_COPY = 1024 * 1024

_LINE = re.compile(r"\s*(?P<name>\S+)(?: => (?P<path>/\S+))? \(0x[0-9a-f]+\)")


@dataclass(frozen=True)
class Tree:
    """A finished tree."""

    folder: Path
    digest: str
    """SHA-256 over the names and contents of all files, in hex; also the folder's name."""

    def open(self) -> int:
        """Returns an O_PATH descriptor of the folder, for the launcher; the caller closes it."""
        return os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def gather(
    binary: Path,
    *,
    firmware: Iterable[Path] = (),
    modules: Iterable[Path] = (),
    preload: Path | None = None,
) -> dict[str, Path]:
    """Lists what a VMM needs, as path inside the jail → file on this host.

    Libraries are found by the loader that the binary itself names. `modules` are shared objects that the VMM loads by itself.
    Raises `VmmMissing` when a file is not there, `VmmError` when the loader cannot resolve a library.
    """
    files: dict[str, Path] = {VMM_PATH: binary}
    objects = [binary, *modules]
    for module in modules:
        files[f"{MODULES_PATH}/{module.name}"] = module
    if preload is not None:
        files[PRELOAD_PATH] = preload
        objects.append(preload)
    for path in firmware:
        files[f"{FIRMWARE_PATH}/{path.name}"] = path
    for path in [*files.values()]:
        if not path.is_file():
            raise VmmMissing(f"{path} is not there: the VMM's package is incomplete; install it again.")
    loader = interpreter(binary)
    if loader is None:
        return files
    files[str(loader)] = loader
    # One flat folder, given to the loader as LD_LIBRARY_PATH: the jail then need not know how this distribution lays out its own.
    for name, path in _libraries(loader, objects).items():
        files[f"{LIBRARIES_PATH}/{name}"] = path
    return files


def interpreter(binary: Path) -> Path | None:
    """Returns the loader that an ELF file names, None for a static one. Raises `VmmError` when it is no 64-bit ELF."""
    with binary.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            raise VmmError(f"{binary} is not a 64-bit ELF program")
        offset = int.from_bytes(head[32:40], "little")
        size, count = int.from_bytes(head[54:56], "little"), int.from_bytes(head[56:58], "little")
        file.seek(offset)
        table = file.read(size * count)
        for start in range(0, len(table), size or 1):
            entry = table[start : start + size]
            if int.from_bytes(entry[:4], "little") == 3:
                file.seek(int.from_bytes(entry[8:16], "little"))
                name = file.read(min(int.from_bytes(entry[32:40], "little"), 4096))
                return Path(os.fsdecode(name.rstrip(b"\0")))
    return None


def _libraries(loader: Path, objects: Iterable[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for item in objects:
        listed = subprocess.run(
            [str(loader), "--list", str(item)], capture_output=True, text=True, timeout=30, check=False, env={}
        )
        if listed.returncode != 0:
            raise VmmError(f"{loader} cannot load {item}: {(listed.stderr or listed.stdout).strip()[:500]}")
        for line in listed.stdout.splitlines():
            if "not found" in line:
                raise VmmError(f"{item} needs a library that is not there: {line.strip()}")
            match = _LINE.fullmatch(line)
            if match and match["path"]:
                found[Path(match["name"]).name] = Path(match["path"])
    return found


def build(folder: Path, files: Mapping[str, Path], *, like: Tree | None = None) -> Tree:
    """Returns the tree of these files under `folder`, made if it is not there yet; with all files of `like`, as hard links, beside them.

    Several processes may ask at once; a crash in the middle leaves no half tree under a digest. Raises `OSError` (ENOSPC), `VmmError`.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    digest = _digest(files, like)
    target = folder / digest
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for left in folder.glob(".making-*"):
                _remove(left)
            temporary = folder / f".making-{digest}"
            try:
                _fill(temporary, files, like)
                os.rename(temporary, target)
                sync_folder(folder)
            except BaseException:
                _remove(temporary)
                raise
    finally:
        os.close(lock)
    return Tree(target, digest)


def _digest(files: Mapping[str, Path], like: Tree | None) -> str:
    total = hashlib.sha256(_DIGEST_VERSION)
    if like is not None:
        total.update(f"like {like.digest}\n".encode())
    for inside, path in sorted(files.items()):
        if path.stat().st_size > MAX_FILE:
            raise VmmError(f"{path} is larger than {MAX_FILE} octets")
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{inside}\0{content}\n".encode())
    return total.hexdigest()


def _fill(root: Path, files: Mapping[str, Path], like: Tree | None) -> None:
    root.mkdir(mode=0o755)
    for mount_point in _MOUNT_POINTS:
        (root / mount_point).mkdir()
    if like is not None:
        for current, _, linked in os.walk(like.folder):
            here = root / Path(current).relative_to(like.folder)
            here.mkdir(exist_ok=True)
            for each in linked:
                os.link(Path(current) / each, here / each)
    for name, path in files.items():
        target = root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, target, 0o555)
    for current, _, _ in os.walk(root, topdown=False):
        os.chmod(current, 0o555 if current != str(root) else 0o755)
        sync_folder(Path(current))
    os.chmod(root, 0o555)


def _copy(source: Path, target: Path, mode: int) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with source.open("rb") as file:
            while os.sendfile(fd, file.fileno(), None, _COPY):
                pass
        os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(root: Path) -> None:
    if not root.exists():
        return
    for current, _, _ in os.walk(root):
        os.chmod(current, stat.S_IRWXU)
    shutil.rmtree(root)
