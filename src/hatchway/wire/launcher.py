"""The closed list of what the launcher can be asked to do.

One request is one SOCK_SEQPACKET datagram of JSON, at most 60,000 octets, one answer likewise; descriptors travel beside it
(SCM_RIGHTS). Nothing here is interpreted as a path, a command or a rule by the launcher: ids are checked against the
id grammar, numbers against their ranges, and the VMM's arguments are handed to a jailed, unprivileged process as they are.
"""

import msgspec

MAX_DATAGRAM = 60_000
MAX_LISTED = 150


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the launcher's messages."""


class Asked(Struct, frozen=True, kw_only=True):
    """Base of the requests."""

    request_id: str = ""
    """The request of the API that it serves, for the log; nothing is done by it."""


class Hello(Asked, frozen=True, kw_only=True, tag="hello"):
    """Asks what the launcher can do. Answer: `HelloAnswer`."""


class StartVm(Asked, frozen=True, kw_only=True, tag="start_vm"):
    """Starts a shim and its VMM in a fresh jail. Answer: `Started`; descriptors of the answer: none.

    Descriptors of the request, in this order: the jail's root folder (O_PATH), then one per entry of `pass_as`.
    The launcher adds: `QMP_FD` and `AGENT_FD` (listening sockets of run/vm/ID/qmp.sock and agent.sock) and, when
    `network`, `TAP_FD`. A VM of the same id and generation that already runs is answered again; one of an older
    generation is an error `exists`.
    """

    sandbox_id: str
    generation: int
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    pass_as: tuple[int, ...] = ()
    """Number that the descriptor gets in the VMM, 20 to 99, one for each descriptor after the first."""
    network: bool = True
    kvm: bool = False
    paths: bool = False
    """The VMM takes files by path only: instead of the descriptors it gets, at each open of /hatchway/N, the one for N; of
    /dev/net/tun, an open device. It binds /tmp/api.sock and /tmp/vsock.sock in its jail, which the shim dials, and gets none of
    the launcher's sockets. Its standard output is its guest's console."""
    vcpus: int = 1
    memory_limit_mib: int = 512
    """Bound of the VM's cgroup: guest memory, translation cache and the VMM itself."""
    disk_limit_mib: int = 1_048_576
    """RLIMIT_FSIZE of the VMM."""
    io_bps: int = 0
    """Octets a second, each way, on every disk that the passed files lie on, where cgroups can bound that; 0: not bounded."""
    io_iops: int = 0
    """Operations a second, likewise."""


class KillVm(Asked, frozen=True, kw_only=True, tag="kill_vm"):
    """Ends the shim and all it started, by SIGKILL, whatever they do. Idempotent. Answer: `Done`."""

    sandbox_id: str


class ForgetVm(Asked, frozen=True, kw_only=True, tag="forget_vm"):
    """Removes what is left of a VM that ended: run folder, cgroup, slot. Idempotent. Errors: `running`. Answer: `Done`."""

    sandbox_id: str


class ListVms(Asked, frozen=True, kw_only=True, tag="list_vms"):
    """Asks for the VMs that the launcher has a record of, in the order of their ids, from behind `after` on. Answer: `VmList`."""

    after: str = ""


class InspectVm(Asked, frozen=True, kw_only=True, tag="inspect_vm"):
    """Asks what a VM that has a record uses, also after its end, until it is forgotten. Answer: `VmUsage`."""

    sandbox_id: str


class Count(Asked, frozen=True, kw_only=True, tag="count"):
    """Asks what the launcher counts of itself. Answer: `Counts`."""


class Listeners(Asked, frozen=True, kw_only=True, tag="listeners"):
    """Asks for the sockets of a VM's network slot. Answer: `ListenersAnswer`, with descriptors beside it.

    Three, in the order of `wire.egress.LISTENERS`: duplicates, as often as it is asked; the shim keeps them for as long as there is the
    VM, so that connections wait in them while nobody serves. Errors: `unknown` (no VM of this id and generation lives), `no_network`
    (it was started without, or its rules are gone and could not be put back: `message` says why).
    """

    sandbox_id: str
    generation: int


class Counters(Asked, frozen=True, kw_only=True, tag="counters"):
    """Asks what the rules of a VM's network slot dropped, also after its end, until it is forgotten. Answer: `Dropped`.

    Errors: `unknown`, `no_network`.
    """

    sandbox_id: str


Request = Hello | StartVm | KillVm | ForgetVm | ListVms | InspectVm | Count | Listeners | Counters

QMP_FD = 10
AGENT_FD = 11
TAP_FD = 12


class HelloAnswer(Struct, frozen=True, kw_only=True, tag="hello_answer"):
    """Limits that are enforced, namespaces and devices that can be had; what is lacking has its remedy in `warnings`."""

    rootless: bool
    network: bool
    cgroups: str
    """`v2`, `v1` or `none`."""
    io_limits: bool = False
    """Whether cgroups can bound input and output here."""
    warnings: tuple[str, ...] = ()


class VmRecord(Struct, frozen=True, kw_only=True):
    """One VM, as the launcher recorded it; also the content of run/vm/ID/launch.json."""

    sandbox_id: str
    generation: int
    uid: int
    slot: int
    shim_pid: int
    """In the host's (the launcher's) PID namespace."""
    shim_starttime: int
    """Field 22 of /proc/PID/stat: with the pid it names one process for ever."""
    host_boot_id: str
    network: bool
    rules: int = 0
    """The number that the kernel gave to the state of the slot's rules: another one says that somebody changed them."""
    ruleset: int = 0
    """Which text of the rules these are (`launcher.ruleset.VERSION`): a launcher of another release puts its own in their place."""
    alive: bool = True


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """The VMM was exec'ed in its jail."""

    vm: VmRecord


class VmList(Struct, frozen=True, kw_only=True, tag="vm_list"):
    """Answer to `ListVms`; VMs of an earlier host boot are listed with `alive: false`."""

    vms: tuple[VmRecord, ...]
    """At most `MAX_LISTED`."""
    more: bool = False
    """There are others behind the last of these."""


class VmUsage(Struct, frozen=True, kw_only=True, tag="vm_usage"):
    """Answer to `InspectVm`, as the VM's cgroup counts it: octets and numbers; zeros where it is not counted, or there is no such VM."""

    memory_bytes: int = 0
    """With the page cache that the VM was the first to touch."""
    memory_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    processes: int = 0
    oom_kills: int = 0
    """How often the kernel killed a process of the VM for lack of memory."""


class Counts(Struct, frozen=True, kw_only=True, tag="counts"):
    """Answer to `Count`: numbers since this launcher was started, and what holds now."""

    answered: dict[str, dict[str, int]] = {}
    """By the tag of the request, then by `ok` or the code of the refusal."""
    turned_away: int = 0
    """Connections of users who may not ask, or beyond the bound."""
    slots: int = 0
    """How many VMs there can be at once."""
    slots_free: int = 0
    slots_prepared: int = 0
    """Of which a shim waits for its VM."""


class ListenersAnswer(Struct, frozen=True, kw_only=True, tag="listeners_answer"):
    """Answer to `Listeners`; the descriptors came with it."""

    restored: int = 0
    """How often the rules had to be put back since the launcher knows the VM."""


class Dropped(Struct, frozen=True, kw_only=True, tag="dropped"):
    """Answer to `Counters`: packets, since the rules were put there (a lower number than before says that they were put back)."""

    packets: dict[str, int]
    """By reason: the names of `launcher.ruleset.DROPS`."""
    restored: int = 0
    """How often the rules had to be put back since the launcher knows the VM."""


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """It is so."""


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """It could not be done. `code`: `invalid exists running no_slot jail_failed spawn_failed denied host_exhausted unknown no_network`."""

    code: str
    message: str
    remedy: str = ""


Answer = HelloAnswer | Started | VmList | VmUsage | Counts | ListenersAnswer | Dropped | Done | Failed
