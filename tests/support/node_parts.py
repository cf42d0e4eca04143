"""Parts of a node that are played by the test: machines, launcher, agent. What the core makes of them is the matter."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.node import greeting
from hatchway.node.context import Context
from hatchway.node.egress.gateways import Gateways
from hatchway.node.events import Events
from hatchway.node.guest.seam import AgentHello
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.snapshots import Snapshots
from hatchway.node.vmm.seam import ExitStatus, VmInfo, VmmDied
from hatchway.wire.ballast import Ballast
from hatchway.wire.node import SandboxSpec

DIGEST = "sha256:" + "5eed" * 16


class Room:
    """Has room for everything; notes who asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check_create(self, shape: Shape, overhead_mib: int, holdings: Any) -> None:
        self.asked.append("create")

    def check_start(self, shape: Shape, overhead_mib: int, holdings: Any) -> None:
        self.asked.append("start")


class Machine:
    """A VM that runs until it is told otherwise."""

    pid = 0

    def __init__(self, spec: Any, launcher: "Launcher") -> None:
        self.spec = spec
        self.agent_socket = Path("/nowhere")
        self.ended = asyncio.Event()
        self.exit: ExitStatus | None = None
        self.status = "running"
        self.launcher = launcher
        self.closed = False
        self.verbs: list[str] = []

    def end(self, status: ExitStatus) -> None:
        """Ends by itself."""
        self.exit = status
        self.ended.set()

    async def _do(self, verb: str) -> None:
        self.verbs.append(verb)
        if self.ended.is_set():
            raise VmmDied("The VMM ended.", self.exit)
        hook = self.launcher.hooks.get(verb)
        if hook is not None:
            await hook()

    async def pause(self) -> None:
        await self._do("pause")
        self.status = "paused"

    async def resume(self) -> None:
        await self._do("resume")
        self.status = "running"

    async def resize_disk(self, disk_mib: int) -> None:
        await self._do("resize_disk")

    async def stop(self, grace_s: float) -> ExitStatus:
        return await self.kill()

    async def kill(self) -> ExitStatus:
        if not self.ended.is_set():
            self.end(ExitStatus(signal=9))
        assert self.exit is not None
        return self.exit

    async def info(self) -> VmInfo:
        status = "ended" if self.ended.is_set() else self.status
        return VmInfo(status=status, vmm="played", isolation="emulated", pid=1, exit=self.exit)

    async def forget(self) -> None:
        await self.launcher.forget_vm(self.spec.sandbox_id)

    async def close(self) -> None:
        self.closed = True


class Launcher:
    """Launcher and driver in one: it knows every machine. `hooks[verb]` is awaited before a verb."""

    name, version, isolation, build = "played", "1", "emulated", "build"

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.made = 0
        self.hooks: dict[str, Callable[[], Any]] = {}
        self.settled: list[Machine] = []

    async def _hook(self, verb: str) -> None:
        if verb in self.hooks:
            await self.hooks[verb]()

    async def start(self, spec: Any, *, bakeable: bool = False) -> Machine:
        await self._hook("start")
        return self._make(spec)

    async def restore(self, baked: Any, spec: Any, launched: Callable[[Any], None] | None = None) -> Machine:
        await self._hook("restore")
        machine = self._make(spec)
        if launched is not None:
            launched(machine)
        return machine

    async def adopt(self, spec: Any) -> Machine:
        await self._hook("adopt")
        machine = self.machines.get(spec.sandbox_id)
        if machine is None:
            raise VmmDied("It is not there.")
        return machine

    def overhead_mib(self, shape: Shape) -> int:
        return 0

    def _make(self, spec: Any) -> Machine:
        self.made += 1
        machine = self.machines[spec.sandbox_id] = Machine(spec, self)
        return machine

    async def kill_vm(self, sandbox_id: str) -> None:
        await self._hook("kill_vm")
        if sandbox_id in self.machines:
            await self.machines[sandbox_id].kill()

    async def forget_vm(self, sandbox_id: str) -> None:
        await self._hook("forget_vm")
        machine = self.machines.get(sandbox_id)
        if machine is not None and machine.ended.is_set():
            del self.machines[sandbox_id]

    async def list_vms(self) -> tuple[Any, ...]:
        return tuple(
            SimpleNamespace(sandbox_id=name, alive=not machine.ended.is_set())
            for name, machine in self.machines.items()
        )


class Link:
    """An agent that says yes."""

    def __init__(self, launcher: Launcher) -> None:
        self.hello = AgentHello(new_id(), "played", 0, ())
        self.stands_still = False
        self.closed = False
        self.setups: list[dict[str, Any]] = []
        self._launcher = launcher

    async def setup(self, **what: Any) -> None:
        self.setups.append(what)
        await self._launcher._hook("setup")

    async def spawn(self, spawn: Any, sink: Any) -> None:
        sink.gone("nothing runs here")

    async def close_process(self, number: int) -> None:
        """Nothing to do."""

    async def freeze(self, within_ms: int) -> None:
        await self._launcher._hook("freeze")

    async def thaw(self) -> None:
        await self._launcher._hook("thaw")

    async def resize_disk(self, device_mib: int) -> int:
        return 0

    async def shutdown(self) -> None:
        await self._launcher._hook("shutdown")

    def paused(self, stopped: bool) -> None:
        self.stands_still = stopped

    def ran(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.closed = True


class SessionNotes:
    """Notes what sessions are told."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.deleted: list[str] = []

    def sandboxes(self) -> frozenset[str]:
        return frozenset()

    async def link_up(self, sandbox_id: str, link: Any) -> None:
        self.up.append(sandbox_id)

    def sandbox_lost(self, sandbox_id: str, reason: str) -> None:
        self.lost.append((sandbox_id, reason))

    async def sandbox_deleted(self, sandbox_id: str) -> None:
        self.deleted.append(sandbox_id)


class Baker:
    """Has every bake."""

    async def baked(self, release: Any, shape: Shape, progress: Any) -> Any:
        return SimpleNamespace(shape=shape, host_keys=False)

    async def discard(self, baked: Any) -> None:
        """Nothing to do."""

    async def recover(self) -> None:
        """Nothing to do."""


class Images:
    """Has the one release."""

    def resolve_digest(self, digest: str) -> Any:
        return SimpleNamespace(boot_files=lambda: None)


class Node:
    """A node's core on played parts. `restart` makes a new one over the same folder and machines."""

    def __init__(self, root: Path, monkeypatch: Any, room: Any = None) -> None:
        self.root = root
        self.launcher = Launcher()
        self.links: list[Link] = []
        self.baker = Baker()
        self.connects: Callable[[], Any] | None = None
        self.boot_id = "boot-1"
        self.room: Any = room or Room()
        self.seen: list[Any] = []
        monkeypatch.setattr(greeting, "connect", self._connect)
        self._make()

    async def _connect(self, path: Path, **_: Any) -> Link:
        if self.connects is not None:
            await self.connects()
        self.links.append(Link(self.launcher))
        return self.links[-1]

    def _make(self) -> None:
        self.sessions = SessionNotes()
        events = Events()
        events.subscribe(lambda event: self.seen.append(event), 0)
        driver: Any = self.launcher
        self.context = Context(
            root=self.root,
            host_boot_id=self.boot_id,
            driver=driver,
            launcher=driver,
            images=Images(),  # type: ignore[arg-type]
            baker=self.baker,  # type: ignore[arg-type]
            sessions=self.sessions,  # type: ignore[arg-type]
            events=events,
            capacity=self.room,
            ballast=Ballast(self.root / ".ballast", 1 << 20),
            gateways=Gateways(self.root, 0, driver),
            drop=lambda sandbox_id: self.sandboxes.drop(sandbox_id),
        )
        self.sandboxes = Sandboxes(self.context, Snapshots(self.root / ".snapshots"))

    async def restart(self) -> None:
        """The process is gone and another one takes over."""
        await self.sandboxes.release()
        self._make()
        await self.sandboxes.adopt_all()

    def spec(self, sandbox_id: str | None = None) -> SandboxSpec:
        """A sandbox to make."""
        return SandboxSpec(
            sandbox_id=sandbox_id or new_id(),
            project="default",
            generation=1,
            template_digest=DIGEST,
            shape=Shape(memory_mib=128, disk_mib=512),
            hostname="box",
        )
