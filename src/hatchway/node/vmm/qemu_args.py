"""The command line of QEMU: a pure function of what a VM is made of.

Every file of the VM is given by descriptor; kernel and initramfs, which QEMU only takes by path, are in the jail's root. A restored machine must be made of exactly the
devices, in exactly the order, that the baked one had: `ARGS_VERSION` is part of the key of every baked snapshot and grows with
each change here that a guest can see.
"""

import json
from dataclasses import dataclass

from hatchway.domain.host_limits import BURST, BURST_S, DEFAULTS, HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node.vmm import tree
from hatchway.node.vmm.machines import Machine
from hatchway.wire.launcher import AGENT_FD, QMP_FD, TAP_FD

ARGS_VERSION = 2
AGENT_PORT = "hatchway.agent"
GUEST_MAC = "02:fc:00:00:00:02"
RAM_PATH = "/hatchway/ram"
"""What the preload library answers with the descriptor in the environment variable `HATCHWAY_RAM_FD`."""
TOP_NODE = "upper"
"""Name of the block node of the topmost file."""
BASE_NODE = "base-bounded"
"""Name of the block node that the guest reads the template from: it shares the bounds of the disk."""
DISK_NODE = "upper-bounded"
"""Name of the block node that the guest writes to: what bounds its speed, above the topmost file."""
CONSOLE_OCTETS = 65_536
RNG_OCTETS, RNG_PERIOD_MS = 16_384, 1_000
"""How much host randomness a guest may draw: 16 KiB a second."""

MEMORY_FD = 20
STATE_FD = 22
BASE_FD = 30
DISK_FDS = 31
"""The first of the upper disk's layers, from the lowest to the topmost."""
MAX_LAYERS = 16

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True)
class Layer:
    """One file of the upper disk: the lowest is `raw` or `qcow2`, the others are `qcow2`; only the topmost is writable."""

    format: str


@dataclass(frozen=True)
class Parts:
    """What one QEMU is started with."""

    machine: Machine
    hardware: bool
    shape: Shape
    layers: tuple[Layer, ...]
    network: bool
    limits: HostLimits = DEFAULTS
    """What bounds the speed of the disk."""
    share_memory: bool = False
    """The memory file is written by the guest: for a bake only."""
    incoming: bool = False
    """Wait for a saved state instead of booting."""
    cmdline: str | None = None
    """Kernel arguments of a cold boot, None when restoring."""
    devices_only: bool = False
    """The incoming state has the devices alone, without the configuration section (a live capture)."""


def translation_cache_mib(shape: Shape) -> int:
    """Returns QEMU's translation cache in MiB under software emulation: enough for a language runtime, more for large guests."""
    return 64 if shape.memory_mib <= 1024 and shape.vcpus <= 2 else 128


def arguments(parts: Parts) -> tuple[str, ...]:
    """Returns argv, `argv[0]` being the VMM's path in the jail. Raises `ValueError` for more than `MAX_LAYERS` disk layers."""
    machine, shape = parts.machine, parts.shape
    if not 1 <= len(parts.layers) <= MAX_LAYERS:
        raise ValueError(f"a disk of {len(parts.layers)} layers: at most {MAX_LAYERS} are allowed")
    argv = [tree.VMM_PATH, "-L", tree.FIRMWARE_PATH, "-name", "hatchway", "-nodefaults", "-no-user-config"]
    argv += ["-display", "none", "-no-reboot", "-sandbox", SANDBOX]
    argv += ["-M", f"{machine.machine},memory-backend=ram"]
    argv += ["-accel", "kvm" if parts.hardware else f"tcg,tb-size={translation_cache_mib(shape)}"]
    argv += ["-cpu", machine.hardware_cpu if parts.hardware else machine.emulated_cpu]
    argv += ["-smp", str(shape.vcpus), "-m", f"{shape.memory_mib}M"]
    share = "on" if parts.share_memory else "off"
    argv += ["-object", f"memory-backend-file,id=ram,size={shape.memory_mib}M,mem-path={RAM_PATH},share={share}"]
    argv += ["-chardev", f"ringbuf,id=console,size={CONSOLE_OCTETS}", "-serial", "chardev:console"]
    argv += ["-chardev", f"socket,id=qmp,fd={QMP_FD},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    argv += ["-device", f"virtio-serial-{machine.bus},max_ports=2"]
    argv += ["-chardev", f"socket,id=agent,fd={AGENT_FD},server=on,wait=off"]
    argv += ["-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"]
    argv += _disks(parts)
    if parts.network:
        argv += ["-netdev", f"tap,id=net,fd={TAP_FD}"]
        argv += ["-device", f"virtio-net-{machine.bus},netdev=net,mac={GUEST_MAC}"]
    argv += ["-object", "rng-builtin,id=rng"]
    argv += ["-device", f"virtio-rng-{machine.bus},rng=rng,max-bytes={RNG_OCTETS},period={RNG_PERIOD_MS}"]
    if parts.cmdline is not None:
        argv += ["-kernel", tree.KERNEL_PATH, "-initrd", tree.INITRD_PATH, "-append", parts.cmdline]
    if parts.incoming:
        argv += ["-incoming", "defer"]
    if parts.devices_only:
        argv += ["-S", "-global", "migration.send-configuration=off"]
    return tuple(argv)


def kernel_command_line(machine: Machine, template: str, *, hardware: bool, tsc_khz: int) -> str:
    """Joins the machine's, the accelerator's and the template's kernel arguments."""
    own = machine.cmdline if hardware else f"{machine.cmdline} {machine.emulated_cmdline.format(tsc_khz=tsc_khz)}"
    return f"{own} {template}".strip()


def throttle_limits(limits: HostLimits) -> dict[str, int]:
    """QEMU's bounds of one disk: a rate that holds for long, and a higher one for bursts of `BURST_S` seconds."""
    found: dict[str, int] = {}
    for name, rate in (("bps", limits.disk_mib_s << 20), ("iops", limits.disk_ops_s)):
        if rate:
            found |= {f"{name}-total": rate, f"{name}-total-max": rate * BURST, f"{name}-total-max-length": BURST_S}
    return found


def _fdset_path(fd: int) -> str:
    return f"/dev/fdset/{fd}"


def _disks(parts: Parts) -> list[str]:
    bus = parts.machine.bus
    group = {"qom-type": "throttle-group", "id": "disk-limits", "limits": throttle_limits(parts.limits)}
    argv = ["-object", json.dumps(group, separators=(",", ":"))]
    argv += ["-add-fd", f"fd={BASE_FD},set={BASE_FD},opaque=base"]
    argv += ["-blockdev", f"driver=file,node-name=base,filename={_fdset_path(BASE_FD)},read-only=on,locking=off"]
    argv += ["-blockdev", f"driver=throttle,node-name={BASE_NODE},throttle-group=disk-limits,file=base,read-only=on"]
    below = None
    last = len(parts.layers) - 1
    for number, layer in enumerate(parts.layers):
        fd, read_only = DISK_FDS + number, "off" if number == last else "on"
        name = TOP_NODE if number == last else f"layer{number}"
        argv += ["-add-fd", f"fd={fd},set={fd},opaque={name}"]
        file = f"driver=file,node-name={name}-file,filename={_fdset_path(fd)},read-only={read_only},locking=off,discard=unmap"
        node = f"driver={layer.format},node-name={name},file={name}-file,read-only={read_only},discard=unmap"
        if layer.format == "qcow2":
            # An explicit node, so that nothing that the image's header names is ever opened.
            node += f",backing={below}" if below else ""
        argv += ["-blockdev", file, "-blockdev", node]
        below = name
    argv += ["-blockdev", f"driver=throttle,node-name={DISK_NODE},throttle-group=disk-limits,file={below}"]
    argv += ["-device", f"virtio-blk-{bus},id=base-disk,drive={BASE_NODE},serial=base"]
    # An I/O error, a full host disk included, goes to the guest: a VM that stops by itself would look as if it hung.
    argv += ["-device", f"virtio-blk-{bus},id=upper-disk,drive={DISK_NODE},serial=upper,werror=report,rerror=report"]
    return argv
