"""The guest's kernel: the newest one that the distribution packages for virtual machines, taken out of its package, not installed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hatchway.domain.errors import Unavailable
from hatchway.node.images import host
from hatchway.node.images.apt import Apt

_META = {
    "debian": ("linux-image-cloud-amd64", "linux-image-amd64"),
    "ubuntu": ("linux-image-kvm", "linux-image-virtual", "linux-image-generic"),
}
_PARTS = re.compile(r"linux-(image|modules|binary|base)-(unsigned-)?\d[A-Za-z0-9.+~-]*")
_UNPACK_S = 300.0


@dataclass(frozen=True)
class KernelPackages:
    """The packages that hold a kernel and its modules: what the lookup found. `version` is the package version."""

    names: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Kernel:
    """A kernel that was unpacked: its release name, the bootable file, and its folder of modules."""

    release: str
    image: Path
    modules: Path


def find(apt: Apt) -> KernelPackages:
    """Looks up the newest kernel for virtual machines in the package index.

    Debian: what `linux-image-cloud-amd64` depends on, unsigned where there is such a package (nothing checks the signature). Ubuntu, best effort: the first
    of `linux-image-kvm`, `-virtual`, `-generic`, with its package of modules. Raises `Unavailable("no_kernel_package")`.
    """
    for meta in _META[apt.distribution.id]:
        fields = apt.show(meta)
        if fields is None:
            continue
        names: list[str] = []
        version = fields["Version"]
        pending = _named(fields)
        while pending and len(names) < 8:
            name = pending.pop(0)
            unsigned = apt.show(f"{name}-unsigned")
            chosen, found = (f"{name}-unsigned", unsigned) if unsigned else (name, apt.show(name))
            if found is None or chosen in names:
                continue
            names.append(chosen)
            version = found["Version"]
            pending += _named(found)
        if names:
            return KernelPackages(tuple(names), version)
    raise Unavailable(
        "no_kernel_package",
        f"The archives of {apt.distribution.name} have none of {', '.join(_META[apt.distribution.id])}.",
        "Add the distribution's main archive to the host's package sources.",
    )


def _named(fields: dict[str, str]) -> list[str]:
    words = re.split(r"[,|]", fields.get("Depends", "") + "," + fields.get("Pre-Depends", ""))
    names = [word.split("(")[0].split(":")[0].strip() for word in words]
    return [name for name in names if _PARTS.fullmatch(name)]


def unpack(apt: Apt, packages: KernelPackages, folder: Path, on_line: Callable[[str], None]) -> tuple[Kernel, int]:
    """Downloads and unpacks the packages into `folder`; returns the kernel and the octets downloaded. Raises `Unavailable`."""
    size = 0
    for name in packages.names:
        package = apt.download(name, on_line)
        size += package.stat().st_size
        host.run(["dpkg-deb", "--extract", package, folder], within_s=_UNPACK_S)
        package.unlink()
    images = sorted((folder / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise Unavailable(
            "bad_kernel_package", f"{' '.join(packages.names)}: {len(images)} kernels in it.", "Build again."
        )
    release = images[0].name.removeprefix("vmlinuz-")
    for modules in (folder / "lib/modules" / release, folder / "usr/lib/modules" / release):
        if modules.is_dir():
            return Kernel(release, images[0], modules), size
    raise Unavailable("bad_kernel_package", f"{' '.join(packages.names)}: no modules for {release}.", "Build again.")
