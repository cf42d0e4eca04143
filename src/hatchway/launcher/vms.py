"""The VMs: starting, ending, forgetting and adopting them."""

import contextlib
import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from hatchway.launcher import checks, devices, folders, records, ruleset
from hatchway.launcher.cgroups import Limits
from hatchway.launcher.errors import Refused
from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop, Timer
from hatchway.launcher.network import Lost, Rules, Watch
from hatchway.launcher.networks import Networks
from hatchway.launcher.options import Options
from hatchway.launcher.records import has_ended
from hatchway.launcher.stock import Slot, Stock
from hatchway.wire.launcher import (
    AGENT_FD,
    MAX_LISTED,
    QMP_FD,
    TAP_FD,
    Answer,
    Done,
    Dropped,
    ListenersAnswer,
    Started,
    StartVm,
    VmList,
    VmRecord,
    VmUsage,
)

START_WITHIN_S = 5.0
KILL_WITHIN_S = 10.0
FORGET_WITHIN_S = 0.5
_CLAIM_FD_BASE = 300  # shim.h: what the claim's descriptors are called in it
_CODES = {"invalid", "jail_failed", "spawn_failed", "host_exhausted"}


class Reply(Protocol):
    """Takes the answer to a request; the descriptors that go with it stay the caller's."""

    def __call__(self, what: Answer, fds: Sequence[int] = ()) -> None:
        """Sends it."""


class _Vm:
    """One VM that has a record."""

    def __init__(self, record: VmRecord, pidfd: int) -> None:
        self.record = record
        self.pidfd = pidfd
        """-1 when it ended."""
        self.killers: list[Reply] = []
        self.forgetters: list[Reply] = []
        self.timer: Timer | None = None

    @property
    def alive(self) -> bool:
        # Not only what the loop has seen: a pidfd is readable from the very moment of the end on.
        return self.pidfd >= 0 and not has_ended(self.pidfd, 0.0)

    def shown(self) -> VmRecord:
        return msgspec.structs.replace(self.record, alive=self.alive)


class _Start:
    """One start in progress."""

    def __init__(self, request: StartVm, slot: Slot, reply: Reply) -> None:
        self.request = request
        self.slot = slot
        self.replies = [reply]
        self.killers: list[Reply] = []
        self.timer: Timer | None = None


class Vms:
    """All VMs of this installation. Every verb answers through `reply`, at once or later, exactly once."""

    def __init__(self, loop: Loop, run: folders.RunFolder, stock: Stock, options: Options, rules: Rules | None) -> None:
        self._loop = loop
        self._run = run
        self._stock = stock
        self._options = options
        self._networks = Networks(loop, rules, self._put_back)
        self._rootless = options.outer_uid is not None
        self._boot_id = records.host_boot_id()
        self._vms: dict[str, _Vm] = {}
        self._starts: dict[str, _Start] = {}

    def adopt(self) -> None:
        """Takes over what an earlier launcher left: VMs with a record; half-made folders are removed (their shims ended with it)."""
        for sandbox_id in list(self._run.ids()):
            try:
                folder = self._run.open(sandbox_id)
            except OSError as error:
                say(f"{sandbox_id} in the run folder: {error}")
                continue
            record = records.read(folder)
            if record is None or record.sandbox_id != sandbox_id:
                os.close(folder)
                say(f"removing what is left of {sandbox_id}, whose start was not finished")
                _attempt("removing it", partial(self._run.remove, sandbox_id))
                continue
            self._stock.reserve(record.slot)
            pidfd = None
            if record.host_boot_id == self._boot_id:
                pidfd = records.open_process(record.shim_pid, record.shim_starttime)
            vm = self._add(record, -1 if pidfd is None else pidfd)
            self._networks.adopt(record, folder, alive=vm.alive)
            os.close(folder)

    def _put_back(self, sandbox_id: str, state: int) -> None:
        """Remembers the new state of a network's rules, so that the next launcher does not put them back once more."""
        vm = self._vms[sandbox_id]
        vm.record = msgspec.structs.replace(vm.record, rules=state, ruleset=ruleset.VERSION)

        def write() -> None:
            folder = self._run.open(sandbox_id)
            try:
                records.write(folder, vm.record)
            finally:
                os.close(folder)

        _attempt("recording the state of its rules", write)

    def listeners(self, sandbox_id: str, generation: int, reply: Reply) -> None:
        """Answers with the gateway's sockets of a VM."""

        def answer(watch: Watch) -> None:
            reply(ListenersAnswer(restored=watch.restored), watch.network.listeners)

        self._use_network(sandbox_id, generation, answer, reply)

    def dropped(self, sandbox_id: str, reply: Reply) -> None:
        """Answers with what the rules of a VM's network dropped, also after its end, until it is forgotten."""

        def answer(watch: Watch) -> None:
            reply(Dropped(packets=watch.network.dropped(), restored=watch.restored))

        self._use_network(sandbox_id, None, answer, reply)

    def _use_network(
        self, sandbox_id: str, generation: int | None, answer: Callable[[Watch], None], reply: Reply
    ) -> None:
        checks.check_id(sandbox_id)
        vm = self._vms.get(sandbox_id)
        lives = vm is not None and vm.alive and vm.record.generation == generation
        if vm is None or not (lives or generation is None):
            raise Refused("unknown", "no VM of this id and generation lives")
        self._networks.use(sandbox_id, answer, lambda why: reply(why.answer()))

    @property
    def slots(self) -> set[int]:
        """The slots that VMs have."""
        return {vm.record.slot for vm in self._vms.values()} | {start.slot.number for start in self._starts.values()}

    def places(self) -> tuple[int, int, int]:
        """How many VMs there can be, how many more there could be now, and for how many of these a shim is parked."""
        return self._stock.places()

    def list_vms(self, after: str, reply: Reply) -> None:
        """Answers with the VMs that have a record, in the order of their ids, as many as fit."""
        ids = sorted(sandbox_id for sandbox_id in self._vms if sandbox_id > after)
        page = tuple(self._vms[sandbox_id].shown() for sandbox_id in ids[:MAX_LISTED])
        reply(VmList(vms=page, more=len(ids) > MAX_LISTED))

    def inspect(self, sandbox_id: str, reply: Reply) -> None:
        """Answers with what the cgroup of a VM counts; one that ended keeps it until it is forgotten."""
        checks.check_id(sandbox_id)
        vm = self._vms.get(sandbox_id)
        if vm is None:
            reply(VmUsage())
            return
        used = self._stock.cgroup(vm.record.slot).usage()
        reply(
            VmUsage(
                memory_bytes=used.memory,
                memory_peak_bytes=used.memory_peak,
                memory_limit_bytes=used.memory_limit,
                processes=used.processes,
                oom_kills=used.oom_kills,
            )
        )

    def start(self, request: StartVm, fds: list[int], reply: Reply) -> None:
        """Starts a VM; `fds` stay the caller's. Raises `Refused`, or answers later."""
        owners = (0, os.geteuid(), *self._options.peer_uids)
        if not fds:
            raise Refused("invalid", "the jail's root folder did not come with the request")
        checks.check_start(request, fds, owners)
        if self._answered(request, reply):
            return
        if request.network and not self._networks.possible:
            raise Refused("denied", "there is no network for VMs here", "see the launcher's warnings")
        slot = self._stock.claim()
        start = _Start(request, slot, reply)
        self._starts[request.sandbox_id] = start
        try:
            self._claim(request, fds, slot)
        except Refused as error:
            self._undo(start, error)
            return
        except UnicodeError:
            self._undo(start, Refused("invalid", "text that cannot be UTF-8"))
            return
        except OSError as error:
            full = error.errno in (errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOSPC)
            self._undo(start, Refused("host_exhausted" if full else "jail_failed", f"preparing the VM: {error}"))
            return
        start.timer = self._loop.later(START_WITHIN_S, lambda: self._late(start))
        self._loop.watch(slot.channel.fileno(), lambda: self._heard(start))

    def kill(self, sandbox_id: str, reply: Reply) -> None:
        """Ends a VM; answers when nothing of it runs any more."""
        checks.check_id(sandbox_id)
        start = self._starts.get(sandbox_id)
        if start is not None:
            start.killers.append(reply)
            self._undo(start, Refused("spawn_failed", "it was killed while it started"))
            return
        vm = self._vms.get(sandbox_id)
        if vm is None or not vm.alive:
            reply(Done())
            return
        vm.killers.append(reply)
        if vm.timer is None:
            vm.timer = self._loop.later(KILL_WITHIN_S, lambda: self._unkillable(vm))
        try:
            signal.pidfd_send_signal(vm.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            self._ended(vm)

    def forget(self, sandbox_id: str, reply: Reply) -> None:
        """Removes what is left of a VM that ended."""
        checks.check_id(sandbox_id)
        vm = self._vms.get(sandbox_id)
        if sandbox_id in self._starts:
            raise Refused("running", "the VM is being started", "kill it first")
        if vm is None:
            self._run.remove(sandbox_id)
            reply(Done())
        elif vm.alive:
            # A shim that was told to go a moment ago is still on its way.
            vm.forgetters.append(reply)
            self._loop.later(FORGET_WITHIN_S, lambda: self._still_running(vm, reply))
        else:
            self._ended(vm)
            self._forget(vm, [reply])

    def close(self) -> None:
        """Ends the starts in progress; running VMs go on."""
        for start in list(self._starts.values()):
            self._undo(start, Refused("spawn_failed", "the launcher ends"))

    def _answered(self, request: StartVm, reply: Reply) -> bool:
        """Joins a start of the same VM, answers again for one that runs; raises `Refused("exists")` for another generation."""
        start = self._starts.get(request.sandbox_id)
        if start is not None and start.request.generation == request.generation:
            start.replies.append(reply)
            return True
        vm = self._vms.get(request.sandbox_id)
        if vm is not None and vm.alive and vm.record.generation == request.generation:
            reply(Started(vm=vm.shown()))
            return True
        if start is not None or vm is not None:
            raise Refused(
                "exists", "there is a VM of this id, of another generation or ended", "kill and forget it first"
            )
        return False

    def _claim(self, request: StartVm, fds: list[int], slot: Slot) -> None:
        """Gives the parked shim all that it needs."""
        held: list[int] = []
        listeners: dict[str, socket.socket] = {}
        folder = self._run.create(request.sandbox_id)
        held.append(folder)
        try:
            names = ("shim.sock",) if request.paths else folders.SOCKETS
            listeners = folders.bind_vm(folder, None if self._rootless else self._owner(), names)
            slot.cgroup.limit(
                Limits(
                    request.vcpus,
                    request.memory_limit_mib,
                    io_bps=request.io_bps,
                    io_iops=request.io_iops,
                    disks=devices.disks_below(fds[1:]),
                )
            )
            root = checks.reopen_root(fds[0])
            held.append(root)
            argv = _strings("argv", list(request.argv))
            held.append(argv)
            env = _strings("env", [f"{name}={value}" for name, value in request.env.items()])
            held.append(env)
            sent = [listeners["shim.sock"].fileno(), root, argv, env]
            targets = list(request.pass_as)
            if not request.paths:
                sent += [listeners["qmp.sock"].fileno(), listeners["agent.sock"].fileno()]
                targets = [QMP_FD, AGENT_FD, *targets]
            sent += fds[1:]
            words = self._words(request, slot)
            for place, target in enumerate(targets, _CLAIM_FD_BASE + 4):
                words += ["--pass", f"{place}:{target}"]
            slot.channel.setblocking(False)
            message = b"".join(word.encode() + b"\0" for word in words)
            if socket.send_fds(slot.channel, [message], sent) != len(message):
                raise Refused("invalid", "too many arguments")
        finally:
            for listener in listeners.values():
                listener.close()
            for fd in held:
                os.close(fd)

    def _words(self, request: StartVm, slot: Slot) -> list[str]:
        uid = self._options.uid_base + slot.number
        base = _CLAIM_FD_BASE
        words = ["--id", request.sandbox_id, "--generation", str(request.generation)]
        words += [
            "--control-fd",
            str(base),
            "--root-fd",
            str(base + 1),
            "--argv-fd",
            str(base + 2),
            "--env-fd",
            str(base + 3),
        ]
        words += ["--fsize", str(request.disk_limit_mib << 20)]
        if self._rootless:
            words.append("--no-userns-drop")
        else:
            words += ["--uid", str(uid), "--gid", str(uid), "--nproc", str(Limits(request.vcpus, 0).pids)]
            for peer in self._options.peer_uids[:8]:
                words += ["--peer-uid", str(peer)]
        if request.paths:
            words.append("--paths")
        if request.network:
            words += ["--tap", str(TAP_FD)]
        if request.kvm:
            if not stat.S_ISCHR(_mode("/dev/kvm")):
                raise Refused("denied", "/dev/kvm is not there", "load the kvm module, or use software emulation")
            words += ["--dev", "kvm"]
        return words

    def _owner(self) -> int | None:
        return self._options.peer_uids[0] if self._options.peer_uids else None

    def _heard(self, start: _Start) -> None:
        try:
            text = start.slot.hear()
        except Lost as error:
            self._undo(start, Refused("jail_failed", str(error)))
            return
        if text is None or text == "parked":
            return
        if text.startswith("error="):
            code, _, message = text[6:].strip().partition(" ")
            code = code if code in _CODES else "jail_failed"
            self._undo(start, Refused(code, message))
            return
        try:
            pid, started = (int(part.partition("=")[2]) for part in text.split())
        except ValueError:
            self._undo(start, Refused("jail_failed", "the shim was killed while it started"))
            return
        self._started(start, pid, started)

    def _started(self, start: _Start, pid: int, started: int) -> None:
        pidfd = records.open_process(pid, started)
        if pidfd is None:
            self._undo(start, Refused("spawn_failed", "the VM ended at once"))
            return
        outer = self._options.outer_uid
        network = start.slot.network
        try:
            rules = network.state_of_rules() if network is not None and start.request.network else 0
            if network is None and start.request.network:
                raise Lost("its shim gave no network")
        except Lost as error:
            os.close(pidfd)
            self._undo(start, Refused("jail_failed", str(error)))
            return
        record = VmRecord(
            sandbox_id=start.request.sandbox_id,
            generation=start.request.generation,
            uid=self._options.uid_base + start.slot.number if outer is None else outer,
            slot=start.slot.number,
            shim_pid=pid,
            shim_starttime=started,
            host_boot_id=self._boot_id,
            network=start.request.network,
            rules=rules,
            ruleset=ruleset.VERSION,
        )
        try:
            folder = self._run.open(record.sandbox_id)
            try:
                records.write(folder, record)
            finally:
                os.close(folder)
            # Only now the shim may outlive us: until here it ends when our end of the channel closes.
            start.slot.channel.send(b"commit")
        except OSError as error:
            os.close(pidfd)
            self._undo(start, Refused("host_exhausted", f"recording the VM: {error}"))
            return
        if record.network:
            start.slot.network = None
        self._finish(start)
        vm = self._add(record, pidfd)
        self._networks.add(record, network if record.network else None)
        for reply in start.replies:
            reply(Started(vm=vm.shown()))
        self._stock.plan()

    def _late(self, start: _Start) -> None:
        self._undo(start, Refused("jail_failed", f"the jail did not stand within {START_WITHIN_S:g} s"))

    def _finish(self, start: _Start) -> None:
        if start.timer is not None:
            start.timer.cancel()
        self._loop.unwatch(start.slot.channel.fileno())
        start.slot.close()
        del self._starts[start.request.sandbox_id]

    def _undo(self, start: _Start, why: Refused) -> None:
        """Takes back all that a start made, then answers."""
        # The shim's first process; its init, which has no commit, ends by itself when the channel closes.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(start.slot.pidfd, signal.SIGKILL)
        self._finish(start)
        _attempt("its cgroup", start.slot.cgroup.kill)
        _attempt("its folder", partial(self._run.remove, start.request.sandbox_id))
        say(
            f"{start.request.sandbox_id} did not start: {why.code}: {why.message}",
            level="warning",
            request_id=start.request.request_id,
            sandbox_id=start.request.sandbox_id,
        )

        def then() -> None:
            for reply in start.replies:
                reply(why.answer())
            for reply in start.killers:
                reply(Done())

        self._stock.release(start.slot.number, then)

    def _add(self, record: VmRecord, pidfd: int) -> _Vm:
        vm = self._vms[record.sandbox_id] = _Vm(record, pidfd)
        if pidfd >= 0:
            self._loop.watch(pidfd, lambda: self._ended(vm))
        return vm

    def _ended(self, vm: _Vm) -> None:
        if vm.pidfd < 0:
            return
        self._loop.unwatch(vm.pidfd)
        os.close(vm.pidfd)
        vm.pidfd = -1
        if vm.timer is not None:
            vm.timer.cancel()
            vm.timer = None
        killers, vm.killers = vm.killers, []
        for reply in killers:
            reply(Done())
        if vm.forgetters:
            self._forget(vm, vm.forgetters)

    def _forget(self, vm: _Vm, replies: list[Reply]) -> None:
        vm.forgetters = []
        if self._vms.get(vm.record.sandbox_id) is not vm:
            for reply in replies:
                reply(Done())
            return
        try:
            self._run.remove(vm.record.sandbox_id)
        except OSError as error:
            failed = Refused("host_exhausted", f"removing the VM's folder: {error}")
            for reply in replies:
                reply(failed.answer())
            return
        del self._vms[vm.record.sandbox_id]
        self._networks.forget(vm.record.sandbox_id)

        def then() -> None:
            for reply in replies:
                reply(Done())

        self._stock.release(vm.record.slot, then)

    def _still_running(self, vm: _Vm, reply: Reply) -> None:
        if reply in vm.forgetters:
            vm.forgetters.remove(reply)
            reply(Refused("running", "the VM still runs", "kill it first").answer())

    def _unkillable(self, vm: _Vm) -> None:
        vm.timer = None
        killers, vm.killers = vm.killers, []
        answer = Refused(
            "running", f"it did not die within {KILL_WITHIN_S:g} s: it waits in the host's kernel", "look at the disk"
        ).answer()
        for reply in killers:
            reply(answer)


def _attempt(what: str, action: Callable[[], object]) -> None:
    """Does what must not keep the rest from being done."""
    try:
        action()
    except OSError as error:
        say(f"{what}: {error}")


def _mode(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def _strings(name: str, strings: list[str]) -> int:
    fd = os.memfd_create(name)
    data = b"".join(text.encode() + b"\0" for text in strings)
    while data:
        data = data[os.write(fd, data) :]
    return fd
