"""Structured logs: one JSON object per line, in a bounded file per role."""

import logging
import logging.handlers
from pathlib import Path

import structlog

MAX_BYTES = 8 * 1024 * 1024
KEPT = 3


def configure(role: str, file: Path | None) -> None:
    """Sends everything that this process logs to `file` (rotated at 8 MiB, three kept), or to stderr for None."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        lambda _, __, event: {"role": role, **event},
    ]
    handler: logging.Handler = (
        logging.StreamHandler()
        if file is None
        else logging.handlers.RotatingFileHandler(file, maxBytes=MAX_BYTES, backupCount=KEPT)
    )
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
