"""What the readers of configurations may look at: files, environment, and what the tools themselves say."""

import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

MAX_FILE = 1024 * 1024
PATIENCE_S = 20.0


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """A place that packages are read from."""

    tool: str
    url: str
    """As it was configured: it may hold a user and a password, which go no further."""
    source: str
    """Where it was said."""
    paths: tuple[str, ...] | None = None
    """Below the URL's path, with stars; None: all of it."""
    git: bool = False
    encoded_slash: bool = False
    needs_credential: bool = False
    """The configuration has a credential for it."""


class Found(msgspec.Struct, kw_only=True):
    """What one tool's configuration says."""

    tool: str
    indices: list[Index]
    notes: list[str]


def _addresses(host: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError):
        return []


class Machine:
    """This machine, or one that a test made."""

    def __init__(
        self,
        *,
        environment: dict[str, str],
        root: Path = Path("/"),
        project: Path | None = None,
        addresses: Callable[[str], list[str]] = _addresses,
    ) -> None:
        self.environment = environment
        self.root = root
        self.project = project
        self.addresses = addresses
        """Where a name is, as this machine sees it; empty when that is not known."""
        self.home = Path(environment.get("HOME", "/nonexistent"))

    def system(self, path: str) -> Path:
        """A file of the system."""
        return self.root / path.lstrip("/")

    def config(self, name: str) -> Path:
        """A file of the user's configuration."""
        return Path(self.environment.get("XDG_CONFIG_HOME") or self.home / ".config") / name

    def text(self, path: Path) -> str | None:
        """What is in a file; None where it is not there, or too large to be a configuration."""
        try:
            with path.open("rb") as file:
                octets = file.read(MAX_FILE + 1)
        except OSError:
            return None
        return None if len(octets) > MAX_FILE else octets.decode("utf-8", "replace")

    def toml(self, path: Path) -> dict[str, Any]:
        """The same of TOML; empty where it is not valid."""
        try:
            return tomllib.loads(self.text(path) or "")
        except tomllib.TOMLDecodeError:
            return {}

    def ask(self, *argv: str) -> str | None:
        """What a tool prints; None where it is not installed, fails, or takes longer than 20 s."""
        program = shutil.which(argv[0], path=self.environment.get("PATH", ""))
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *argv[1:]],
                env=self.environment,
                cwd=self.project or self.home if (self.project or self.home).is_dir() else "/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
