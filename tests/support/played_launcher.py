"""A launcher that is a process of its own and starts real processes as machines: they outlive it, and so do its records.

It speaks `wire.launcher` to the node's own client. What it lacks against the real one are privileges, jails and cgroups.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from hatchway.wire import fault_points
from hatchway.wire.fault_points import reached
from hatchway.wire.launcher import (
    MAX_DATAGRAM,
    Answer,
    Done,
    Failed,
    ForgetVm,
    Hello,
    HelloAnswer,
    KillVm,
    ListVms,
    Request,
    Started,
    StartVm,
    VmList,
    VmRecord,
)
from hatchway.wire.small_files import replace_file

MARK = "HATCHWAY_PLAYED_MACHINE"
"""In the environment of every machine: its folder."""
RECORD = "launch.json"
# Nothing runs before its launcher has recorded it: one that dies before that ends the machine by the end of its input.
_COMMAND = "read go && exec sleep infinity </dev/null"


def starttime(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a machine stands still."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def alive(record: VmRecord) -> bool:
    """Whether the process that was recorded is there."""
    return starttime(record.shim_pid) == record.shim_starttime


def read_record(folder: Path) -> VmRecord | None:
    """What was recorded of a machine; None where nothing was."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=VmRecord)
    except FileNotFoundError:
        return None


def machines(run_dir: Path) -> dict[str, list[int]]:
    """Every process that is a machine of this world, recorded or not, by sandbox."""
    found: dict[str, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                key, _, value = variable.decode(errors="replace").partition("=")
                if key == MARK and Path(value).parent == run_dir / "vm" and starttime(int(name)) is not None:
                    found.setdefault(Path(value).name, []).append(int(name))
    return found


class PlayedLauncher:
    """Answers one request after the other."""

    def __init__(self, run_dir: Path) -> None:
        self._vms = run_dir / "vm"
        self._vms.mkdir(exist_ok=True)
        self._children: list[subprocess.Popen[bytes]] = []

    def serve(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Serves until it is killed."""
        selector = selectors.DefaultSelector()
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)
        ready()
        while True:
            for key, _ in selector.select(0.1):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listening:
                    with contextlib.suppress(BlockingIOError):
                        selector.register(listening.accept()[0], selectors.EVENT_READ)
                    continue
                try:
                    data = sock.recv(MAX_DATAGRAM + 1)
                    if data:
                        sock.send(msgspec.json.encode(self._answer(msgspec.json.decode(data, type=Request))))
                        continue
                except OSError:
                    pass  # the node died while it asked
                selector.unregister(sock)
                sock.close()
            self._children = [child for child in self._children if child.poll() is None]

    def _answer(self, request: Request) -> Answer:
        verb = str(request.__struct_config__.tag)
        reached("launcher", verb)
        answer: Answer
        match request:
            case Hello():
                answer = HelloAnswer(rootless=False, network=True, cgroups="none")
            case StartVm():
                answer = self._start(request)
            case KillVm():
                answer = self._kill(request.sandbox_id)
            case ForgetVm():
                answer = self._forget(request.sandbox_id)
            case ListVms():
                answer = VmList(vms=tuple(sorted(self._records(), key=lambda record: record.sandbox_id)))
            case _:
                answer = Failed(code="invalid", message=verb)
        reached("launcher-did", verb)
        return answer

    def _records(self) -> list[VmRecord]:
        records = [read_record(folder) for folder in self._vms.iterdir()]
        return [msgspec.structs.replace(one, alive=alive(one)) for one in records if one is not None]

    def _start(self, request: StartVm) -> Answer:
        folder = self._vms / request.sandbox_id
        known = read_record(folder)
        if known is not None and alive(known):
            return Started(vm=known)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        child = subprocess.Popen(
            ["/bin/sh", "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={MARK: str(folder), "PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        self._children.append(child)
        reached("launcher", "spawned")
        record = VmRecord(
            sandbox_id=request.sandbox_id,
            generation=request.generation,
            uid=os.getuid(),
            slot=0,
            shim_pid=child.pid,
            shim_starttime=starttime(child.pid) or 0,
            host_boot_id="boot",
            network=request.network,
        )
        replace_file(folder / RECORD, msgspec.json.encode(record))
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.close()
        return Started(vm=record)

    def _kill(self, sandbox_id: str) -> Answer:
        record = read_record(self._vms / sandbox_id)
        if record is not None and alive(record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.shim_pid, signal.SIGKILL)
            while alive(record):
                time.sleep(0.001)
        return Done()

    def _forget(self, sandbox_id: str) -> Answer:
        record = read_record(self._vms / sandbox_id)
        if record is not None and alive(record):
            return Failed(code="running", message="It runs.")
        shutil.rmtree(self._vms / sandbox_id, ignore_errors=True)
        return Done()


def run(listening: socket.socket, run_dir: Path, faults: Path, ready: Callable[[], None]) -> None:
    """The process."""
    fault_points.listen(faults)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    PlayedLauncher(run_dir).serve(listening, ready)
