"""A slot's network as the launcher makes it, with a guest's namespace in the place of the VM: rules, listeners and TPROXY are the real ones.

`Slot` needs root. Sockets of the guest's side are made in its namespace by a thread that ends, and are then used like any other.
"""

import ctypes
import os
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable
from typing import TypeVar

from hatchway.launcher.network import find_nft
from hatchway.launcher.ruleset import DNS_TCP_PORT, DNS_UDP_PORT, GATEWAY_MAC, GUEST_MAC, MARK, RULESET, TCP_PORT
from hatchway.wire.egress import GATEWAY_ADDRESS, GUEST_ADDRESS

T = TypeVar("T")

_IP_TRANSPARENT, _IP_RECVORIGDSTADDR = 19, 20
_libc = ctypes.CDLL(None, use_errno=True)


def lacking() -> str:
    """What this machine lacks for it; empty when nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: that a flow is bound by the address it was sent to was not shown"
    if not find_nft():
        return "there is no nft: that a flow is bound by the address it was sent to was not shown"
    return ""


class Slot:
    """Two namespaces joined by a link: the slot's, with rules and without a way out, and the guest's."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex[:10]
        self._slot, self._guest = f"hwt-s{name}", f"hwt-g{name}"
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for namespace in (self._slot, self._guest):
            _run("ip", "netns", "add", namespace)
        script = f"link add tap0 netns {self._slot} address {GATEWAY_MAC} type veth peer name eth0 netns {self._guest} address {GUEST_MAC}\n"
        _run("ip", "-batch", "-", stdin=script)
        self.in_slot(
            lambda: [_sysctl(*pair) for pair in (("all/rp_filter", 1), ("default/rp_filter", 1), ("tap0/rp_filter", 1))]
        )
        _run("ip", "netns", "exec", self._slot, find_nft(), "-f", "-", stdin=RULESET)
        _run(
            "ip", "-n", self._slot, "-batch", "-",
            stdin=f"link set lo up\naddr add {GATEWAY_ADDRESS}/24 dev tap0\nlink set tap0 up\n"
            f"rule add fwmark {MARK} lookup 100\nroute add local default dev lo table 100\n",
        )  # fmt: skip
        _run(
            "ip", "-n", self._guest, "-batch", "-",
            stdin=f"link set lo up\naddr add {GUEST_ADDRESS}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY_ADDRESS}\n",
        )  # fmt: skip

    def close(self) -> None:
        """Removes both; may be repeated."""
        for namespace in (self._guest, self._slot):
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)

    def listeners(self) -> list[socket.socket]:
        """The three listeners of `wire.egress.LISTENERS`."""

        def make() -> list[socket.socket]:
            made = []
            for kind, port in (
                (socket.SOCK_STREAM, TCP_PORT),
                (socket.SOCK_DGRAM, DNS_UDP_PORT),
                (socket.SOCK_STREAM, DNS_TCP_PORT),
            ):
                sock = socket.socket(socket.AF_INET, kind)
                sock.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
                if kind == socket.SOCK_DGRAM:
                    sock.setsockopt(socket.SOL_IP, _IP_RECVORIGDSTADDR, 1)
                else:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("0.0.0.0", port))
                if kind == socket.SOCK_STREAM:
                    sock.listen(512)
                made.append(sock)
            return made

        return self.in_slot(make)

    def guest_socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of the guest."""
        sock = self.in_guest(lambda: socket.socket(socket.AF_INET, kind))
        sock.setblocking(False)
        return sock

    def in_slot(self, call: Callable[[], T]) -> T:
        """Calls in the slot's namespace."""
        return within(self._slot, call)

    def in_guest(self, call: Callable[[], T]) -> T:
        """Calls in the guest's namespace."""
        return within(self._guest, call)

    def guest_command(self, *argv: str) -> list[str]:
        """A command line that runs in the guest's namespace."""
        return ["ip", "netns", "exec", self._guest, *argv]


def within(namespace: str, call: Callable[[], T]) -> T:
    """Calls in a named network namespace, on a thread of its own; sockets that it makes stay there."""
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            if _libc.setns(fd, 0x40000000) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            done.append(call())
        except BaseException as error:
            failed.append(error)
        finally:
            os.close(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _sysctl(name: str, value: int) -> None:
    with open(f"/proc/sys/net/ipv4/conf/{name}", "w", encoding="ascii") as file:
        file.write(str(value))


def _run(*argv: str, stdin: str = "") -> None:
    done = subprocess.run(argv, input=stdin, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
