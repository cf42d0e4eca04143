"""Releases of QEMU with known holes in the devices that sandboxes have.

A short list kept by hand: only what a guest can reach through virtio-blk, -net, -serial, -rng and the machine itself. Distributions
that fix holes without changing the version are right to be trusted more than this list, so that it warns and refuses nothing.
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
