"""What Firecracker is told: a pure function of what a VM is made of.

Files are named /hatchway/N and mean the descriptors that were passed as N (docs/protocols/shim.md). A snapshot names its disks and its guest
channel by these paths and a load cannot override them, so that they are the same in every jail. `ARGS_VERSION` is part of the key of
every baked snapshot and grows with each change here that a guest can see. The PCI transport stays off: it is asked for by an argument that is
not given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hatchway.domain.host_limits import BURST, BURST_S, DEFAULTS, HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node.vmm import tree

ARGS_VERSION = 1
API_SOCKET = "/tmp/api.sock"  # in the jail, which has a /tmp of its own
AGENT_SOCKET = "/tmp/vsock.sock"
AGENT_PORT = 1000
"""vsock port of the agent; the kernel keeps those below 1024 for root, so that no other user of the guest can take it."""
GUEST_CID = 3
GUEST_MAC = "02:fc:00:00:00:02"
TAP = "tap0"
RNG_OCTETS, RNG_PERIOD_MS = 16_384, 1_000
"""How much host randomness a guest may draw: 16 KiB a second."""

MEMORY_FD = 20
STATE_FD = 22
KERNEL_FD = 23
INITRD_FD = 24
BASE_FD = 30
UPPER_FD = 31
SAVED_STATE, SAVED_MEMORY = 40, 41
"""Numbers of the files that a snapshot is written to, offered when one is made."""

CMDLINE = "console=ttyS0 reboot=k panic=-1 pci=off i8042.noaux i8042.nomux i8042.dumbkbd"
"""`reboot=k`: the reset that Firecracker understands as the end."""

Request = tuple[str, str, Mapping[str, object]]
"""Method, path and body."""


def path(number: int) -> str:
    """Returns the path that means the VMM's descriptor `number`."""
    return f"/hatchway/{number}"


def arguments() -> tuple[str, ...]:
    """Returns argv, the same for every VM. Firecracker's own seccomp filters are on by default."""
    return (tree.VMM_PATH, "--api-sock", API_SOCKET, "--id", "hatchway", "--level", "Error")


@dataclass(frozen=True)
class Machine:
    """What one machine is made of."""

    shape: Shape
    network: bool
    cmdline: str
    """The template's part of the kernel command line."""
    limits: HostLimits = DEFAULTS
    """What bounds the speed of the disk."""


def boot(machine: Machine) -> list[Request]:
    """Returns the requests that make the machine and start it, in order. A balloon is never among them: it punches holes into the memory file."""
    requests: list[Request] = [
        ("PUT", "/machine-config", {"vcpu_count": machine.shape.vcpus, "mem_size_mib": machine.shape.memory_mib}),
        (
            "PUT",
            "/boot-source",
            {
                "kernel_image_path": path(KERNEL_FD),
                "initrd_path": path(INITRD_FD),
                "boot_args": f"{CMDLINE} {machine.cmdline}".strip(),
            },
        ),
        ("PUT", "/drives/base", _drive("base", BASE_FD, read_only=True, limits=machine.limits)),
        ("PUT", "/drives/upper", _drive("upper", UPPER_FD, read_only=False, limits=machine.limits)),
        ("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": AGENT_SOCKET}),
        ("PUT", "/entropy", {"rate_limiter": {"bandwidth": {"size": RNG_OCTETS, "refill_time": RNG_PERIOD_MS}}}),
    ]
    if machine.network:
        net = {"iface_id": "net", "guest_mac": GUEST_MAC, "host_dev_name": TAP}
        requests.append(("PUT", "/network-interfaces/net", net))
    requests.append(("PUT", "/actions", {"action_type": "InstanceStart"}))
    return requests


def load(version: tuple[int, ...], *, resume: bool) -> Request:
    """Returns the request that loads the state and maps the memory privately.

    Changes are tracked from then on, without which no snapshot of the devices alone can be made; release 1.13 renamed the option.
    """
    track = "track_dirty_pages" if version >= (1, 13) else "enable_diff_snapshots"
    memory = {"backend_type": "File", "backend_path": path(MEMORY_FD)}
    body = {"snapshot_path": path(STATE_FD), "mem_backend": memory, track: True, "resume_vm": resume}
    return "PUT", "/snapshot/load", body


def save(*, whole: bool) -> Request:
    """Returns the request that writes the devices' state and the memory, all of it or what changed, to the offered files."""
    kind = "Full" if whole else "Diff"
    body = {"snapshot_type": kind, "snapshot_path": path(SAVED_STATE), "mem_file_path": path(SAVED_MEMORY)}
    return "PUT", "/snapshot/create", body


def state(word: str) -> Request:
    """Returns the request that makes the machine `Paused` or `Resumed`."""
    return "PATCH", "/vm", {"state": word}


def reopen_disk() -> Request:
    """Returns the request that has the upper disk opened again, by which the guest learns its new size."""
    return "PATCH", "/drives/upper", {"drive_id": "upper", "path_on_host": path(UPPER_FD)}


def _drive(name: str, number: int, *, read_only: bool, limits: HostLimits) -> dict[str, object]:
    drive: dict[str, object] = {
        "drive_id": name,
        "path_on_host": path(number),
        "is_root_device": False,
        "is_read_only": read_only,
        # Flushes of the guest reach the host's disk.
        "cache_type": "Unsafe" if read_only else "Writeback",
    }
    limiter = rate_limiter(limits)
    if limiter and not read_only:
        drive["rate_limiter"] = limiter
    return drive


def rate_limiter(limits: HostLimits) -> dict[str, object]:
    """Firecracker's bounds of one disk: buckets that fill at the rate, and once hold as much as a burst of `BURST_S` seconds."""
    found: dict[str, object] = {}
    for name, rate in (("bandwidth", limits.disk_mib_s << 20), ("ops", limits.disk_ops_s)):
        if rate:
            found[name] = {"size": rate, "one_time_burst": rate * (BURST - 1) * BURST_S, "refill_time": 1000}
    return found
