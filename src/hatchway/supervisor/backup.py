"""`hatchway backup`: a copy of the database in a file, and back."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from hatchway.domain.errors import Conflict, NotFound, Unprocessable
from hatchway.supervisor import offline, uids
from hatchway.supervisor.settings import Settings


def make(settings: Settings, target: Path) -> None:
    """Copies the database into a new file (0600), while the service is up or down.

    Raises `Unprocessable("backup_on_server")`, `Conflict("backup_exists")`, and what `storage.backup.copy` does.
    """
    from hatchway.control import offline as at_rest

    _require_file(settings)
    if target.exists() or target.is_symlink():
        raise Conflict("backup_exists", f"{target} is there already.", "Name another file.")
    settings = replace(settings, uid_base=uids.base_of(settings))
    made = settings.control / offline.in_child(settings, at_rest.backup)
    try:
        with made.open("rb") as source, _new(target) as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    finally:
        made.unlink(missing_ok=True)


def put_back(settings: Settings, source: Path) -> None:
    """Takes a copy for the database of a service that is down; what was there is kept beside it.

    Raises `Conflict("service_is_up")`, `NotFound("no_backup")`, `Unprocessable` (`backup_unusable backup_on_server`).
    """
    from hatchway.control import offline as at_rest

    _require_file(settings)
    if not source.is_file():
        raise NotFound("no_backup", f"{source} is no file.", "Name one that `hatchway backup` made.")

    def hand_over(prepared: Settings) -> None:
        copied = prepared.control / at_rest.BACKUP
        copied.unlink(missing_ok=True)
        with source.open("rb") as original, _new(copied) as copy:
            shutil.copyfileobj(original, copy)
            if os.geteuid() == 0:
                os.fchown(copy.fileno(), prepared.identity.control, prepared.identity.control)

    offline.as_control(settings, at_rest.put_back, before=hand_over)


def _new(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _require_file(settings: Settings) -> None:
    if settings.database_url is not None:
        raise Unprocessable(
            "backup_on_server",
            "The database is on a PostgreSQL server.",
            "`pg_dump --format=custom` makes a backup, `pg_restore` puts it back: docs/production.md.",
        )
