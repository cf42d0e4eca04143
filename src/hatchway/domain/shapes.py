"""The size of a sandbox and its bounds."""

import msgspec

MIN_VCPUS, MAX_VCPUS = 1, 32
MIN_MEMORY_MIB, MAX_MEMORY_MIB = 128, 262_144
MIN_DISK_MIB, MAX_DISK_MIB = 512, 1_048_576
DEFAULT_VCPUS = 1
DEFAULT_MEMORY_MIB = 512
DEFAULT_DISK_MIB = 4_096


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is given: virtual CPUs, memory in MiB, size of its writable disk in MiB."""

    vcpus: int = DEFAULT_VCPUS
    memory_mib: int = DEFAULT_MEMORY_MIB
    disk_mib: int = DEFAULT_DISK_MIB
