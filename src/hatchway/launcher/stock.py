"""Slots prepared ahead: parked shims that already have their network namespace, tap and cgroup, and wait for their VM."""

import os
import signal
import socket
import time
from collections.abc import Callable

from hatchway.launcher.cgroups import Cgroups, SlotCgroup
from hatchway.launcher.errors import Refused
from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop
from hatchway.launcher.network import HELD, Lost, Network, Rules
from hatchway.launcher.records import has_ended

REFILL_DELAY_S = 0.25
RETRY_DELAY_S = 5.0
REMOVE_WITHIN_S = 10.0


class Slot:
    """One slot, with its shim until that is handed over to a VM."""

    def __init__(self, number: int, cgroup: SlotCgroup, pid: int, channel: socket.socket) -> None:
        self.number = number
        self.cgroup = cgroup
        self.pidfd = os.pidfd_open(pid)
        """Of the parked shim, not of the VM's."""
        self.channel = channel
        self.ready = False
        self.network: Network | None = None
        """Once it is ready; whoever takes it puts None here."""

    def close(self) -> None:
        """Closes our end: a shim that was not told `commit` ends by it, and all that it started."""
        self.channel.close()
        os.close(self.pidfd)
        if self.network is not None:
            self.network.close()

    def hear(self) -> str | None:
        """Returns what the shim said, `parked` among it, and takes the network that comes with that; None when it said nothing.

        Empty at its end. Raises `Lost` when what came with it is no network.
        """
        try:
            text, fds, _, _ = socket.recv_fds(self.channel, 1024, HELD, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            return ""
        if fds:
            self.network = Network(fds)
        return text.decode(errors="replace")


class Stock:
    """Owns the slots' numbers and prepares up to `target` of them while nothing else is to be done."""

    def __init__(self, loop: Loop, cgroups: Cgroups, shim: str, slots: int, target: int, rules: Rules | None) -> None:
        self._loop = loop
        self._cgroups = cgroups
        self._shim = shim
        self._target = target
        self._rules = rules
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._waiting: list[Slot] = []
        self._planned = False
        self._closed = False

    def reserve(self, number: int) -> None:
        """Takes the slot of a VM that runs since before this launcher did."""
        if number in self._free:
            self._free.remove(number)

    def plan(self, delay: float = REFILL_DELAY_S) -> None:
        """Refills a little later, so as not to compete with the start that is in progress."""
        if not self._planned and not self._closed and len(self._waiting) < self._target and self._free:
            self._planned = True
            self._loop.later(delay, self._refill)

    def places(self) -> tuple[int, int, int]:
        """All slots, those that no VM has, and how many of these are prepared."""
        ready = sum(slot.ready for slot in self._waiting)
        return self._slots, len(self._free) + len(self._waiting), ready

    def cgroup(self, number: int) -> SlotCgroup:
        """The cgroup of a slot."""
        return self._cgroups.slot(number)

    def claim(self) -> Slot:
        """Returns a slot that nobody else has; its channel is the caller's from now on. Raises `Refused("no_slot")`."""
        if not self._waiting:
            return self._prepare()
        slot = next((slot for slot in self._waiting if slot.ready), self._waiting[0])
        self._waiting.remove(slot)
        self._loop.unwatch(slot.channel.fileno())
        return slot

    def release(self, number: int, then: Callable[[], None] | None = None) -> None:
        """Gives back a slot whose processes were ended: as soon as its cgroup could be removed it is free again.

        Calls `then` when it is, or after `REMOVE_WITHIN_S` when it never was (the slot stays out of use then).
        """
        cgroup = self._cgroups.slot(number)
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            gone = cgroup.remove()
            if not gone and tries * 0.02 < REMOVE_WITHIN_S and not self._closed:
                if tries == 50:
                    cgroup.kill()
                self._loop.later(0.02, attempt)
                return
            if gone:
                if number < self._slots:  # else it is from a launcher that was started with more
                    self._free.append(number)
                self.plan()
            else:
                say(f"slot {number}: its cgroup cannot be removed; the slot stays out of use")
            if then is not None:
                then()

        attempt()

    def close(self) -> None:
        """Ends the parked shims, and removes their cgroups as far as they are gone within a second."""
        self._closed = True
        until = time.monotonic() + 1.0
        for slot in self._waiting:
            self._loop.unwatch(slot.channel.fileno())
            slot.channel.close()
        for slot in self._waiting:
            has_ended(slot.pidfd, max(0.0, until - time.monotonic()))
            slot.close()
            # A kernel may take a process out of its cgroup only a moment after it told of its end.
            while not slot.cgroup.remove() and time.monotonic() < until:
                time.sleep(0.002)
        self._waiting.clear()

    def _refill(self) -> None:
        self._planned = False
        if self._closed or len(self._waiting) >= self._target or not self._free:
            return
        try:
            slot = self._prepare()
        except Refused as error:
            say(f"cannot prepare a slot: {error.message}")
            self.plan(RETRY_DELAY_S)
            return
        self._waiting.append(slot)
        self._loop.watch(slot.channel.fileno(), lambda: self._heard(slot))

    def _heard(self, slot: Slot) -> None:
        try:
            word = slot.hear()
        except Lost as error:
            word = str(error)
        if word is None:
            return
        if word == "parked" and (slot.network is not None) == (self._rules is not None):
            slot.ready = True
            self.plan(0.0)
            return
        self._loop.unwatch(slot.channel.fileno())
        self._waiting.remove(slot)
        slot.close()
        say(f"a prepared slot ended: {word or 'killed'}")
        self.release(slot.number)
        self.plan(RETRY_DELAY_S)

    def _prepare(self) -> Slot:
        if not self._free:
            raise Refused("no_slot", "all slots are taken", "delete sandboxes, or start with more --slots")
        number = self._free.pop()
        cgroup = self._cgroups.slot(number)
        try:
            return self._spawn(number, cgroup)
        except OSError as error:
            cgroup.remove()
            self._free.append(number)
            raise Refused("host_exhausted", f"preparing a slot: {error}") from error

    def _spawn(self, number: int, cgroup: SlotCgroup) -> Slot:
        """Starts a shim. Raises `OSError`, and nothing of it runs then."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        procs: list[int] = []
        rules = -1
        pid = 0
        try:
            cgroup.make()
            procs = cgroup.open_procs()
            words = ["hatchway-shim", "--park", "--report-fd", str(theirs.fileno())]
            if self._rules is not None:
                rules = self._rules.open()
                os.set_inheritable(rules, True)
                words += ["--network", "--rules-fd", str(rules), "--nft", self._rules.nft]
            for fd in procs:
                words += ["--cgroup-fd", str(fd)]
                os.set_inheritable(fd, True)
            theirs.set_inheritable(True)
            # One thread: nobody else can start a program while these are inheritable.
            pid = os.posix_spawn(self._shim, words, {}, setsigmask=[])
            return Slot(number, cgroup, pid, ours)
        except OSError:
            ours.close()
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        finally:
            theirs.close()
            for fd in (*procs, *([rules] if rules >= 0 else [])):
                os.close(fd)
