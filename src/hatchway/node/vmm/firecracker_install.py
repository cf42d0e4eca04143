"""Finds the Firecracker of this host, and refuses one that is too old or has a known hole."""

import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hatchway.node.vmm import advisories
from hatchway.node.vmm.seam import VmmError, VmmMissing

_VERSION = re.compile(r"^(?:Firecracker|Jailer) v(\d+\.\d+\.\d+)\b", re.MULTILINE)


class FirecrackerRefused(VmmError):
    """The release is behind an advisory that the configuration does not allow, or too old for the driver."""


@dataclass(frozen=True)
class Installed:
    """A Firecracker, or its jailer, that is installed on this host."""

    binary: Path
    version: str
    """For example `1.12.1`."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version as numbers."""
        return tuple(int(part) for part in self.version.split("."))


def find(configured: Path | None = None, *, path: str | None = None, program: str = "firecracker") -> Installed:
    """Finds the program where the configuration says, else on `path` (default: the environment's).

    Raises `VmmMissing` when it is not there, `VmmError` when it does not run or does not say its version.
    """
    if configured is not None and not configured.is_file():
        raise VmmMissing(f"There is no {program} at {configured}, which the configuration names.")
    found = str(configured) if configured is not None else shutil.which(program, path=path)
    if found is None:
        raise VmmMissing(
            f"{program} is not installed. Put a static build of a release into a folder of PATH, "
            'or name it: `firecracker = "/FILE"` in [vmm] of hatchway.toml.'
        )
    binary = Path(found).resolve()
    try:
        done = subprocess.run(
            [str(binary), "--version"], capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError) as error:
        raise VmmError(f"{binary} does not run: {error}") from error
    version = _VERSION.search(done.stdout)
    if version is None:
        raise VmmError(f"{binary} does not say its version as a release of {program} does.")
    return Installed(binary, version[1])


def check(installed: Installed, allowed: Collection[str] = (), *, program: str = "firecracker") -> None:
    """Raises `FirecrackerRefused` for a release that may not be used; `allowed` are names of advisories that the operator accepts."""
    oldest = ".".join(map(str, advisories.MIN_FIRECRACKER))
    if installed.numbers < advisories.MIN_FIRECRACKER:
        raise FirecrackerRefused(f"{program} {installed.version} is older than {oldest}: install a newer release.")
    for hole in advisories.holes(installed.version, program):
        if hole.name not in allowed:
            raise FirecrackerRefused(
                f"{program} {installed.version} is behind {hole.name} ({hole.what}). Install a release without it ({hole.fixed}), "
                f'or accept it: `allow_advisories = ["{hole.name}"]` in [vmm] of hatchway.toml.'
            )
