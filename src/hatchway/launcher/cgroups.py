"""Limits of a VM: one cgroup per slot, below `hatchway/INSTANCE/`, on version 2 or version 1 of cgroups.

Slots have them ahead of time, because moving a process into a cgroup waits for an RCU grace period (about 6 ms).
"""

import contextlib
import errno
import os
from typing import NamedTuple

PERIOD_US = 100_000
_V1 = ("memory", "pids", "cpu")
_V2 = ("memory", "pids", "cpu")
_V1_IO, _V2_IO = "blkio", "io"
_NO_SUCH_DEVICE = (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO)


class Limits:
    """What a VM may use; `vcpus` virtual CPUs and `memory_mib` MiB, the VMM's own included.

    `io_bps` octets and `io_iops` operations a second, each way, on every one of the `disks` (`MAJOR:MINOR`); 0: not bounded.
    """

    def __init__(
        self, vcpus: int, memory_mib: int, *, io_bps: int = 0, io_iops: int = 0, disks: tuple[str, ...] = ()
    ) -> None:
        self.memory = memory_mib << 20
        self.io_bps = io_bps
        self.io_iops = io_iops
        self.disks = disks
        self.pids = 64 + 16 * vcpus
        # Half a CPU more than the guest has, for the VMM's own threads.
        self.quota_us = vcpus * PERIOD_US + PERIOD_US // 2
        self.vcpus = vcpus

    def files(self, version: str) -> list[tuple[str, str, str]]:
        """Returns (controller, file, value); on version 2 the controller does not matter."""
        if version == "v1":
            return [
                ("memory", "memory.limit_in_bytes", str(self.memory)),
                ("pids", "pids.max", str(self.pids)),
                ("cpu", "cpu.shares", str(min(1024 * self.vcpus, 262_144))),
                ("cpu", "cpu.cfs_period_us", str(PERIOD_US)),
                ("cpu", "cpu.cfs_quota_us", str(self.quota_us)),
            ]
        return [
            ("", "memory.max", str(self.memory)),
            ("", "pids.max", str(self.pids)),
            ("", "cpu.weight", str(min(100 * self.vcpus, 10_000))),
            ("", "cpu.max", f"{self.quota_us} {PERIOD_US}"),
        ]

    def optional_files(self, version: str) -> list[tuple[str, str, str]]:
        """Like `files`: bounds that not every kernel has, or not on every file system."""
        weight = min(100 * self.vcpus, 1_000)
        bounds = (("rbps", self.io_bps), ("wbps", self.io_bps), ("riops", self.io_iops), ("wiops", self.io_iops))
        if version == "v1":
            found = [(_V1_IO, "blkio.bfq.weight", str(weight))]
            for disk in self.disks:
                for name, value in bounds:
                    way, kind = ("read" if name[0] == "r" else "write"), name[1:]
                    if value:
                        found.append((_V1_IO, f"blkio.throttle.{way}_{kind}_device", f"{disk} {value}"))
            return found
        # A guest's memory cannot need more swap; a VMM that was taken over could fill the host's.
        found = [("", "memory.swap.max", str(self.memory)), ("", "io.weight", f"default {weight}")]
        words = " ".join(f"{name}={value}" for name, value in bounds if value)
        return found + [("", "io.max", f"{disk} {words}") for disk in self.disks if words]


class Usage(NamedTuple):
    """What one slot uses: octets, and how many of its processes were killed for lack of memory."""

    memory: int = 0
    memory_peak: int = 0
    memory_limit: int = 0
    processes: int = 0
    oom_kills: int = 0


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _number(path: str, key: str = "") -> int:
    """The number in a file, or behind `key` in a file of lines; 0 where there is none."""
    try:
        words = _read(path).split()
        return int(words[words.index(key) + 1] if key else words[0])
    except (OSError, ValueError, IndexError):
        return 0


class SlotCgroup:
    """The cgroup of one slot: one folder on version 2, one per controller on version 1, none where there are none."""

    def __init__(self, version: str, folders: dict[str, str]) -> None:
        self._version = version
        self._folders = folders

    def make(self) -> None:
        """Makes the folders; those that a killed launcher left are used again."""
        for folder in self._folders.values():
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o755)

    def open_procs(self) -> list[int]:
        """Opens the files that a process writes itself into."""
        fds: list[int] = []
        try:
            for folder in self._folders.values():
                fds.append(os.open(folder + "/cgroup.procs", os.O_WRONLY))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def limit(self, limits: Limits) -> None:
        """Sets the bounds. Raises `OSError` when the kernel refuses one that every kernel has."""
        if not self._folders:
            return
        for controller, name, value in limits.files(self._version):
            _write(f"{self._folders[controller]}/{name}", value)
        for controller, name, value in limits.optional_files(self._version):
            if controller not in self._folders:
                continue
            try:
                _write(f"{self._folders[controller]}/{name}", value)
            except FileNotFoundError:
                continue  # a kernel without swap has no bound of it, one without an I/O scheduler no weights
            except OSError as error:
                if error.errno not in _NO_SUCH_DEVICE:
                    raise

    def usage(self) -> Usage:
        """Returns what is used, zeros for what this host does not count. Does not raise."""
        memory = self._folders.get("" if self._version == "v2" else "memory")
        pids = self._folders.get("" if self._version == "v2" else "pids")
        if memory is None or pids is None:
            return Usage()
        v1 = self._version == "v1"
        return Usage(
            memory=_number(memory + ("/memory.usage_in_bytes" if v1 else "/memory.current")),
            memory_peak=_number(memory + ("/memory.max_usage_in_bytes" if v1 else "/memory.peak")),
            memory_limit=_number(memory + ("/memory.limit_in_bytes" if v1 else "/memory.max")),
            processes=_number(pids + "/pids.current"),
            oom_kills=_number(memory + ("/memory.oom_control" if v1 else "/memory.events"), "oom_kill"),
        )

    def kill(self) -> None:
        """Kills whatever is in it."""
        for folder in self._folders.values():
            with contextlib.suppress(FileNotFoundError):
                try:
                    _write(folder + "/cgroup.kill", "1")
                except FileNotFoundError:  # version 1, or a kernel before 5.14
                    for pid in map(int, _read(folder + "/cgroup.procs").split()):
                        # 0 stands for a process of another PID namespace; to kill() it would be ourselves.
                        with contextlib.suppress(ProcessLookupError):
                            if pid > 0:
                                os.kill(pid, 9)

    def remove(self) -> bool:
        """Removes it; False while something in it still dies."""
        gone = True
        for folder in self._folders.values():
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone


class Cgroups:
    """The cgroups of this installation. `version` is `v2`, `v1` or `none`; `warning` then says why and what helps.

    `memory_mib` bounds all VMs together, whatever each of them may have: beyond it one of them is ended, and nothing else on
    the host (0: not bounded).
    """

    def __init__(
        self, instance: str, candidates: "list[tuple[str, dict[str, str]]] | None" = None, *, memory_mib: int = 0
    ) -> None:
        self.version = "none"
        self.warning = ""
        self.io = False
        """Whether input and output can be bounded here."""
        self._bases: dict[str, str] = {}
        reasons = []
        for version, mounts in mounted() if candidates is None else candidates:
            try:
                self._bases = _prepared(version, mounts, instance)
                _bound_all(version, self._bases, memory_mib)
            except OSError as error:
                reasons.append(f"{error.filename or version}: {error.strerror}")
                self._bases = {}
                continue
            self.version = version
            self.io = _has_io(version, self._bases)
            return
        self.warning = (
            f"no cgroup can be made ({'; '.join(reasons) or 'none is mounted'}): memory, CPU and processes of VMs are not limited. "
            "Run as root, or in a delegated cgroup (systemd-run --user --scope -p Delegate=yes)"
        )

    def slot(self, slot: int) -> SlotCgroup:
        """Returns the cgroup of a slot, made or not."""
        return SlotCgroup(self.version, {name: f"{base}/slot-{slot}" for name, base in self._bases.items()})

    def leftovers(self) -> set[int]:
        """Returns the slots that have a cgroup."""
        found: set[int] = set()
        for base in self._bases.values():
            for name in os.listdir(base):
                if name.startswith("slot-") and name[5:].isdecimal():
                    found.add(int(name[5:]))
        return found

    def close(self) -> None:
        """Removes the installation's folders if no VM is in them."""
        for base in self._bases.values():
            with contextlib.suppress(OSError):
                os.rmdir(base)
                os.rmdir(os.path.dirname(base))


def _prepared(version: str, mounts: dict[str, str], instance: str) -> dict[str, str]:
    bases: dict[str, str] = {}
    for name, mount in mounts.items():
        try:
            bases[name] = _prepare(version, mount, instance)
        except OSError:
            if name != _V1_IO:  # the one that can be done without
                raise
    return bases


def _bound_all(version: str, bases: dict[str, str], memory_mib: int) -> None:
    if memory_mib <= 0:
        return
    if version == "v2":
        _write(bases[""] + "/memory.max", str(memory_mib << 20))
    elif "memory" in bases:
        with contextlib.suppress(
            OSError
        ):  # version 1 takes no bound below what is used: that of the former launcher stays
            _write(bases["memory"] + "/memory.limit_in_bytes", str(memory_mib << 20))


def has_io(mount: str) -> bool:
    """Whether a tree of version 2 has the controller of input and output."""
    try:
        return _V2_IO in _read(mount + "/cgroup.controllers").split()
    except OSError:
        return False


def _has_io(version: str, bases: dict[str, str]) -> bool:
    if version == "v1":
        return _V1_IO in bases
    try:
        return _V2_IO in _read(bases[""] + "/cgroup.subtree_control").split()
    except OSError:
        return False


def _prepare(version: str, mount: str, instance: str) -> str:
    parent = mount
    for name in ("hatchway", instance):
        if version == "v2":
            try:
                _delegate(parent)
            except OSError as error:
                if error.errno != errno.EBUSY or parent != mount:
                    raise
                _clear(parent)
                _delegate(parent)
        parent = f"{parent}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent, 0o755)
    if version == "v2":
        _delegate(parent)
    if not os.access(parent + "/cgroup.procs", os.W_OK):
        raise PermissionError(13, "not writable", parent)
    return parent


def _delegate(folder: str) -> None:
    have = _read(folder + "/cgroup.subtree_control").split()
    lack = [name for name in _V2 if name not in have]
    if lack:
        try:
            _write(folder + "/cgroup.subtree_control", " ".join("+" + name for name in lack))
        except OSError as error:
            raise OSError(error.errno, error.strerror, folder) from error
    if _V2_IO not in have:
        with contextlib.suppress(
            OSError
        ):  # not delegated to us, or not there: VMs are then bounded by their monitor alone
            _write(folder + "/cgroup.subtree_control", "+" + _V2_IO)


def _clear(folder: str) -> None:
    """Moves the processes of a delegated cgroup into a leaf of it: controllers go down only from where no process is."""
    leaf = folder + "/hatchway-services"
    with contextlib.suppress(FileExistsError):
        os.mkdir(leaf, 0o755)
    for pid in _read(folder + "/cgroup.procs").split():
        with contextlib.suppress(ProcessLookupError):
            _write(leaf + "/cgroup.procs", pid)


def mounted() -> list[tuple[str, dict[str, str]]]:
    """Returns what could be used, best first: (`v2`, {"": folder}) or (`v1`, {controller: folder})."""
    v1: dict[str, str] = {}
    v2 = ""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            where = left.split(" ")[4]
            if kind == "cgroup2":
                v2 = where
            elif kind == "cgroup":
                for name in (*_V1, _V1_IO):
                    if name in options.strip().split(","):
                        v1[name] = where
    found: list[tuple[str, dict[str, str]]] = []
    if v2 and set(_V2) <= set(_read(v2 + "/cgroup.controllers").split()):
        found.append(("v2", {"": v2}))
    if v2 and (os.geteuid() != 0 or _in_user_namespace()):
        own = _own_v2()
        if own not in ("", "/"):
            found.append(("v2", {"": v2 + own}))
    if set(_V1) <= set(v1):
        found.append(("v1", v1))
    return found


def _own_v2() -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return line[3:]
    return ""


def _in_user_namespace() -> bool:
    return _read("/proc/self/uid_map").split() != ["0", "0", "4294967295"]
