"""What the build needs of the host: tools and the packages they come in, and running them so that nothing is left behind."""

import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hatchway.domain.errors import Unavailable

_TAIL_LINES = 20
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class HostPackage:
    """A package of the distribution that the host needs, the tools that it brings, and about how much disk it takes with what it pulls in (MiB)."""

    name: str
    tools: tuple[str, ...]
    size_mib: int
    why: str


_BUILD = (
    HostPackage("mmdebstrap", ("mmdebstrap",), 5, "makes the template's root tree"),
    HostPackage("erofs-utils", ("mkfs.erofs",), 1, "packs the read-only base image"),
    HostPackage("e2fsprogs", ("mke2fs", "tune2fs", "debugfs", "e2fsck"), 2, "makes the writable disk"),
    HostPackage("xz-utils", ("xz",), 1, "unpacks kernel packages"),
    HostPackage("zstd", ("zstd",), 2, "unpacks kernel packages and modules"),
    HostPackage("util-linux", ("unshare", "setpriv", "fallocate"), 5, "keeps the build in namespaces of its own"),
)
_RUN = (
    HostPackage("qemu-system-x86", ("qemu-system-x86_64",), 130, "the virtual machine monitor"),
    HostPackage("lz4", ("lz4",), 1, "unpacks the kernel for Firecracker"),
)


def required_packages() -> tuple[HostPackage, ...]:
    """Returns the distribution packages (Debian and Ubuntu names) that building and running templates need on the host."""
    return _BUILD + _RUN


def missing_packages() -> tuple[HostPackage, ...]:
    """Returns those of `required_packages` of which a tool is not installed: what a set-up script has to install."""
    return tuple(package for package in required_packages() if not all(_find(tool) for tool in package.tools))


def require_build_tools() -> None:
    """Raises `Unavailable("missing_tools")`, naming the packages to install, when a tool of the build is not there."""
    missing = [package for package in _BUILD if not all(_find(tool) for tool in package.tools)]
    if missing:
        tools = ", ".join(tool for package in missing for tool in package.tools if not _find(tool))
        names = " ".join(package.name for package in missing)
        raise Unavailable(
            "missing_tools",
            f"Building a template needs tools that this host does not have: {tools}.",
            f"Install them: apt-get install --no-install-recommends {names}",
        )


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=_SEARCH)


def run(
    argv: Sequence[str | Path],
    *,
    within_s: float,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    isolated: bool = False,
    keep_output: bool = False,
) -> str:
    """Runs a tool to its end and returns its output (standard output and error together) when `keep_output`.

    It dies with this process, whatever kills that (call it from the main thread: the kernel watches the thread that forked).
    `isolated`: in mount and PID namespaces of its own, so that its mounts and processes end with it. Raises
    `Unavailable("tool_failed")` with the last lines of the output when it fails, is not there, or needs longer than
    `within_s` seconds.
    """
    words = [os.fspath(word) for word in argv]
    command = [_SETPRIV, "--pdeathsig", "KILL", "--"]
    if isolated:
        command += [_UNSHARE, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    kept: list[str] = []
    try:
        process = subprocess.Popen(
            command + words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                "PATH": _SEARCH,
                "LC_ALL": "C.UTF-8",
                "DEBIAN_FRONTEND": "noninteractive",
                **_proxies(),
                **(env or {}),
            },
            cwd=cwd,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise Unavailable("tool_failed", f"{words[0]} cannot be started: {error}.", "Install util-linux.") from error
    late = threading.Event()

    def expire() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(within_s, expire)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.rstrip()
            tail.append(text)
            if keep_output:
                kept.append(line)
            if on_line is not None:
                on_line(text)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        # Everything that it started is gone once nobody holds the pipe any more.
        assert process.stdout is not None
        process.stdout.read()
        process.stdout.close()
        process.wait()
    if late.is_set() or process.returncode != 0:
        how = f"did not end within {within_s:.0f} s" if late.is_set() else f"ended with status {process.returncode}"
        last = "\n".join(line for line in tail if line)
        raise Unavailable(
            "tool_failed",
            f"{Path(words[0]).name} {how}. Its last lines:\n{last}",
            "Look at the lines above: mostly a package mirror that does not answer, or a full disk.",
        )
    return "".join(kept)


_SETPRIV = _find("setpriv") or "/usr/bin/setpriv"
_UNSHARE = _find("unshare") or "/usr/bin/unshare"


def _proxies() -> dict[str, str]:
    """The build may need the host's proxies to reach its mirrors; nothing of this ends up in an image."""
    names = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
    return {key: value for name in names for key, value in os.environ.items() if key.lower() == name}
