"""Which machine monitor an installation uses: the operator's choice. docs/installation.md explains it."""

from typing import Annotated, Literal

import msgspec

DriverName = Literal["auto", "qemu", "firecracker"]


class VmmPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `vmm` of the settings file."""

    driver: DriverName = "auto"
    """`auto`: Firecracker where it is installed and KVM runs guests, else QEMU; once sandboxes were made, what they were made with."""
    firecracker: Annotated[str, msgspec.Meta(pattern="^/", max_length=4096)] | None = None
    """File of the program, where it is not on PATH."""
    allow_advisories: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ()
    """Names of advisories that the operator accepts: a Firecracker behind any other one is refused."""


DEFAULT = VmmPolicy()
