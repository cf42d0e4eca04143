"""A whole service with played machines: control plane, node and launcher are processes, which are started again when they die.

As in `hatchway up`, the listening sockets are held by who starts the processes: what was asked of a dead one waits for the next.
"""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sqlalchemy.exc import OperationalError
from tests.support import played_launcher, played_node
from tests.support.played_launcher import machines, read_record

from hatchway.control import main as control_main
from hatchway.control.config import ControlConfig
from hatchway.node.vmm import disk as disks
from hatchway.storage.sqlite import SqliteDatabase
from hatchway.wire import fault_points

ROLES = ("launcher", "node", "control")
WITHIN_S = 60.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.played_world", "hatchway.control.plane"])


def _tell(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send("ready")


def run_launcher(sock: socket.socket, folder: Path, faults: Path, told: Connection) -> None:
    """The launcher's process."""
    played_launcher.run(sock, folder / "run", faults, lambda: _tell(told))


def run_node(sock: socket.socket, folder: Path, faults: Path, told: Connection) -> None:
    """The node's process."""
    played_node.run(sock, folder, faults, lambda: _tell(told))


def run_control(sock: socket.socket, folder: Path, faults: Path, told: Connection) -> None:
    """The control plane's process."""
    fault_points.listen(faults)
    setattr(SqliteDatabase, "write", _write)  # noqa: B010  # typed for any transaction
    config = ControlConfig(
        folder=folder / "control", node_socket=folder / "run" / "node.sock", reconcile_every_s=1.0, ballast_mib=1
    )
    control_main.run(config, api=sock, ready=lambda: _tell(told))


_plain_write = SqliteDatabase.write
_CODES = {errno.ENOSPC: sqlite3.SQLITE_FULL, errno.EIO: sqlite3.SQLITE_IOERR_WRITE}


async def _write(self: SqliteDatabase, body: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """A transaction that passes a point before it is committed: an error there is what SQLite says of the disk."""

    def whole(connection: Any, *args: Any, **more: Any) -> Any:
        result = body(connection, *args, **more)
        try:
            fault_points.reached("commit", body.__qualname__)
        except OSError as error:
            broken = sqlite3.OperationalError(str(error))
            broken.sqlite_errorcode = _CODES[error.errno or errno.EIO]
            raise OperationalError("COMMIT", {}, broken) from error
        return result

    whole.__qualname__ = body.__qualname__
    return await _plain_write(self, whole, *args, **more)


_MAINS: dict[str, Callable[..., None]] = {"launcher": run_launcher, "node": run_node, "control": run_control}


class PlayedWorld:
    """See the module. Made by `played_world`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        for made in (self.faults, folder / "run", folder / "control"):
            made.mkdir(mode=0o700)
        self._sockets = {
            "launcher": _listen_unix(folder / "run" / "launcher.sock", socket.SOCK_SEQPACKET),
            "node": _listen_unix(folder / "run" / "node.sock", socket.SOCK_STREAM),
            "control": _listen_tcp(),
        }
        host, port = self._sockets["control"].getsockname()
        self.url = f"http://{host}:{port}"
        self._running: dict[str, Any] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self.restarts = 0
        self._looks = 0
        self._killed: set[int] = set()

    async def start(self) -> None:
        """Starts all; returns when all are ready."""
        for role in ROLES:
            await self._start(role)
        self._keeping = [asyncio.create_task(self._keep(role)) for role in ROLES]

    async def _start(self, role: str) -> None:
        told, tell = _processes.Pipe(duplex=False)
        arguments = (self._sockets[role], self.folder, self.faults, tell)
        process = _processes.Process(target=_MAINS[role], args=arguments, daemon=True)
        await asyncio.to_thread(process.start)
        self._running[role] = process
        tell.close()
        ready, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(told.fileno(), ready.set)
        try:
            # Its end closes the pipe, and so is heard, too.
            await asyncio.wait_for(ready.wait(), WITHIN_S)
        finally:
            loop.remove_reader(told.fileno())
            told.close()

    async def _keep(self, role: str) -> None:
        while True:
            await self._ended(self._running[role])
            self.restarts += 1
            self._killed.discard(self.pid(role))  # the number may be another's now
            await self._start(role)

    @staticmethod
    async def _ended(process: Any) -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()

    def pid(self, role: str) -> int:
        """The process that plays the role now."""
        return int(self._running[role].pid)

    def settled(self, role: str) -> bool:
        """Whether the role is played."""
        # One that was killed a moment ago may not have ended yet.
        return self.pid(role) not in self._killed and bool(self._running[role].is_alive())

    def kill(self, role: str) -> None:
        """SIGKILL; it is started again."""
        self._killed.add(self.pid(role))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid(role), signal.SIGKILL)

    # -- faults

    def arm(self, point: str, what: str) -> None:
        """Has something happen at a point (`wire.fault_points`)."""
        new = self.faults / ".new"
        new.write_text(what)
        new.rename(self.faults / point)

    def disarm(self) -> list[str]:
        """Takes away what has not happened; returns its points."""
        left = [path for path in self.faults.iterdir() if path.name != "trace"]
        for path in left:
            path.unlink(missing_ok=True)
        return [path.name for path in left]

    # -- what the guests do, and what there is

    def run_folder(self, sandbox_id: str) -> Path:
        """The folder of a sandbox's machine."""
        return self.folder / "run" / "vm" / sandbox_id

    def sandbox_folder(self, sandbox_id: str) -> Path:
        """What the node keeps of a sandbox."""
        return self.folder / "sandboxes" / sandbox_id

    async def write(self, sandbox_id: str, text: str) -> None:
        """The guest of a running sandbox writes to its memory and its disk."""
        played_node.write_memory(self.run_folder(sandbox_id), text)
        played_node.write_disk(self.sandbox_folder(sandbox_id), text)

    async def read(self, sandbox_id: str) -> tuple[str, str]:
        """What the guest of a running sandbox has in memory and on disk."""
        return played_node.read_memory(self.run_folder(sandbox_id)), self.disk(sandbox_id)

    def disk(self, sandbox_id: str) -> str:
        """What is on a sandbox's disk."""
        return played_node.read_disk(self.sandbox_folder(sandbox_id))

    def kept(self, sandbox_id: str) -> tuple[str, str]:
        """What a suspended sandbox has kept of its memory, and what is on its disk."""
        return played_node.read_kept_memory(self.sandbox_folder(sandbox_id) / "suspended"), self.disk(sandbox_id)

    async def die(self, sandbox_id: str, *, shut_down: bool) -> None:
        """A machine ends by itself: killed, or powered off by its guest."""
        record = read_record(self.run_folder(sandbox_id))
        assert record is not None
        if shut_down:
            (self.run_folder(sandbox_id) / played_node.SHUT_DOWN).touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.shim_pid, signal.SIGKILL)

    async def strays(self, states: dict[str, str], snapshots: set[str]) -> list[str]:
        """What is there and should not be, or the other way, given the sandboxes' states and the snapshots that there are."""
        found: list[str] = []
        processes = self._machines()
        for name, pids in processes.items():
            if states.get(name) not in ("running", "paused") or len(pids) != 1:
                found.append(f"machines of {name}, which is {states.get(name)}: {pids}")
            else:
                still = played_launcher.is_stopped(pids[0])
                if still != (states[name] == "paused"):
                    found.append(
                        f"the machine of {name}, which is {states[name]}, {'stands still' if still else 'runs'}"
                    )
        found += [f"{name} is {states[name]} and has no machine" for name in states.keys() - processes.keys()
                  if states[name] in ("running", "paused")]  # fmt: skip
        found += [f"a run folder of {path.name}" for path in (self.folder / "run" / "vm").iterdir()
                  if states.get(path.name) not in ("running", "paused")]  # fmt: skip
        root = self.folder / "sandboxes"
        for folder in root.iterdir():
            if folder.name in (".forks", ".imports"):
                found += [f"what branches or an import were made from: {path}" for path in folder.iterdir()]
            elif folder.name not in states:
                found.append(f"a folder of {folder.name}, which is not there")
            else:
                found += self._strays_in(folder, states[folder.name])
        kept = self.folder / "snapshots"
        there = {path.name for path in kept.iterdir()} if kept.exists() else set()
        found += [f"a folder of the snapshot {name}, which is not there" for name in there - snapshots]
        found += [f"the snapshot {name} has no folder" for name in snapshots - there]
        return found

    def _machines(self) -> dict[str, list[int]]:
        """The machines' processes: those that are recorded, and at every tenth look all that there are."""
        self._looks += 1
        if self._looks % 10 == 0:
            return machines(self.folder / "run")
        recorded = (read_record(path) for path in (self.folder / "run" / "vm").iterdir())
        return {one.sandbox_id: [one.shim_pid] for one in recorded if one is not None and played_launcher.alive(one)}

    @staticmethod
    def _strays_in(folder: Path, state: str) -> list[str]:
        names = {path.name for path in folder.iterdir()}
        expected = {"record.json", "egress.json", disks.RECORD, disks.LOWEST, disks.TOP, "memory-base", "layer-1.qcow2"}
        if state == "suspended":
            expected.add("suspended")
            if "suspended" not in names:
                return [f"{folder.name} is suspended and has no memory"]
        return [f"{name} in the folder of {folder.name}, which is {state}" for name in names - expected]

    async def close(self) -> None:
        """Ends everything."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        for role in reversed(ROLES):
            process = self._running.get(role)
            if process is not None:
                process.kill()
                process.join()
        for pids in machines(self.folder / "run").values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for sock in self._sockets.values():
            sock.close()


def _listen_unix(path: Path, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    sock.listen(64)
    return sock


def _listen_tcp() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    return sock


@contextlib.asynccontextmanager
async def played_world(folder: Path) -> AsyncIterator[PlayedWorld]:
    """A world in `folder`, which has a short path and is emptied afterwards."""
    world = PlayedWorld(folder)
    try:
        await world.start()
        yield world
    finally:
        await world.close()
        shutil.rmtree(folder, ignore_errors=True)
