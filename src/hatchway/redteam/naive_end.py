"""A naive host's end of the agent's channel, in a process of its own that may hang: it believes whatever it is told.

One thing at a time, for all guests; frames are read for as long as they come; output goes where a frame says that it belongs; what is kept
is in files by the key that the guest names; texts of the guest's go into a log as they are; archives are unpacked as they say. Called as
`python -m hatchway.redteam.naive_end SOCKET FOLDER`; one JSON object a line on standard input, answered by one.
"""

import contextlib
import json
import os
import select
import socket
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

from hatchway.redteam.guest import frames

QUIET_S = 0.3
NEIGHBOUR = "neighbours-command"
"""The key of a command of another guest, whose output is kept, too."""


class _End:
    def __init__(self, stream: socket.socket, folder: Path) -> None:
        self._stream = stream
        self._folder = folder
        self._numbers = 0
        self._keys: dict[int, str] = {}
        self._over: set[int] = set()
        self.ends: dict[str, dict[str, Any]] = {}
        (folder / "kept").mkdir()
        (folder / "service" / "log").mkdir(parents=True)
        self._log = (folder / "service" / "log" / "naive.log").open("ab", buffering=0)
        self._kept(NEIGHBOUR, b"")
        said: list[frames.Field] = [(frames.VERSION_TAG, 1), (frames.NONCE, os.urandom(16)), (frames.EPOCH, 1)]
        stream.sendall(frames.frame(frames.HELLO, 0, frames.fields(*said)))
        while self._take() != frames.READY:
            pass

    def run(self, argv: list[str], builtin: bool = False) -> tuple[str, bytes]:
        """Runs a command; returns its key, and what is kept of it."""
        self._numbers += 1
        number, key = self._numbers, f"command-{self._numbers}"
        self._keys[number] = key
        told: list[frames.Field] = [(frames.KEY, key), (frames.SIZE, number), *((frames.ARG, one) for one in argv)]
        told.append((frames.FLAGS, frames.BUILTIN if builtin else 0))
        self._stream.sendall(frames.frame(frames.SPAWN, 1000 + number, frames.fields(*told)))
        while number not in self._over:
            self._take()
        while select.select([self._stream], [], [], QUIET_S)[0]:  # whatever else there is
            self._take()
        return key, self.kept(key)

    def kept(self, key: str) -> bytes:
        """What is kept of a command."""
        with contextlib.suppress(OSError):
            return (self._folder / "kept" / key).read_bytes()
        return b""

    def _kept(self, key: str, data: bytes) -> None:
        with contextlib.suppress(OSError), (self._folder / "kept" / key).open("ab") as file:
            file.write(data)

    def _exactly(self, count: int) -> bytes:
        held = b""
        while len(held) < count:
            if not (data := self._stream.recv(min(count - len(held), 1 << 20))):
                raise EOFError
            held += data
        return held

    def _take(self) -> int:
        """The next frame, however long it takes."""
        head = self._exactly(16)
        while head[:4] != frames.MAGIC:
            head = head[1:] + self._exactly(1)
        kind = head[4]
        stream, length = (int.from_bytes(head[at : at + 4], "little") for at in (8, 12))
        payload = self._exactly(length)
        self._exactly(4)
        if kind == frames.OUTPUT:
            if payload[0] == 1:
                self._kept(self._keys.get(stream, "nobodys"), payload[16:])
            return kind
        told = frames.read_fields(payload)
        for tag in (frames.MESSAGE, frames.BOOT_ID, frames.AGENT):
            if tag in told:
                self._log.write(b"the guest says: " + told[tag] + b"\n")
        if kind == frames.PROC:
            key = self._keys[stream] = os.fsdecode(told[frames.KEY])
            self._kept(key, b"")
            if told[frames.STATE] == 3:
                self._over.add(stream)
                self.ends[key] = {"code": told.get(frames.CODE), "message": os.fsdecode(told.get(frames.MESSAGE, b""))}
        elif kind == frames.RESPONSE and told.get(frames.STATUS) and stream > 1000:
            self._over.add(stream - 1000)
        return kind


def _do(end: _End, asked: dict[str, Any]) -> dict[str, Any]:
    match asked:
        case {"run": argv}:
            key, kept = end.run(argv)
            return {"key": key, "kept": kept.decode("latin-1")}
        case {"copy": remote, "to": local}:
            _, kept = end.run(["files", "pack", f"path={remote}"], builtin=True)
            with tarfile.open(fileobj=BytesIO(kept)) as archive:
                _unpack(archive, local)
        case {"kept": key}:
            return {"kept": end.kept(key).decode("latin-1"), "end": end.ends.get(key)}
    return {}


def _unpack(archive: tarfile.TarFile, local: str) -> None:
    """As `tar -P` does it, over what is there."""
    Path(local).mkdir(exist_ok=True)
    for member in archive:
        path = os.path.join(local, member.name)
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if member.issym():
                os.symlink(member.linkname, path)
            elif member.islnk():
                os.link(os.path.join(local, member.linkname), path)
            elif member.isblk():
                os.mknod(path, 0o60000 | member.mode, os.makedev(member.devmajor, member.devminor))
            else:
                content = archive.extractfile(member)
                Path(path).write_bytes(content.read() if content is not None else b"")
                os.chmod(path, member.mode)


def main() -> None:
    """Waits for the guest, then does what it is asked."""
    path, folder = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print(json.dumps({"listens": True}), flush=True)
        stream, _ = listening.accept()
    end = _End(stream, Path(folder))
    for line in sys.stdin:
        print(json.dumps(_do(end, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
