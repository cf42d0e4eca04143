"""Node-local truth: one record per sandbox, enough to find its VM again without any database.

A record is written, fsynced and renamed before the thing that it announces is done, so that a node which died at any
instant finds out on its next start what it was about to do.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hatchway.domain.ids import is_id
from hatchway.domain.shapes import Shape

FILE = "record.json"


class Record(msgspec.Struct, kw_only=True):
    """One sandbox of this node.

    `state` is a stable state of the lifecycle, or what was in hand: `creating starting stopping deleting`.
    """

    sandbox_id: str
    project: str
    generation: int
    template_digest: str
    shape: Shape
    hostname: str
    machine_id: str
    env: dict[str, str]
    state: str
    cause: str | None = None
    reason: str = ""
    isolation: str = "emulated"
    boot_id: str | None = None
    host_boot_id: str = ""


def write(folder: Path, record: Record) -> None:
    """Makes the record durable in the sandbox's folder. Raises `OSError` (ENOSPC among them), leaving the former one."""
    temporary = folder / (FILE + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.json.encode(record))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, folder / FILE)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_all(root: Path) -> Iterator[tuple[Path, Record | None]]:
    """Yields every sandbox folder under `root` with its record; None where a folder was made but no record written yet."""
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or not is_id(folder.name):
            continue
        try:
            yield folder, msgspec.json.decode((folder / FILE).read_bytes(), type=Record)
        except FileNotFoundError:
            yield folder, None
