"""Kernel modules: which ones a guest needs, in which order, read from the module files themselves.

A kernel package has no `modules.dep` before it is installed, so that dependencies are taken from each module's `.modinfo`.
"""

import gzip
import lzma
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hatchway.domain.errors import Unavailable

NEEDED = ("virtio_mmio", "virtio_blk", "virtio_net", "virtio_console", "virtio_rng", "ext4", "erofs", "overlay")
"""What a guest needs to find its disks, its channel, its network and randomness; each is built in or a module."""

FOR_VSOCK = ("vmw_vsock_virtio_transport",)
"""What it needs besides where its channel is a vsock (Firecracker); loaded there only."""

_SUFFIXES = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")
MAX_MODULE = 64 << 20


def canonical(name: str) -> str:
    """Returns a module's name as the kernel writes it: file names may have `-` for `_`."""
    return name.replace("-", "_")


def index(folder: Path) -> dict[str, Path]:
    """Maps module names to their files under `folder` (a `/lib/modules/RELEASE`)."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.ko*")):
        suffix = next((end for end in _SUFFIXES if path.name.endswith(end)), None)
        if suffix is not None and path.is_file():
            found[canonical(path.name.removesuffix(suffix))] = path
    return found


def built_in(folder: Path) -> frozenset[str]:
    """Returns the names of what is compiled into the kernel, by its `modules.builtin`."""
    try:
        lines = (folder / "modules.builtin").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return frozenset()
    return frozenset(canonical(line.rpartition("/")[2].removesuffix(".ko")) for line in lines if line)


def read(path: Path) -> bytes:
    """Returns a module's ELF file, decompressed. Raises `Unavailable("bad_module")`."""
    data = path.read_bytes()
    try:
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".zst":
            data = subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=True, timeout=60).stdout
    except (lzma.LZMAError, OSError, EOFError, subprocess.SubprocessError) as error:
        raise Unavailable("bad_module", f"{path.name} cannot be decompressed: {error}.", "Build again.") from error
    if not data.startswith(b"\x7fELF") or len(data) > MAX_MODULE:
        raise Unavailable("bad_module", f"{path.name} is not a kernel module.", "Build again.")
    return data


def modinfo(elf: bytes) -> dict[str, list[str]]:
    """Returns the `key=value` strings of a module's `.modinfo` section. Raises `ValueError` when it has none."""
    try:
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
        sections = [struct.unpack_from("<IIQQQQ", elf, table + size * number) for number in range(count)]
        names = sections[names_at][4]
        for name, _type, _flags, _address, offset, length in sections:
            start = names + name
            if elf[start : elf.index(b"\0", start)] != b".modinfo":
                continue
            values: dict[str, list[str]] = {}
            for item in elf[offset : offset + length].split(b"\0"):
                key, separator, value = item.decode("utf-8", "replace").partition("=")
                if separator:
                    values.setdefault(key, []).append(value)
            return values
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError("not an ELF file of 64 bits, or a damaged one") from error
    raise ValueError("no .modinfo section")


def dependencies(elf: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names that a module needs, and those that it would like to have loaded before it (`softdep pre:`)."""
    values = modinfo(elf)
    hard = [canonical(name) for line in values.get("depends", []) for name in line.split(",") if name]
    soft: list[str] = []
    for line in values.get("softdep", []):
        before = False
        for word in line.split():
            if word.endswith(":"):
                before = word == "pre:"
            elif before:
                soft.append(canonical(word))
    return tuple(hard), tuple(soft)


def load_order(
    wanted: Iterable[str],
    available: Iterable[str],
    compiled_in: frozenset[str],
    depends: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]],
) -> list[str]:
    """Returns the modules to load, dependencies first; what is compiled in is left out.

    Raises `Unavailable("kernel_lacks_module")` for a wanted or needed one that is neither a module nor compiled in.
    """
    files = frozenset(available)
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str, needed_by: str | None) -> None:
        if name in seen or (name in compiled_in and name not in files):
            return
        if name not in files:
            why = f" that {needed_by} needs" if needed_by else ""
            raise Unavailable(
                "kernel_lacks_module",
                f"The kernel package has no module {name}{why}, and it is not compiled in.",
                "Use the distribution's kernel for virtual machines.",
            )
        seen.add(name)
        hard, soft = depends(name)
        for other in soft:
            if other in files:
                visit(other, name)
        for other in hard:
            visit(other, name)
        order.append(name)

    for name in wanted:
        visit(name, None)
    return order


def only_for_vsock(name: str) -> bool:
    """Tells whether a module is of use only where the channel is a vsock."""
    return name == "vsock" or name.startswith("vmw_vsock_")


def collect(folder: Path, wanted: Iterable[str] = (*NEEDED, *FOR_VSOCK)) -> Mapping[str, bytes]:
    """Returns the modules that `wanted` needs under `folder`, in load order, as name → ELF file. Raises `Unavailable`."""
    files = index(folder)
    contents: dict[str, bytes] = {}

    def depends(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        contents[name] = read(files[name])
        try:
            return dependencies(contents[name])
        except ValueError as error:
            raise Unavailable("bad_module", f"{files[name].name}: {error}.", "Build again.") from error

    order = load_order(wanted, files, built_in(folder), depends)
    return {name: contents[name] for name in order}
