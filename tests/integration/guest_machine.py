"""The guest agent as PID 1 of a virtual machine that nothing of ours stands before: for tests of the agent itself."""

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from guest_script import Recorder
from tests.support.native import built, images

from hatchway.node.guest.link import Link, connect
from hatchway.node.guest.seam import ExitReason, Proc, Spawn
from hatchway.node.images.seed import build_seed
from hatchway.node.images.store import Release
from hatchway.node.vmm.host import Host
from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Fields, Tag, Value

WITHIN = 120.0
DISK_MIB = 1024
"""Of the device; the file system on it is made smaller, to be grown."""
_numbers = count(1)


def agent_release() -> Release:
    """Returns the seed template with the agent as it is now."""
    return build_seed(images(), built("guest", "agent") / "hatchway-agent", tag="guest-test")


@dataclass
class Machine:
    """A bare QEMU with a template's disks: nothing of ours between it and the test."""

    release: Release
    folder: Path
    memory_mib: int = 256

    def __post_init__(self) -> None:
        self.upper = self.folder / "upper.img"
        self.console = self.folder / "console"
        self.agent_socket = self.folder / "agent.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def make_disk(self) -> None:
        with self.upper.open("xb") as file:
            file.truncate(DISK_MIB << 20)
        command = ["mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", str(self.upper), f"{DISK_MIB // 2}M"]
        subprocess.run(command, check=True, timeout=60)

    def start(self) -> None:
        """Binds the agent's socket itself, so that a link can connect before the machine runs."""
        files = self.release.boot_files()
        self.agent_socket.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self.agent_socket))
            listening.listen(1)
            command = (
                *("qemu-system-x86_64", "-M", "microvm,acpi=on,pit=on,pic=on,rtc=on", "-accel", "tcg,tb-size=64"),
                *("-cpu", "max", "-m", f"{self.memory_mib}M", "-nodefaults", "-no-user-config", "-no-reboot"),
                *("-display", "none", "-serial", f"file:{self.console}"),
                *("-kernel", str(files.kernel), "-initrd", str(files.initrd)),
                "-append",
                f"console=ttyS0 quiet reboot=t panic=-1 pci=off tsc_early_khz={Host.read().tsc_khz}",
                *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=agent,name=hatchway.agent"),
                *("-chardev", f"socket,id=agent,fd={listening.fileno()},server=on,wait=off"),
                *("-drive", f"id=upper,if=none,format=raw,file={self.upper}"),
                *("-drive", f"id=base,if=none,format=raw,readonly=on,file.locking=off,file={files.base}"),
                *("-device", "virtio-blk-device,drive=upper", "-device", "virtio-blk-device,drive=base"),
            )
            self._process = subprocess.Popen(
                command, pass_fds=(listening.fileno(),), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

    def wait_off(self) -> None:
        """Waits until the machine ended by itself."""
        assert self._process is not None
        assert self._process.wait(timeout=WITHIN) == 0
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator["Shell"]:
        link = await connect(self.agent_socket, fresh=False, vm_ended=asyncio.Event(), within=WITHIN)
        try:
            yield Shell(link)
        finally:
            await link.close()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The template with the agent as it is now."""
    return agent_release()


@pytest.fixture(scope="module")
def machine(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One machine for all tests of a module."""
    machine = Machine(release, tmp_path_factory.mktemp("vm"))
    machine.make_disk()
    machine.start()
    try:
        yield machine
    finally:
        machine.kill()


@pytest.fixture
async def shell(machine: Machine) -> AsyncIterator["Shell"]:
    """A link of its own for each test: every one resynchronises."""
    async with machine.link() as shell:
        yield shell


class Shell:
    """Runs commands in the machine over a link."""

    def __init__(self, link: Link) -> None:
        self.link = link

    async def start(self, script: str, **options: object) -> tuple[int, Recorder]:
        number = next(_numbers)
        spawn = Spawn(
            number=number,
            key=f"vm-{number}",
            argv=("sh", "-c", script),
            env={},
            stdin=False,
            **options,  # type: ignore[arg-type] # the options are data
        )
        sink = Recorder()
        await self.link.spawn(spawn, sink)
        return number, sink

    async def run(self, script: str, **options: object) -> tuple[Proc, str]:
        """Returns how it ended, and its stdout and stderr."""
        number, sink = await self.start(script, **options)
        end = await sink.end()
        await self.link.close_process(number)
        return end, (sink.out + sink.err).decode()

    async def output(self, script: str, **options: object) -> str:
        end, said = await self.run(script, **options)
        assert (end.reason, end.exit_code) == (ExitReason.EXITED, 0), f"{said} {end}"
        return said

    async def request(self, kind: FrameType, *fields: tuple[Tag, Value]) -> Fields:
        return await self.link._request(kind, *fields)
