"""Node-local truth: one record per sandbox, enough to find its VM again without any database.

A record is written, fsynced and renamed before the thing that it announces is done, so that a node which died at any
instant finds out on its next start what it was about to do.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hatchway.domain.ids import is_id
from hatchway.domain.lifecycle import State
from hatchway.domain.shapes import Shape
from hatchway.wire.small_files import replace_file, sync_folder

FILE = "record.json"

log = logging.getLogger(__name__)


class Record(msgspec.Struct, kw_only=True):
    """One sandbox of this node.

    `state` is a stable state of the lifecycle, or what was in hand: `creating starting stopping restoring rolling_back deleting`.
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
    stored_bytes: int | None = None
    """What a suspended sandbox keeps for its memory, in octets on this disk."""
    artifact: str | None = None
    """By which digest a suspended sandbox is fetched from the store that nodes share."""
    host_boot_id: str = ""
    pooled: bool = False
    """It is a member of a pool: nobody has claimed it yet."""


def write(folder: Path, record: Record, *, durable: bool = True) -> None:
    """Replaces the record in the sandbox's folder. Raises `OSError` (ENOSPC among them), leaving the former one.

    One that is not `durable` outlives this process, which is what it is for, and is not sure to outlive the host: enough for
    what a host that comes up again would begin anew anyhow.
    """
    replace_file(folder / FILE, msgspec.json.encode(record), durable=durable)


def read(folder: Path) -> Record:
    """Reads the record of a folder. Raises `OSError`, `msgspec.DecodeError`."""
    return msgspec.json.decode((folder / FILE).read_bytes(), type=Record)


def flush(folder: Path) -> None:
    """Makes durable what was written of the record. Raises `OSError`."""
    fd = os.open(folder / FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(folder)


def read_all(root: Path) -> Iterator[tuple[Path, Record | None]]:
    """Yields every sandbox folder under `root` with its record; None where a folder was made but no record written yet.

    A record that cannot be read must not keep the others from being found: its sandbox is `failed`, and can be deleted.
    """
    for folder in sorted(root.iterdir()):
        if not folder.is_dir() or not is_id(folder.name):
            continue
        try:
            yield folder, read(folder)
        except FileNotFoundError:
            yield folder, None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.error("%s: the record cannot be read: %s", folder / FILE, error)
            yield folder, _damaged(folder.name)


def _damaged(sandbox_id: str) -> Record:
    return Record(
        sandbox_id=sandbox_id,
        project="",
        generation=1,
        template_digest="",
        shape=Shape(),
        hostname="",
        machine_id="",
        env={},
        state=str(State.FAILED),
        reason=f"Its record on the node ({FILE}) is damaged. What it wrote lies in its folder; delete it when that is saved.",
    )
