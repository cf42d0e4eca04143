"""Starts the launcher: checks the ground, enters a user namespace when it is not root, adopts, serves."""

import fcntl
import os
import resource
import socket
import stat
import sys

if __name__ == "__main__":
    # msgspec would load it where it is installed, and through it `inspect` and `ast`: 1.2 MiB, for forms of types that are not used here.
    sys.modules.setdefault("typing_extensions", None)  # type: ignore[arg-type]  # None: an import of it fails at once

from hatchway.launcher import folders
from hatchway.launcher.cgroups import Cgroups
from hatchway.launcher.errors import Unfit
from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop
from hatchway.launcher.network import MODULES, Rules, find_nft
from hatchway.launcher.options import Options, parse
from hatchway.launcher.server import Server
from hatchway.launcher.stock import Stock
from hatchway.launcher.vms import Vms
from hatchway.wire.launcher import HelloAnswer

SOCKET = "launcher.sock"
ALIVE_EVERY_S = 5.0


def main(words: list[str]) -> int:
    """Runs until SIGTERM; returns the exit code."""
    try:
        options = parse(words)
        if options.outer_uid is None:
            folders.check(options.run_dir)
            _check_shim(options.shim)
            if os.geteuid() != 0:
                _enter_user_namespace(options.shim, words)
        return _serve(options)
    except Unfit as error:
        sys.stderr.write(f"hatchway-launcher: {error}\n")
        return 1


def _check_shim(path: str) -> None:
    try:
        info = os.stat(path)
    except OSError as error:
        raise Unfit(f"{path}: {error.strerror}. Build it: make -C shim") from error
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
        raise Unfit(f"{path} is not a program")
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise Unfit(
            f"{path} can be exchanged by others: it must be owned by root or the invoking user, and not be writable by others"
        )


def _enter_user_namespace(shim: str, words: list[str]) -> None:
    """Executes this program again as root of a user namespace. Comes back only by `Unfit`."""
    command = [shim, "--userns-exec", sys.executable, *sys.orig_argv[1:], "--in-user-namespace", str(os.geteuid())]
    if (fd := _listen_fd(words)) is not None:
        os.set_inheritable(fd, True)
    try:
        os.execv(shim, command)
    except OSError as error:
        raise Unfit(f"{shim}: {error.strerror}") from error


def _listen_fd(words: list[str]) -> int | None:
    return int(words[words.index("--listen-fd") + 1]) if "--listen-fd" in words else None


def _lock(run: folders.RunFolder) -> int:
    fd = os.open("launcher.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=run.fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Unfit("another launcher serves this run folder") from error
    return fd


def _tun() -> str:
    """Returns why VMs can have no network here; empty when they can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}: VMs have no network. Load the tun module; when not root: chmod 0666 /dev/net/tun"
    return ""


def _rules(shim: str, warnings: list[str]) -> Rules | None:
    """Returns what slots' networks are made with; None, and a warning that says why, where VMs can have none."""
    lack = _tun()
    if not lack and not (nft := find_nft()):
        lack = "nft is not installed: VMs have no network. Install the package nftables"
    if not lack:
        rules = Rules(shim, nft)
        if not (why := rules.lack()):
            return rules
        lack = f"VMs have no network: {why}. {MODULES}"
    warnings.append(lack)
    return None


def _peers(options: Options, warnings: list[str]) -> set[int]:
    if options.outer_uid is None:
        return {os.geteuid(), *options.peer_uids}
    others = set(options.peer_uids) - {options.outer_uid}
    if others:
        warnings.append(f"without root only uid {options.outer_uid} can be served; not {sorted(others)}")
    return {0}


def _serve(options: Options) -> int:
    # One descriptor per VM stays open here. What is executed from here sets its own bound.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loop = Loop()
    run = folders.RunFolder(options.run_dir)
    _lock(run)
    warnings: list[str] = []
    rootless = options.outer_uid is not None
    if rootless:
        warnings.append(
            "without root all VMs run as your own user, apart by namespaces only. Run as root for a user of its own per VM"
        )
    rules = _rules(options.shim, warnings)
    cgroups = Cgroups(run.instance, memory_mib=options.memory_mib)
    if cgroups.warning:
        warnings.append(cgroups.warning)
    peers = _peers(options, warnings)
    stock = Stock(loop, cgroups, options.shim, options.slots, options.stock, rules)
    vms = Vms(loop, run, stock, options, rules)
    vms.adopt()
    for slot in cgroups.leftovers() - vms.slots:
        stock.reserve(slot)
        cgroups.slot(slot).kill()
        stock.release(slot)
    owner = options.peer_uids[0] if options.peer_uids and not rootless else None
    if options.listen_fd is not None:
        listener = socket.socket(fileno=options.listen_fd)
        listener.set_inheritable(False)
    else:
        listener = folders.bind(run.fd, SOCKET, socket.SOCK_SEQPACKET, 32, owner)
    hello = HelloAnswer(
        rootless=rootless,
        network=rules is not None,
        cgroups=cgroups.version,
        io_limits=cgroups.io,
        warnings=tuple(warnings),
    )
    server = Server(loop, listener, vms, hello, peers)
    for text in warnings:
        say(text, level="warning")
    stock.plan(0.0)
    _say_alive(loop)
    loop.run()
    server.close()
    vms.close()
    stock.close()
    cgroups.close()
    return 0


def _say_alive(loop: Loop) -> None:
    """Tells who started us that requests are served, from now on and again every few seconds: an octet into the descriptor that HATCHWAY_READY_FD names."""
    if not (fd := os.environ.get("HATCHWAY_READY_FD", "")).isdecimal():
        return
    writing = int(fd)
    os.set_inheritable(writing, False)
    os.set_blocking(writing, False)

    def say() -> None:
        try:
            os.write(writing, b"1")
        except BlockingIOError:  # nobody has listened for long
            pass
        except OSError:  # nobody listens any more
            os.close(writing)
            return
        loop.later(ALIVE_EVERY_S, say)

    say()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
