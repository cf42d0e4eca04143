"""The file that describes a session: what survives the node process.

`session.jsonl` has the specification in its first line and one line per state that was reached after it; the last whole
line holds. A line is added by one write, so a process that is killed at any instant leaves the former state or the new
one. (Replacing a file instead makes a new one each time, the dearest of all calls here, and a short command waits for three of them.)
"""

import contextlib
import errno
import os
from pathlib import Path

import msgspec

from hatchway.wire.node import Exit, SessionSpec

FILE = "session.jsonl"


class State(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What changes. Times are Unix seconds, offsets octets.

    Written are the creation, the intent to start, the start, the end of the leader and the end of the streams; the rest
    (how far stdin is) the agent says after a restart.
    """

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


class Record(State, kw_only=True, omit_defaults=True):
    """A session: its specification and its present state."""

    spec: SessionSpec
    created_at: float
    forked_from: str | None = None
    """The session, of another sandbox, whose process runs on in this one."""
    forked_at: tuple[int, int] = (0, 0)
    """Where its stdout and stderr stood then: octets before are that session's."""


class _Head(msgspec.Struct, kw_only=True):
    version: int
    spec: SessionSpec
    created_at: float
    forked_from: str | None = None
    forked_at: tuple[int, int] = (0, 0)


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_states = msgspec.json.Decoder(State)
_FIELDS = State.__struct_fields__


def create(folder: Path, record: Record) -> None:
    """Writes the first lines. Raises `OSError`."""
    head = _encoder.encode(
        _Head(
            version=1,
            spec=record.spec,
            created_at=record.created_at,
            forked_from=record.forked_from,
            forked_at=record.forked_at,
        )
    )
    _write(folder, os.O_CREAT | os.O_TRUNC, head + b"\n" + _line(record))


def save(folder: Path, record: Record) -> None:
    """Adds the present state. Raises `OSError`; nothing is added then."""
    _write(folder, 0, _line(record))


def load(folder: Path) -> Record | None:
    """Reads the record; None when there is none, or none that can be understood. Cuts off a line that was not finished."""
    path = folder / FILE
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if len(lines) < 2:
            return None
        head, state = _heads.decode(lines[0]), _states.decode(lines[-1])
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        fields = {name: getattr(state, name) for name in _FIELDS}
        return Record(
            spec=head.spec, created_at=head.created_at, forked_from=head.forked_from, forked_at=head.forked_at, **fields
        )
    return None


def is_complete(folder: Path) -> bool:
    """Tells whether the session was ever recorded: its creation was answered only after the second line."""
    try:
        return (folder / FILE).read_bytes().count(b"\n") >= 2
    except OSError:
        return False


def _line(record: Record) -> bytes:
    return _encoder.encode(State(**{name: getattr(record, name) for name in _FIELDS})) + b"\n"


def _write(folder: Path, flags: int, body: bytes) -> None:
    fd = os.open(f"{folder}/{FILE}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        written = os.write(fd, body)
        if written < len(body):  # the disk is full: half a line must not stand before the next one
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            raise OSError(errno.ENOSPC, "no space left for the record of a session")
    finally:
        os.close(fd)
