"""The guest's first file system: the agent as `/init`, the kernel modules, and the lists that say in which order to load them."""

import gzip
from collections.abc import Mapping

from hatchway.node.images.cpio import Entry, archive
from hatchway.node.images.modules import only_for_vsock

_FOLDERS = ("dev", "proc", "sys", "run", "tmp", "mnt")


def recipe_text() -> str:
    """Returns what the form depends on besides agent and modules."""
    return f"newc gzip-1 vsock {' '.join(_FOLDERS)}"


def make(agent: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Returns the initramfs; `modules` is in load order. The same input gives the same octets."""
    entries = [Entry(name, 0o755) for name in _FOLDERS]
    entries.append(Entry("init", 0o755, agent))
    lists: dict[str, list[str]] = {"modules": [], "modules-vsock": []}
    for name, data in modules.items():
        path = f"lib/modules/{name}.ko"
        entries.append(Entry(path, 0o644, data))
        lists["modules-vsock" if only_for_vsock(name) else "modules"].append(f"/{path}\n")
    entries += [Entry(name, 0o644, "".join(paths).encode()) for name, paths in lists.items()]
    return gzip.compress(archive(entries), compresslevel=1, mtime=0)
