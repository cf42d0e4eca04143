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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    argv: tuple[str, ...]
    """QEMU's command line, with the same devices as the baked machine."""


def find_ground(data_dir: Path) -> Ground:
    """Finds the newest bake of `seed:latest` in the default shape. Raises `NotFound("no_bake")`, `Unavailable("not_allowed")`."""
    release = Images(Settings(data_dir).images).resolve("seed:latest")
    shape, folder = Shape(), data_dir / "node" / "baked"
    try:
        for path in sorted(folder.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True):
            made_for = json.loads(path.read_bytes())
            if (made_for["shape"]["vcpus"], made_for["shape"]["memory_mib"]) == (shape.vcpus, shape.memory_mib):
                argv = _command(
                    path.parent, shape, network=made_for["network"], hardware=made_for["isolation"] == "hardware"
                )
                return Ground(release, path.parent, shape, made_for["network"], argv)
    except PermissionError:
        raise Unavailable(
            "not_allowed", f"{folder} cannot be read.", "Run the bench as the user that runs the service (root)."
        ) from None
    raise NotFound(
        "no_bake", f"There is no baked snapshot of the default shape in {folder}.", "Create a sandbox first."
    )


def _command(baked: Path, shape: Shape, *, network: bool, hardware: bool) -> tuple[str, ...]:
    machine = machines.machine_of(Host.read().architecture)
    parts = qemu_args.Parts(
        machine=machine,
        hardware=hardware,
        shape=shape,
        layers=(qemu_args.Layer("raw"), qemu_args.Layer("qcow2")),
        network=network,
        incoming=True,
    )
    binary = str(machines.find(machine, hardware=hardware).binary)
    argv = [word.replace(qemu_args.RAM_PATH, str(baked / "memory")) for word in qemu_args.arguments(parts)]
    firmware = argv.index(tree.FIRMWARE_PATH)
    return (binary, *argv[1 : firmware - 1], *argv[firmware + 1 :])


class BareVm:
    """One restored VM of the floor; `end` must be called whatever happens."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self._ground = ground
        self._folder = folder
        self._pid = 0
        self._agent: socket.socket | None = None
        self._reader = FrameReader()
        self._processes = 0

    def restore(self) -> float:
        """Restores it; returns the milliseconds from nothing to the agent's answer. Raises `RuntimeError` with QEMU's words."""
        self._folder.mkdir()
        began = time.perf_counter()
        failure: list[BaseException] = []
        # A network namespace belongs to a thread: it is made, and QEMU started in it, by one that ends then.
        thread = threading.Thread(target=self._start, args=(failure,))
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        try:
            self._greet()
        except (TimeoutError, ConnectionError) as error:
            words = (self._folder / "stderr").read_text(errors="replace")
            raise RuntimeError(f"the bare VM does not answer: {error} {words[-500:]}") from error
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
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, failure: list[BaseException]) -> None:
        try:
            self._start_qemu()
        except OSError as error:
            failure.append(error)

    def _start_qemu(self) -> None:
        ground = self._ground
        if _libc.unshare(CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        fds = {TAP_FD: _tap()} if ground.network else {}
        disk = self._folder / "upper.qcow2"
        subprocess.run(["cp", "--sparse=always", str(ground.baked / "upper.qcow2"), str(disk)], check=True)
        disk.chmod(0o600)
        fds[QMP_FD] = _listen(self._folder / "qmp")
        fds[AGENT_FD] = _listen(self._folder / "agent")
        fds[qemu_args.STATE_FD] = os.open(ground.baked / "state", os.O_RDONLY)
        fds[qemu_args.BASE_FD] = os.open(ground.release.part("base"), os.O_RDONLY)
        fds[qemu_args.DISK_FDS] = os.open(ground.release.part("upper"), os.O_RDONLY)
        fds[qemu_args.DISK_FDS + 1] = os.open(disk, os.O_RDWR)
        fds[2] = os.open(self._folder / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
        # First out of the way, so that putting one in its place overwrites no other.
        spare = {target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE_FD) for target, fd in fds.items()}
        for fd in fds.values():
            os.close(fd)
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in spare.items()]
        self._pid = os.posix_spawn(ground.argv[0], ground.argv, os.environ, file_actions=actions)
        for fd in spare.values():
            os.close(fd)

    def _greet(self) -> None:
        self._agent = _connect(self._folder / "agent")
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
        with _connect(self._folder / "qmp") as qmp:
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


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WITHIN_S)
    sock.connect(str(path))
    return sock
