"""The guest's first file system: the agent as `/init`, the kernel modules, and the list that says in which order to load them."""

import gzip
from collections.abc import Mapping

from hatchway.node.images.cpio import Entry, archive

_FOLDERS = ("dev", "proc", "sys", "run", "tmp", "mnt")


def recipe_text() -> str:
    """Returns what the form depends on besides agent and modules."""
    return f"newc gzip-1 {' '.join(_FOLDERS)}"


def make(agent: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Returns the initramfs; `modules` is in load order. The same input gives the same octets."""
    entries = [Entry(name, 0o755) for name in _FOLDERS]
    entries.append(Entry("init", 0o755, agent))
    paths = []
    for name, data in modules.items():
        path = f"lib/modules/{name}.ko"
        entries.append(Entry(path, 0o644, data))
        paths.append(f"/{path}\n")
    entries.append(Entry("modules", 0o644, "".join(paths).encode()))
    return gzip.compress(archive(entries), compresslevel=1, mtime=0)
