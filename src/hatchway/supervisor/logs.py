"""Structured logs: one JSON object per line on a role's standard error, which is a file that the supervisor keeps bounded.

What others say, a guest or a client, gets into a line only cut to a bound, without the secrets that are known by their form; and of lines
that come too fast only some are written, with the number of those that were not.
"""

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

from hatchway.wire.metrics import LINES_SUPPRESSED

MAX_OCTETS = 8 * 1024 * 1024
KEPT = 3
"""Earlier files: `ROLE.log.1` is the newest of them."""
MAX_TEXT = 8_000
"""Characters of one member of a line."""
BURST_OF_ONE = 50
"""Lines of one place in the source within `WINDOW_S`."""
BURST_OF_ALL = 2_000
WINDOW_S = 10.0
MAX_PLACES = 4_096

_SECRETS = re.compile(
    r"\bhw_[A-Za-z0-9_-]{8,}|\be2b_[0-9A-Fa-f]{8,}|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]+|(?i:\bbearer\s+)[^\s\"',}]+"
)
HIDDEN = "[hidden]"


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


class Flow(logging.Filter):
    """Lets `BURST_OF_ONE` lines of one place in the source pass in `WINDOW_S` seconds, and `BURST_OF_ALL` of all places.

    The first line that passes afterwards says in `suppressed` how many did not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()
        self._passed: dict[tuple[str, int], int] = {}
        self._all = 0
        self._suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        now = time.monotonic()
        if now - self._began >= WINDOW_S or len(self._passed) > MAX_PLACES:
            self._began, self._all = now, 0
            self._passed.clear()
        place = (record.pathname, record.lineno)
        passed = self._passed.get(place, 0)
        if passed >= BURST_OF_ONE or self._all >= BURST_OF_ALL:
            self._suppressed += 1
            LINES_SUPPRESSED.inc()
            return False
        self._passed[place] = passed + 1
        self._all += 1
        record.suppressed, self._suppressed = self._suppressed, 0
        return True


def clean(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hides what has the form of a secret of ours, and cuts what is longer than a line may be."""
    for name, value in event.items():
        if isinstance(value, str) and not name.startswith("_"):
            shown = _SECRETS.sub(HIDDEN, value)
            if len(shown) > MAX_TEXT:
                shown = f"{shown[: MAX_TEXT // 2]} […] {shown[-MAX_TEXT // 2 :]}"
            event[name] = shown
    return event


def _suppressed(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    suppressed = getattr(event.get("_record"), "suppressed", None)
    if suppressed:
        event["suppressed"] = suppressed
    return event


def configure(role: str) -> None:
    """Sends everything that this process logs to standard error."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(allow=("method", "path", "status", "ms", "result")),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        lambda _, __, event: {"role": role, **event},
    ]
    handler = logging.StreamHandler()
    handler.addFilter(Flow())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                _suppressed,
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                clean,
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
