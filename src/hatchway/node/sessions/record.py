"""The file that describes a session: what survives the node process."""

import contextlib
import os
from pathlib import Path

import msgspec

from hatchway.wire.node import Exit, SessionSpec

FILE = "session.json"


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Content of `session.json`. Times are Unix seconds, offsets octets.

    What a running process does is not written down step by step: after a restart the agent says it. Written are the
    creation, the intent to start, the end of the leader and the end of the streams.
    """

    version: int = 1
    spec: SessionSpec
    created_at: float
    epoch: int = 1
    """Grows when the sandbox is rolled back, so that offsets of another past are not taken for ours."""
    state: str = "created"
    """`created`, `starting` (SPAWN may have been sent), `running`, `exited`, `ended`."""
    boot_id: str | None = None
    """The guest's boot in which the process was, or was to be, started."""
    pid: int | None = None
    exit: Exit | None = None
    started_at: float | None = None
    ended_at: float | None = None
    retain_until: float | None = None
    stdin_offset: int = 0
    stdin_eof: bool = False
    stdout_end: int = 0
    """Once ended: how much the stream had, kept or not."""
    stderr_end: int = 0
    agent_open: bool = False
    """The agent may still know the process: something of it may live, or its record was not closed yet."""
    hidden: str = ""
    """`deleted` or `expired`: nobody sees the session any more; the record waits until the agent forgot the process."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def save(folder: Path, record: Record) -> None:
    """Replaces the record atomically. Raises `OSError`."""
    path, temporary = f"{folder}/{FILE}", f"{folder}/{FILE}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        body = _encoder.encode(record)
        while body:
            body = body[os.write(fd, body) :]
    finally:
        os.close(fd)
    os.rename(temporary, path)


def load(folder: Path) -> Record | None:
    """Reads the record; None when there is none, or none that can be understood."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
        return _decoder.decode((folder / FILE).read_bytes())
    return None
