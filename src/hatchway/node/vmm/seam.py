"""The Vmm seam: what every VMM driver offers, and the errors it may raise.

A `Driver` makes `Vm` objects; a `Vm` is one machine monitor with one sandbox in it. Every verb is idempotent: asked
again for what already holds it succeeds and does nothing. A verb that raises leaves the VM as it was, or dead
(`VmmDied`), never in between. All of them may raise `VmmDied` when the VMM ended, `VmmTimeout` when it did not answer
within its bound, and `LauncherUnavailable` where the launcher is needed.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hatchway.domain.shapes import Shape

if TYPE_CHECKING:
    from hatchway.node.vmm.manifest import Manifest


class VmmError(Exception):
    """Base of the seam's errors; the text says what happened and, where there is one, the remedy."""


class VmmDied(VmmError):
    """The VMM process ended; `status` says how, as the shim saw it."""

    def __init__(self, message: str, status: "ExitStatus | None" = None) -> None:
        super().__init__(message)
        self.status = status


class VmmTimeout(VmmError):
    """The VMM did not answer within the bound."""


class VmmMissing(VmmError):
    """No usable VMM on this host; the text names the package to install."""


class SnapshotMismatch(VmmError):
    """The snapshot cannot be loaded by this VMM, kernel or CPU."""


class WrongGeneration(VmmError):
    """The VM that runs belongs to another generation of its sandbox: an older owner, or a newer one, has the say."""


class LauncherUnavailable(VmmError):
    """The launcher does not answer; it is restarted by the supervisor, so that trying again helps."""


class LaunchRefused(VmmError):
    """The launcher said no; `code` is its code."""

    def __init__(self, code: str, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}" + (f" ({remedy})" if remedy else ""))
        self.code = code


AgentSocket = Path | Callable[[], Awaitable[socket.socket]]
"""A Unix stream socket, or what connects: it waits for as long as the guest takes to listen, and raises `OSError` when the VM ended."""


@dataclass(frozen=True)
class ExitStatus:
    """How a VMM ended: its exit code, or the signal that killed it; `guest_shutdown` when the guest powered off, `guest_reset` when it reset itself.

    `out_of_memory`: the host's kernel killed it, because it or the host had no memory left.
    """

    code: int | None = None
    signal: int | None = None
    guest_shutdown: bool = False
    guest_reset: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True)
class BootFiles:
    """What a VM boots from: files of a template release, all read-only."""

    kernel: Path
    initrd: Path
    base: Path
    upper: Path
    """Raw sparse ext4 image of `domain.shapes.MIN_DISK_MIB`, empty: the bottom layer of every sandbox's writable disk."""
    cmdline: str
    """The part of the kernel command line that belongs to the template; the driver adds its own."""


UPPER_NAMES = ("upper.qcow2", "upper.raw")
"""What the disk of a baked snapshot is called: a layer, or a whole disk where the VMM knows no layers."""


@dataclass(frozen=True)
class Baked:
    """A baked snapshot: a folder with `memory`, `state`, `upper.qcow2` (or `upper.raw`) and `manifest.json`, none of which is ever written again.

    `memory` is mapped privately by every VM restored from it. `key` names template digest, shape without disk, VMM build,
    CPU and TSC frequency.
    """

    key: str
    folder: Path
    shape: Shape
    """The shape it was baked with; its disk is the sandbox's or smaller: `domain.shapes.MIN_DISK_MIB` or `DEFAULT_DISK_MIB`."""
    host_keys: bool = True
    """Whether there may be host keys of ssh on its disk."""

    @property
    def memory(self) -> Path:
        """The guest's memory."""
        return self.folder / "memory"

    @property
    def state(self) -> Path:
        """The devices' state."""
        return self.folder / "state"

    @property
    def upper(self) -> Path:
        """The upper disk at the instant of the snapshot."""
        return next(
            (path for name in UPPER_NAMES if (path := self.folder / name).exists()), self.folder / UPPER_NAMES[0]
        )


@dataclass(frozen=True)
class VmSpec:
    """One VM to start: who it is, what it is given, where its own files are.

    `folder` belongs to the node and holds `upper.qcow2` (made by the driver when it is not there) and nothing that another
    VM may see.
    """

    sandbox_id: str
    generation: int
    shape: Shape
    boot: BootFiles
    folder: Path
    network: bool = True


@dataclass(frozen=True)
class VmInfo:
    """What a VM is right now."""

    status: str
    """`running`, `paused` or `ended`."""
    vmm: str
    """Name and version."""
    isolation: str
    """`hardware` or `emulated`."""
    pid: int
    """Of the VMM, in the host's PID namespace."""
    exit: ExitStatus | None = None
    details: dict[str, object] = field(default_factory=dict)


class Vm(Protocol):
    """One VMM and the machine in it."""

    spec: VmSpec
    pid: int
    """Of the VMM, in the host's PID namespace; 0 before it is connected to."""
    ended: "asyncio.Event"
    """Set when the VMM ended for whatever reason; `exit` then says how."""
    exit: ExitStatus | None

    @property
    def agent_socket(self) -> AgentSocket:
        """Where the guest channel is reached; one connection at a time."""

    async def pause(self) -> None:
        """Stops the virtual CPUs; memory stays."""

    async def resume(self) -> None:
        """Lets them go on. The guest's clock is then behind: the caller sets it."""

    async def snapshot(self, folder: Path) -> None:
        """Writes memory, device state and upper disk into the empty `folder`, in the form of a `Baked`.

        Of a VM started with `start(..., bakeable=True)`: whole memory, and the VM is ended by it (a bake). Others: raises `VmmError`;
        live snapshots of restored VMs are made by the sparse way of `capture`.
        """

    async def resize_disk(self, disk_mib: int) -> None:
        """Grows the upper disk's device to this size; smaller is refused with `ValueError`. The guest still has to grow its file system."""

    async def stop(self, grace_s: float) -> ExitStatus:
        """Waits up to `grace_s` seconds for the VM to end (the caller has asked the guest), then kills it."""

    async def kill(self) -> ExitStatus:
        """Ends the VMM at once."""

    async def info(self) -> VmInfo:
        """Returns what the VM is right now; does not raise when it ended."""

    async def console(self) -> bytes:
        """The newest octets of the guest's serial console, at most 64 KiB, for diagnostics. The guest wrote them."""

    async def forget(self) -> None:
        """After the end: reaps the shim and gives back slot, sockets, cgroup. The disk stays."""

    async def close(self) -> None:
        """Drops the connections to the VMM and shim without touching the VM: it can be adopted again."""


class Sealing(Protocol):
    """Makes a capture whole: digests, and the record that says that it is one."""

    def __call__(self, *, durable: bool = True) -> None:
        """Blocks; raises `OSError`. One that is not `durable` is for what is revived from it at once and then removed."""


@dataclass(frozen=True)
class Taking:
    """A capture that is still being taken while what is to be revived from it gets ready."""

    source: Path
    """A folder with what is below the disk and the memory of its machine, which stays as it is: the source's own, for one that runs."""
    done: "asyncio.Future[Any]"
    """Ends when the capture is sealed, or says why it is none."""

    async def wait(self) -> None:
        """Waits for it; who is cancelled here leaves it alone. Raises what it ended with, `VmmError` where it was given up."""
        await asyncio.wait([self.done])
        if self.done.cancelled():
            raise VmmError("The machine that it was to be made from is not there any more.")
        self.done.result()


class Driver(Protocol):
    """One kind of VMM on this host."""

    name: str
    version: str
    isolation: str
    build: str
    """Digest of the VMM's binary and libraries: part of the key of every baked snapshot."""
    disk_format: str
    """`qcow2`: layers over the template's empty file system; or `raw`, all of it in one file."""

    async def start(self, spec: VmSpec, *, bakeable: bool = False) -> Vm:
        """Cold boot on the upper disk of the folder (made if it is not there), returns once the VMM runs its machine.

        Raises `VmmMissing`, `LaunchRefused`, `OSError` (ENOSPC while making the disk).
        """

    async def restore(self, baked: Baked, spec: VmSpec, launched: Callable[[Vm], None] | None = None) -> Vm:
        """Makes the upper disk as a layer over the baked one and starts the machine where the baked one stood; vCPUs run on return,
        or begin to run in that moment.

        `launched` is called as soon as the agent's socket is there, long before the machine runs: what is written to it waits.
        Raises `SnapshotMismatch`, `VmmMissing`, `LaunchRefused`, `OSError`.
        """

    async def adopt(self, spec: VmSpec) -> Vm:
        """Takes over a VM that runs since before this process did.

        Raises `VmmDied` when it is not there any more, with its exit status where the shim still knows it, `WrongGeneration`.
        """

    async def capture(self, vm: Vm, folder: Path, *, disk: bool = True) -> "Sealing":
        """Live full snapshot of a VM that is paused: what changed since its parent, sparse (memory diff, device state, disk layer).

        The VM may go on when this returns; the capture is one when what is returned was called, in a thread. Without `disk` the sandbox's
        own disk must stay as it is. Raises `VmmError` when the VM is not paused; the source can be resumed in any case.
        """

    def conditions(self, shape: Shape, *, network: bool = True) -> "Manifest":
        """What has to hold of a capture's memory so that it can be loaded here, for this shape."""

    def verify(self, folder: Path, spec: VmSpec) -> None:
        """Checks that a capture is whole and could be revived here. Blocks: reads all of it. Raises `SnapshotMismatch`, `OSError`."""

    async def revive(
        self,
        folder: Path,
        spec: VmSpec,
        launched: Callable[[Vm], None] | None = None,
        *,
        shared: bool = False,
        taking: Taking | None = None,
    ) -> Vm:
        """Starts the machine of a `capture`, paused, with a copy of its disk in `spec.folder` when that has none: resume it, then set its clock.

        `shared`: several are made from this capture, which then share the pages that it has beside its base. `taking`: it is not there yet;
        the VMM is started meanwhile where it can be. `launched` as with `restore`; raises as that does, and what `taking` does.
        """

    def overhead_mib(self, shape: Shape) -> int:
        """Memory that the VMM needs beside the guest's own: translation cache, device state, the process itself."""

    def baked_key(self, template_digest: str, shape: Shape, *, network: bool = True) -> str:
        """Names the baked snapshot that fits this template and shape on this host; the disk size does not matter."""
