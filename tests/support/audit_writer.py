"""A real audit writer in a process of its own, which tests kill and start again."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hatchway.audit.journal import Limits
from hatchway.audit.segments import listed
from hatchway.wire.audit import SOCKET
from hatchway.wire.paths import address

_BODY = """
import os, socket, sys
from pathlib import Path
import msgspec
from hatchway.audit.journal import Limits
from hatchway.audit.main import AuditConfig, run
folder, listening, ready, limits = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
uid = os.getuid()
config = AuditConfig(
    folder=folder,
    senders={uid: frozenset({"*"})},
    readers=frozenset({uid}),
    limits=msgspec.json.decode(limits, type=Limits),
)
run(config, rpc=socket.socket(fileno=listening), ready=lambda: os.write(ready, b"1"))
"""


class AuditWriter:
    """The writer of a folder. Its listening socket stays when it is killed, as the supervisor's does."""

    def __init__(self, run_dir: Path, folder: Path, limits: Limits | None = None) -> None:
        self.folder = folder
        self.path = run_dir / SOCKET
        self.limits = limits or Limits(head_every_s=1.0)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with address(self.path) as reached:
            self._sock.bind(reached)
        self._sock.listen(64)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process and waits until it serves."""
        reading, writing = os.pipe()
        arguments = (
            str(self.folder),
            str(self._sock.fileno()),
            str(writing),
            msgspec.json.encode(self.limits).decode(),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BODY, *arguments], pass_fds=(self._sock.fileno(), writing)
        )
        os.close(writing)
        try:
            ready, _, _ = select.select([reading], [], [], 30)
            assert ready, "the writer did not come up"
            assert os.read(reading, 1) == b"1", "the writer did not come up"
        finally:
            os.close(reading)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(20)

    def stop(self) -> int:
        """SIGTERM, and waits for the end; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(20)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._sock.close()

    def records(self) -> list[dict[str, Any]]:
        """All that is in the folder, as it lies there."""
        return read_records(self.folder)


def read_records(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for _, path in listed(folder):
        found += [json.loads(line) for line in path.read_bytes().splitlines()]
    return found


@contextlib.contextmanager
def audit_writer(tmp_path: Path, folder: Path | None = None, limits: Limits | None = None) -> Iterator[AuditWriter]:
    """A writer that serves, until the block is left."""
    writer = AuditWriter(tmp_path, folder or tmp_path / "audit", limits)
    try:
        writer.start()
        yield writer
    finally:
        writer.close()
