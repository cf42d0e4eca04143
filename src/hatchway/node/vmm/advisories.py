"""Releases of QEMU and Firecracker with known holes.

A short list kept by hand: of QEMU only what a guest can reach through virtio-blk, -net, -serial, -rng and the machine itself. Distributions
that fix holes without changing the version are right to be trusted more than this list, so that it warns and refuses nothing. Firecracker has
no distribution behind it: its version says what is in it, and a release with a listed hole is refused unless the operator allows the
hole by its name.
"""

from dataclasses import dataclass

MIN_SERIES = (7, 2)
"""The oldest series that the driver is written for."""


@dataclass(frozen=True)
class Advisory:
    """One hole; `fixed` maps a series to its first release without it. Series after the last named one never had it."""

    name: str
    what: str
    fixed: dict[tuple[int, int], tuple[int, ...]]


ADVISORIES: tuple[Advisory, ...] = (
    Advisory(
        "CVE-2023-6693",
        "stack overflow in virtio-net when a guest sends a crafted packet header",
        {(7, 2): (7, 2, 9), (8, 0): (8, 1), (8, 1): (8, 1, 5), (8, 2): (8, 2, 1)},
    ),
    Advisory(
        "CVE-2024-3446",
        "use after free through re-entrant DMA in virtio-serial",
        {(7, 2): (7, 2, 11), (8, 0): (8, 2, 3), (8, 1): (8, 2, 3), (8, 2): (8, 2, 3)},
    ),
)


def affecting(version: str) -> tuple[Advisory, ...]:
    """Returns the advisories that this version is behind, for example of `7.2.10`. Raises `ValueError` when it is no version."""
    numbers = tuple(int(part) for part in version.split("."))
    series = numbers[:2]
    return tuple(
        advisory
        for advisory in ADVISORIES
        if series <= max(advisory.fixed) and numbers < advisory.fixed.get((series[0], series[1]), max(advisory.fixed))
    )


MIN_FIRECRACKER = (1, 12)
"""The oldest release that the driver is written for and tested with."""


@dataclass(frozen=True)
class Holed:
    """One hole of Firecracker or its jailer; `releases` are ranges, both ends included."""

    name: str
    what: str
    releases: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    program: str = "firecracker"
    """`firecracker` or `jailer`."""
    fixed: str = ""
    """The releases that have it no more, for people."""


FIRECRACKER: tuple[Holed, ...] = (
    # It needs the PCI transport, which is never switched on here. Refused all the same: the list is not to depend on one argument.
    Holed(
        "CVE-2026-5747",
        "out-of-bounds write by a guest's root through the virtio PCI transport",
        (((1, 13, 0), (1, 14, 3)), ((1, 15, 0), (1, 15, 0))),
        fixed="1.14.4, 1.15.1",
    ),
    Holed(
        "CVE-2026-1386",
        "the jailer follows symbolic links of a local user in a folder that was made for it",
        (((0, 0, 0), (1, 13, 1)), ((1, 14, 0), (1, 14, 0))),
        program="jailer",
        fixed="1.13.2, 1.14.1",
    ),
)


def holes(version: str, program: str = "firecracker") -> tuple[Holed, ...]:
    """Returns the holes of a release of Firecracker or its jailer, for example of `1.12.1`. Raises `ValueError` when it is no version."""
    numbers = tuple(int(part) for part in version.split("."))
    return tuple(
        hole
        for hole in FIRECRACKER
        if hole.program == program and any(first <= numbers <= last for first, last in hole.releases)
    )
