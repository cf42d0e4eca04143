"""A launcher as a real process with real jails, whose VMM is the little program `shim/tests/vmm.c`."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from hatchway.domain.ids import new_id
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.shim import ShimClient
from hatchway.wire.launcher import StartVm, VmRecord

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "shim"
WITHIN = 30.0
_turns = itertools.count()


def build() -> Path:
    """Builds shim, preload library and test VMM once, however many test processes ask."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-C", str(REPOSITORY / "shim"), "all", "tools", f"OUT={BUILD}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILD


async def until(condition, what: str, within: float = WITHIN) -> None:
    """Waits until `condition()` holds."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


class Talk:
    """A conversation with the test VMM over its control socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def say(self, line: str) -> str:
        self._writer.write(line.encode() + b"\n")
        async with asyncio.timeout(WITHIN):
            return (await self._reader.readline()).decode().rstrip("\n")

    async def attempt(self, what: str, argument: object = "-") -> int:
        """The errno of something it tries; 0 when it succeeded."""
        answer = (await self.say(f"try {what} {argument}")).split()
        return 0 if answer[0] == "ok" else int(answer[1])

    async def errno(self, line: str) -> int:
        answer = (await self.say(line)).split()
        return 0 if answer[0] == "ok" else int(answer[1])

    def tell(self, line: str) -> None:
        """Says something that it does not live to answer."""
        self._writer.write(line.encode() + b"\n")

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Site:
    """One installation: run folder, VMM tree, launcher."""

    def __init__(self, *options: str, command: Sequence[str] = ()) -> None:
        build()
        # A path that no Unix socket address can hold.
        self.top = Path(tempfile.mkdtemp(prefix="hatchway-site-"))
        self.top.chmod(0o755)
        self.folder = self.top / ("a-long-name-" * 12)
        self.run = self.folder / "run"
        self.root = self.folder / "root"
        for part in (self.folder, self.run, self.root, self.root / "dev", self.root / "tmp"):
            part.mkdir()
        shutil.copy(BUILD / "test-vmm", self.root / "vmm")
        (self.root / "vmm").chmod(0o777)
        self.shim = self.folder / "hatchway-shim"
        shutil.copy(BUILD / "hatchway-shim", self.shim)
        self.uid_base = 1_910_000_000 + (os.getpid() % 60_000) * 4_000 + next(_turns) * 100
        self.command = list(command) or [sys.executable, "-I", "-m", "hatchway.launcher"]
        self.options = list(options)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "launcher.log"
        self.client = LauncherClient(self.run / "launcher.sock")
        self.client_uid = 0
        self._talks: list[Talk] = []

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """In this block the test connects as the user whose launcher it is."""
        os.seteuid(self.client_uid)
        try:
            yield
        finally:
            os.seteuid(0)

    def arguments(self) -> list[str]:
        return ["--run-dir", str(self.run), "--shim", str(self.shim), "--uid-base", str(self.uid_base), *self.options]

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*self.command, *self.arguments()], stderr=log, stdin=subprocess.DEVNULL)

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(WITHIN)

    def end(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN)

    def request(self, **changes: object) -> StartVm:
        given = {"sandbox_id": new_id(), "generation": 1, "argv": ("/vmm",), **changes}
        return StartVm(**given)  # type: ignore[arg-type]

    async def start_vm(self, *fds: int, **changes: object) -> VmRecord:
        """Starts a VM; `fds` become 20, 21, … in it."""
        request = self.request(pass_as=tuple(range(20, 20 + len(fds))), **changes)
        return await self.ask_start(request, *fds)

    async def ask_start(self, request: StartVm, *fds: int) -> VmRecord:
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY)
        try:
            return await self.client.start_vm(request, [root, *fds])
        finally:
            os.close(root)

    async def talk(self, vm: VmRecord) -> Talk:
        folder = os.open(self.run / "vm" / vm.sandbox_id, os.O_PATH)
        try:
            talk = Talk(*await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/qmp.sock"))
        finally:
            os.close(folder)
        self._talks.append(talk)
        return talk

    async def shim_of(self, vm: VmRecord) -> ShimClient:
        return await ShimClient.connect(self.run / "vm" / vm.sandbox_id / "shim.sock")

    def processes(self) -> set[int]:
        """The pids that run as this site's VMs, or are shims of its launcher."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes()
                    uid = (entry / "status").read_text().split("Uid:\t")[1].split("\t")[0]
                    ours = self.uid_base <= int(uid) < self.uid_base + 100
                    if (ours or os.readlink(entry / "exe") == str(self.shim)) and words:
                        found.add(int(entry.name))
        return found

    def cgroups(self) -> list[Path]:
        info = self.run.stat()
        name = f"{info.st_dev:x}-{info.st_ino:x}"
        return [path for base in ("*", ".") for path in Path("/sys/fs/cgroup").glob(f"{base}/hatchway/{name}/slot-*")]

    def vm_folders(self) -> list[str]:
        return os.listdir(self.run / "vm")

    async def clean_up(self) -> None:
        """Ends all and checks that nothing is left, whatever the test did before."""
        try:
            for talk in self._talks:
                await talk.close()
            if self.process is None or self.process.poll() is not None:
                self.start()
            with self.acting():
                for vm in await self.client.list_vms():
                    await self.client.kill_vm(vm.sandbox_id)
                    await self.client.forget_vm(vm.sandbox_id)
                await self.client.close()
            assert self.end() == 0, self.log.read_text()
            await until(lambda: not self.processes(), "processes are left")
            assert self.vm_folders() == []
            assert self.cgroups() == []
            assert str(self.folder) not in Path("/proc/self/mountinfo").read_text()
        except BaseException:
            print(self.log.read_text() if self.log.exists() else "no log")
            raise
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.wait(WITHIN)
            shutil.rmtree(self.top)


@contextlib.asynccontextmanager
async def site(*options: str) -> AsyncIterator[Site]:
    """A site with its launcher running, and nothing of it left behind."""
    made = Site(*options)
    try:
        made.start()
        yield made
    finally:
        await made.clean_up()


def record_of(made: Site, vm: VmRecord) -> dict[str, object]:
    return json.loads((made.run / "vm" / vm.sandbox_id / "launch.json").read_text())


def python_for_anybody() -> list[str]:
    """A command that runs the launcher's module by an interpreter of this version that any user may execute."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # Twice: setpriv itself still has root's right to reach any file when it executes the first.
    twice = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', ''])"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        ran = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", twice],
            capture_output=True,
            check=False,
        )
        if ran.returncode == 0:
            paths = [str(REPOSITORY / "src"), sysconfig.get_path("platlib")]
            code = f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_module('hatchway.launcher', run_name='__main__')"
            return [python, "-I", "-c", code]
    raise AssertionError(f"no Python {version} that another user may execute")
