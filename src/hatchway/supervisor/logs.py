"""Structured logs: one JSON object per line on a role's standard error, which is a file that the supervisor keeps bounded."""

import contextlib
import itertools
import logging
import os
from pathlib import Path

import structlog

MAX_OCTETS = 8 * 1024 * 1024
KEPT = 3
"""Earlier files: `ROLE.log.1` is the newest of them."""


def keep_bounded(file: Path) -> None:
    """Moves what a log file holds behind `FILE.1` once it is longer than `MAX_OCTETS`; of more than that, the end.

    The file itself stays, and is emptied: a role has it open for appending, and may not make another in the folder. What it writes in
    that moment may be lost. Raises nothing: a log that cannot be kept, on a full disk above all, is emptied all the same.
    """
    with contextlib.suppress(OSError), open(file, "r+b", opener=_as_it_is) as log:
        size = os.fstat(log.fileno()).st_size
        if size <= MAX_OCTETS:
            return
        with contextlib.suppress(OSError):
            log.seek(size - MAX_OCTETS)
            _keep(file, log.read(MAX_OCTETS))
        log.truncate(0)


def _keep(file: Path, octets: bytes) -> None:
    earlier = [file.with_name(f"{file.name}.{number}") for number in range(1, KEPT + 1)]
    for newer, older in reversed(list(itertools.pairwise(earlier))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)
    fd = os.open(earlier[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    with open(fd, "wb") as kept:
        kept.write(octets)


def _as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def configure(role: str) -> None:
    """Sends everything that this process logs to standard error."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        lambda _, __, event: {"role": role, **event},
    ]
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
