"""The bare floor: one QEMU restored from the baked snapshot by a script, with nothing of ours around it.

No jail, no shim, no launcher, no API: a network namespace with a tap, a copy of the baked disk, QEMU, its saved state, and the
agent's first answer. Sockets are bound beforehand and commands pipelined, so that the floor waits for nothing but QEMU.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from hatchway.domain.errors import NotFound, Unavailable
from hatchway.domain.shapes import Shape
from hatchway.node.images.store import Images, Release
from hatchway.node.vmm import machines, qemu_args, tree
from hatchway.node.vmm.host import Host
from hatchway.supervisor.settings import Settings
from hatchway.wire import channel
from hatchway.wire.channel import Frame, FrameReader, FrameType
from hatchway.wire.channel_fields import Fields, Tag
from hatchway.wire.launcher import AGENT_FD, QMP_FD, TAP_FD

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
WITHIN_S = 60.0
FIRST_SPARE_FD = 200

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ground:
    """What the floor stands on: a release and its baked snapshot in an installation's data folder."""

    release: Release
    baked: Path
    shape: Shape
    network: bool
    hardware: bool


def find_ground(data_dir: Path, shape: Shape | None = None) -> Ground:
    """Finds the newest bake of `seed:latest` in the default shape, or another. Raises `NotFound("no_bake")`, `Unavailable("not_allowed")`."""
    release = Images(Settings(data_dir).images).resolve("seed:latest")
    shape, folder = shape or Shape(), data_dir / "node" / "baked"
    try:
        for path in sorted(folder.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True):
            made_for = json.loads(path.read_bytes())
            if (made_for["shape"]["vcpus"], made_for["shape"]["memory_mib"]) == (shape.vcpus, shape.memory_mib):
                hardware = made_for["isolation"] == "hardware"
                return Ground(release, path.parent, shape, made_for["network"], hardware)
    except PermissionError:
        raise Unavailable(
            "not_allowed", f"{folder} cannot be read.", "Run the bench as the user that runs the service (root)."
        ) from None
    raise NotFound(
        "no_bake",
        f"There is no baked snapshot of {shape.vcpus} vCPUs and {shape.memory_mib} MiB in {folder}.",
        "Create a sandbox of that shape first.",
    )


def command(
    ground: Ground, memory: Path, boot: tuple[Path, Path] | None = None, emulated_cpu: str | None = None
) -> tuple[str, ...]:
    """Returns QEMU's command line with the devices of the baked machine: to restore it, or to `boot` this kernel and initramfs,
    perhaps with another emulated processor than ours."""
    host = Host.read()
    machine = machines.machine_of(host.architecture)
    if emulated_cpu is not None:
        machine = replace(machine, emulated_cpu=emulated_cpu)
    cmdline = None
    if boot is not None:
        own = ground.release.manifest.cmdline
        cmdline = qemu_args.kernel_command_line(machine, own, hardware=ground.hardware, tsc_khz=host.tsc_khz)
    parts = qemu_args.Parts(
        machine=machine,
        hardware=ground.hardware,
        shape=ground.shape,
        layers=(qemu_args.Layer("raw"), qemu_args.Layer("qcow2")),
        network=ground.network,
        incoming=boot is None,
        cmdline=cmdline,
    )
    kernel, initrd = boot or (Path(), Path())
    places = {tree.KERNEL_PATH: str(kernel), tree.INITRD_PATH: str(initrd)}
    argv = [places.get(word, word.replace(qemu_args.RAM_PATH, str(memory))) for word in qemu_args.arguments(parts)]
    binary = str(machines.find(machine, hardware=ground.hardware).binary)
    firmware = argv.index(tree.FIRMWARE_PATH)
    return (binary, *argv[1 : firmware - 1], *argv[firmware + 1 :])


class BareQemu:
    """One QEMU of the floor, with the devices of a sandbox, in a folder of its own; `end` must be called whatever happens."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self.folder = folder
        self.pid = 0
        self._ground = ground

    def start(self, argv: tuple[str, ...], more: Mapping[int, Path] = MappingProxyType({})) -> None:
        """Starts it; `more` are files that it gets open for reading, by descriptor. Raises `OSError`."""
        failure: list[BaseException] = []
        # A network namespace belongs to a thread: it is made, and QEMU started in it, by one that ends then.
        thread = threading.Thread(target=self._start, args=(argv, more, failure))
        thread.start()
        thread.join()
        if failure:
            raise failure[0]

    def words(self) -> str:
        """The end of what QEMU said on its standard error."""
        return (self.folder / "stderr").read_text(errors="replace")[-500:]

    def end(self) -> None:
        """Ends the VM and removes its files."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, argv: tuple[str, ...], more: Mapping[int, Path], failure: list[BaseException]) -> None:
        try:
            self._start_qemu(argv, more)
        except OSError as error:
            failure.append(error)

    def _start_qemu(self, argv: tuple[str, ...], more: Mapping[int, Path]) -> None:
        ground = self._ground
        if _libc.unshare(CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        fds = {TAP_FD: _tap()} if ground.network else {}
        disk = self.folder / "upper.qcow2"
        subprocess.run(["cp", "--sparse=always", str(ground.baked / "upper.qcow2"), str(disk)], check=True)
        disk.chmod(0o600)
        fds[QMP_FD] = _listen(self.folder / "qmp")
        fds[AGENT_FD] = _listen(self.folder / "agent")
        fds |= {target: os.open(path, os.O_RDONLY) for target, path in more.items()}
        fds[qemu_args.BASE_FD] = os.open(ground.release.part("base"), os.O_RDONLY)
        fds[qemu_args.DISK_FDS] = os.open(ground.release.part("upper"), os.O_RDONLY)
        fds[qemu_args.DISK_FDS + 1] = os.open(disk, os.O_RDWR)
        fds[2] = os.open(self.folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
        # First out of the way, so that putting one in its place overwrites no other.
        spare = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE_FD) for target, fd in fds.items()}
        for fd in fds.values():
            os.close(fd)
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in spare.items()]
        self.pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)
        for fd in spare.values():
            os.close(fd)


class BareVm:
    """One restored VM of the floor; `end` must be called whatever happens."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self._ground = ground
        self._qemu = BareQemu(ground, folder)
        self._argv = command(ground, ground.baked / "memory")
        self._agent: socket.socket | None = None
        self._reader = FrameReader()
        self._processes = 0

    @property
    def pid(self) -> int:
        """QEMU's process."""
        return self._qemu.pid

    def restore(self) -> float:
        """Restores it; returns the milliseconds from nothing to the agent's answer. Raises `RuntimeError` with QEMU's words."""
        self._qemu.folder.mkdir()
        began = time.perf_counter()
        self._qemu.start(self._argv, {qemu_args.STATE_FD: self._ground.baked / "state"})
        try:
            self._greet()
        except (TimeoutError, ConnectionError) as error:
            raise RuntimeError(f"the bare VM does not answer: {error} {self._qemu.words()}") from error
        return (time.perf_counter() - began) * 1e3

    def execute(self, argv: list[str], user: str | None = None) -> float:
        """Runs a command and waits for its end; returns milliseconds: the floor of what is possible inside this VM."""
        assert self._agent is not None
        self._processes += 1
        number = self._processes
        began = time.perf_counter()
        spawn = channel.encode_spawn(
            number, number=number, key=f"bare{number}", argv=argv, env={}, user=user, stdin=False
        )
        self._agent.sendall(spawn + channel.encode_output_ack(number, 0, 0, 65_536))
        self._read_until(lambda frame: _ended(frame, number))
        took = (time.perf_counter() - began) * 1e3
        self._agent.sendall(channel.encode_request(FrameType.CLOSE, 1_000_000 + number, [(Tag.SIZE, number)]))
        return took

    def end(self) -> None:
        """Ends the VM and removes its files."""
        if self._agent is not None:
            self._agent.close()
        self._qemu.end()

    def _greet(self) -> None:
        self._agent = connect(self._qemu.folder / "agent")
        nonce = secrets.token_bytes(channel.NONCE_SIZE)
        self._agent.sendall(channel.encode_hello(nonce, 1))
        self._reader.hunt(nonce)
        commands: list[dict[str, object]] = [
            {"execute": "qmp_capabilities"},
            {
                "execute": "migrate-set-capabilities",
                "arguments": {"capabilities": [{"capability": "x-ignore-shared", "state": True}]},
            },
            {"execute": "migrate-incoming", "arguments": {"uri": f"fd:{qemu_args.STATE_FD}"}},
        ]
        with connect(self._qemu.folder / "qmp") as qmp:
            qmp.sendall(b"".join(json.dumps(command).encode() + b"\n" for command in commands))
            self._read_until(lambda frame: frame.type == FrameType.READY)

    def _read_until(self, done: Callable[[Frame], bool]) -> None:
        assert self._agent is not None
        while True:
            count = self._agent.recv_into(self._reader.buffer())
            if count == 0:
                raise ConnectionError("the channel was closed")
            # All frames of the batch are used up, also behind the one that is waited for: the reader demands it.
            if sum(done(frame) for frame in self._reader.received(count)):
                return


def _ended(frame: Frame, number: int) -> bool:
    return frame.type == FrameType.PROC and frame.stream == number and Fields(frame.payload).number(Tag.STATE) >= 2


def _tap() -> int:
    """A tap in this thread's network namespace, up."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"tap0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as control:
        flags_request = struct.pack("16sH22x", b"tap0", 0)
        fcntl.ioctl(control, 0x8914, flags_request[:16] + struct.pack("H22x", 0x1))
    return fd


def _listen(path: Path) -> int:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(1)
    return sock.detach()


def connect(path: Path) -> socket.socket:
    """Connects to a socket of a bare VM, which answers within `WITHIN_S`."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WITHIN_S)
    sock.connect(str(path))
    return sock
