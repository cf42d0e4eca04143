"""The template's root tree: the distribution's packages, made by mmdebstrap, and packed into a read-only image."""

import re
import uuid
from pathlib import Path

from hatchway.domain.errors import Unavailable
from hatchway.node.images import host
from hatchway.node.images.apt import Apt
from hatchway.node.images.progress import BuildProgress, Report

PACKAGES = (
    "bash",
    "ca-certificates",
    "coreutils",
    "curl",
    "git",
    "iproute2",
    "less",
    "libnss-myhostname",
    "ncurses-bin",
    "netbase",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "sudo",
    "unzip",
    "xz-utils",
)
"""What `seed` has besides the distribution's required packages."""

_LEFT_OUT = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-include=/usr/share/doc/apt",
    "path-include=/usr/share/doc/apt/examples",
    "path-include=/usr/share/doc/apt/examples/*sources*",
)

_FINISH = Path(__file__).with_name("seed_root.sh")
_WHEELS = Path(__file__).with_name("seed_wheels.py")
_WITHIN_S = 3600.0
_PACK_S = 600.0

_STEPS = {
    "running apt-get update": 0.02,
    "downloading packages": 0.05,
    "extracting archives": 0.35,
    "installing essential packages": 0.45,
    "downloading apt": 0.55,
    "installing apt": 0.55,
    "installing remaining packages": 0.6,
    "running --customize-hook": 0.95,
    "cleaning package lists": 0.97,
}


def recipe_text() -> str:
    """Returns all that the tree is made by, for the key of the cache."""
    return "\n".join((*PACKAGES, *_LEFT_OUT, *(path.read_text(encoding="utf-8") for path in (_FINISH, _WHEELS))))


def make_tree(root: Path, work: Path, apt: Apt, epoch: int, report: Report) -> tuple[str, ...]:
    """Makes the root tree in the folder `root`, which must not exist; `work` is for temporary files.

    `epoch` (Unix seconds) is the newest time that files get. Returns the packages with their versions. Raises `Unavailable`.
    """
    options = work / "transport.conf"
    options.write_text(apt.transport_options(), encoding="utf-8")
    credentials = Path("/etc/apt/auth.conf.d")
    command: list[str | Path] = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    command += ["--architectures=amd64", f"--include={','.join(PACKAGES)}", f"--aptopt={options}"]
    command += [f"--dpkgopt={option}" for option in _LEFT_OUT]
    if credentials.is_dir() and any(credentials.iterdir()):
        command += [f'--setup-hook=mkdir -p "$1/etc/apt/auth.conf.d" && cp {credentials}/* "$1/etc/apt/auth.conf.d/"']
    command += [f'--customize-hook=sh {_FINISH} "$1"', apt.distribution.codename, root, apt.sources_file]
    shown = _Steps(report)
    host.run(
        command,
        within_s=_WITHIN_S,
        on_line=shown.line,
        env={"SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": str(work)},
        isolated=True,
    )
    return _installed(root)


class _Steps:
    """Turns mmdebstrap's lines into progress."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._fraction = 0.0
        self._message = "Starting"

    def line(self, line: str) -> None:
        if line.startswith("I: "):
            self._message = line[3:].rstrip(".")
            step = next((value for key, value in _STEPS.items() if self._message.startswith(key)), 0.0)
            self._fraction = max(self._fraction, step)
        elif match := re.match(r"(Unpacking|Setting up) ([^ ]+)", line):
            self._message = f"{match[1]} {match[2]}"
        elif match := re.match(r"Get:\d+ .* ([^ ]+) [^ ]+ [^ ]+ \[.*\]$", line):
            self._message = f"Downloading {match[1]}"
        else:
            return
        self._report(BuildProgress(phase="root_tree", fraction=self._fraction, message=self._message))


def _installed(root: Path) -> tuple[str, ...]:
    text = (root / "var/lib/dpkg/status").read_text(encoding="utf-8")
    found = re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", text, re.MULTILINE)
    if not found:
        raise Unavailable("tool_failed", "mmdebstrap made a tree without packages.", "Try again.")
    return tuple(sorted(f"{name} {version}" for name, version in found))


def pack(root: Path, image: Path, epoch: int) -> None:
    """Packs a root tree into an erofs image: uncompressed, because that is read fastest and its pages are shared by all sandboxes.

    Modification times are kept (Python's compiled files are bound to them), bounded by `epoch`; the same tree gives the same
    image. Raises `Unavailable`.
    """
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, "base.template.hatchway.example")
    host.run(
        ["mkfs.erofs", "--quiet", "-U", str(identity), image, root],
        within_s=_PACK_S,
        env={"SOURCE_DATE_EPOCH": str(epoch)},
    )
