"""The network of one VM as the launcher holds it: the gateway's sockets, the counters of what was dropped, and the watch over its rules.

The shim makes all of it (`shim/network.c`) and keeps duplicates, so that connections wait in the sockets whoever is gone. All that is
done here is done through these sockets, which belong to the VM's namespace wherever they are: the launcher never enters it.
"""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop
from hatchway.launcher.ruleset import GUEST_MAC, PREFIX, RULESET, TAP
from hatchway.wire.egress import GUEST_ADDRESS

HELD = 4
"""Descriptors: TCP, DNS over UDP, DNS over TCP (`wire.egress.LISTENERS`), and a netfilter socket that hears of changes of the rules."""
NFT_PLACES = ("/usr/sbin/nft", "/sbin/nft", "/usr/bin/nft", "/usr/local/sbin/nft")
NFT_WITHIN_S = 10.0
MAX_RESTORES = 5
"""In `RESTORES_WITHIN_S`. Somebody who goes on changing the rules is not answered for ever: the network stays down."""
RESTORES_WITHIN_S = 60.0
MODULES = (
    "The kernel needs nf_tables with its netdev and tproxy parts: modprobe -a tun nft_tproxy nft_reject_ipv4 nft_limit."
)
FETCH_WITHIN_S = 10.0
FETCH_RETRY_S = 0.05
CHECK_EVERY_S = 5.0
"""A change is heard of at once; this is for the one whose message was lost."""

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSARP, _SIOCGSKNS = 0x8913, 0x8914, 0x8955, 0x894C
_IFF_UP = 1
_ATF_COM, _ATF_PERM = 2, 4
_NFNL_NFTABLES, _NEWGEN, _GETGEN, _NEWOBJ, _GETOBJ = 10 << 8, 15, 16, 18, 19
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _DUMP = 1, 0x300
_HEAD = struct.Struct("=IHHII")
_MAX_ROUNDS = 64


class Lost(Exception):
    """The network cannot be used; the text says why."""


def find_nft() -> str:
    """Returns the path of nft; empty when there is none that root alone can exchange."""
    for place in NFT_PLACES:
        path = Path(place)
        try:
            real = path.resolve(strict=True)
            info = real.stat()
        except OSError:
            continue
        # In a user namespace root's files show as nobody's: what counts is that nobody else may write it.
        if os.access(real, os.X_OK) and not info.st_mode & 0o022:
            return str(real)
    return ""


class Rules:
    """The rules of a slot, in a file in memory that nobody can change, and what they are applied with."""

    def __init__(self, shim: str, nft: str) -> None:
        self.nft = nft
        self._shim = shim
        self._file = os.memfd_create("rules", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self._file, RULESET.encode())
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)

    def open(self) -> int:
        """Returns the file, with a position of its own. Raises `OSError`."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def lack(self) -> str:
        """Tries them once; returns why slots can have no network here, empty when they can."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = -1
        try:
            file = self.open()
            os.set_inheritable(file, True)
            theirs.set_inheritable(True)
            words = ["hatchway-shim", "--park", "--report-fd", str(theirs.fileno())]
            words += ["--network", "--rules-fd", str(file), "--nft", self.nft]
            pid = os.posix_spawn(self._shim, words, {}, setsigmask=[])
            theirs.close()
            ours.settimeout(NFT_WITHIN_S)
            try:
                text, fds, _, _ = socket.recv_fds(ours, 1024, HELD, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                text, fds = b"it did not end", []
            for fd in fds:
                os.close(fd)
            if text != b"parked":
                os.kill(pid, signal.SIGKILL)
            ours.close()
            os.waitpid(pid, 0)
            return "" if text == b"parked" else text.decode(errors="replace").removeprefix("error=")
        except OSError as error:
            return f"{self._shim}: {error.strerror}"
        finally:
            theirs.close()
            ours.close()
            if file >= 0:
                os.close(file)

    def apply(self, network: "Network") -> int:
        """Starts nft on them, in the network's namespace; returns its pidfd. Raises `OSError`."""
        namespace = rules = -1
        try:
            namespace = network.namespace()
            rules = self.open()
            os.set_inheritable(namespace, True)
            words = ["hatchway-shim", "--netns-exec", str(namespace), self.nft, "-f", "-"]
            pid = os.posix_spawn(self._shim, words, {}, file_actions=[(os.POSIX_SPAWN_DUP2, rules, 0)], setsigmask=[])
            return os.pidfd_open(pid)
        finally:
            for fd in (namespace, rules):
                if fd >= 0:
                    os.close(fd)


class Network:
    """The sockets of one slot, which are its own; `close` when the VM is forgotten."""

    def __init__(self, fds: list[int]) -> None:
        if len(fds) != HELD:
            for fd in fds:
                os.close(fd)
            raise Lost(f"{len(fds)} descriptors came from the shim, not {HELD}")
        self.listeners: tuple[int, ...] = tuple(fds[:3])
        self._udp = fds[1]
        self._netfilter = socket.socket(fileno=fds[3])
        self._netfilter.setblocking(False)
        self._sequence = 1

    @property
    def watched(self) -> int:
        """The descriptor that is readable when the rules changed."""
        return self._netfilter.fileno()

    def close(self) -> None:
        """Lets go of all. May be repeated."""
        for fd in self.listeners:
            os.close(fd)
        self.listeners = ()
        self._netfilter.close()

    def namespace(self) -> int:
        """Returns a descriptor of the namespace."""
        return fcntl.ioctl(self._udp, _SIOCGSKNS, 0)

    def state_of_rules(self) -> int:
        """Returns the number that the kernel gives to the present state of the rules: every change makes another. Raises `Lost`."""
        for kind, payload in self._ask(_GETGEN, 0):
            if kind == _NFNL_NFTABLES | _NEWGEN:
                for name, value in _attributes(payload[4:]):
                    if name == 1:
                        return int.from_bytes(value, "big")
        raise Lost("the kernel does not tell the state of the rules")

    def drain(self) -> None:
        """Reads away what was told of changes."""
        for _ in range(_MAX_ROUNDS):
            try:
                if not self._netfilter.recv(65_536):
                    return
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # more was told than fits: the number tells the same
                    raise

    def dropped(self) -> dict[str, int]:
        """Returns the packets that each counter of the rules counted. Raises `Lost`."""
        found: dict[str, int] = {}
        for kind, payload in self._ask(_GETOBJ, _DUMP):
            if kind != _NFNL_NFTABLES | _NEWOBJ:
                continue
            attributes = dict(_attributes(payload[4:]))
            name = attributes.get(2, b"").rstrip(b"\0").decode("ascii", "replace")
            packets = dict(_attributes(attributes.get(4, b""))).get(2, b"")
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] = int.from_bytes(packets, "big")
        return found

    def down(self) -> None:
        """Sets the tap down: nothing goes in or out. Raises `OSError`."""
        self._flags(0)

    def up(self) -> None:
        """Sets the tap up, with the guest's neighbour entry, which went when it was set down. Raises `OSError`."""
        self._flags(_IFF_UP)
        entry = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(GUEST_ADDRESS))
        entry += struct.pack("=H6s8x", 1, bytes.fromhex(GUEST_MAC.replace(":", "")))
        entry += struct.pack("=i16x16s", _ATF_COM | _ATF_PERM, TAP.encode())
        fcntl.ioctl(self._udp, _SIOCSARP, entry)

    def is_up(self) -> bool:
        """Tells whether the tap is up. Raises `OSError`."""
        return bool(self._read_flags() & _IFF_UP)

    def _read_flags(self) -> int:
        answer = fcntl.ioctl(self._udp, _SIOCGIFFLAGS, struct.pack("=16sH22x", TAP.encode(), 0))
        return int(struct.unpack_from("=H", answer, 16)[0])

    def _flags(self, up: int) -> None:
        flags = self._read_flags() & ~_IFF_UP | up
        fcntl.ioctl(self._udp, _SIOCSIFFLAGS, struct.pack("=16sH22x", TAP.encode(), flags))

    def _ask(self, kind: int, flags: int) -> Iterator[tuple[int, bytes]]:
        """One request to nf_tables, and the messages that answer it: the kernel has them ready when the request was taken."""
        self._sequence += 1
        sequence = os.getpid() << 8 & 0x7FFF_FF00 | self._sequence & 0xFF
        message = _HEAD.pack(_HEAD.size + 4, _NFNL_NFTABLES | kind, _REQUEST | flags, sequence, 0) + bytes(4)
        self.drain()
        try:
            self._netfilter.send(message)
            for _ in range(_MAX_ROUNDS):
                for answered, number, payload in _messages(self._netfilter.recv(65_536)):
                    if number != sequence:
                        continue  # of a change
                    if answered == _NLMSG_DONE:
                        return
                    if answered == _NLMSG_ERROR:
                        raise Lost(f"netfilter: {os.strerror(-int.from_bytes(payload[:4], 'little', signed=True))}")
                    yield answered, payload
                    if not flags:
                        return
        except OSError as error:
            raise Lost(f"netfilter: {error.strerror}") from error


def _messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, sequence and payload of the messages of a netlink datagram."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind, _, sequence, _ = _HEAD.unpack_from(data, at)
        if length < _HEAD.size:
            return
        yield kind, sequence, data[at + _HEAD.size : at + length]
        at += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of netlink attributes."""
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + length]
        at += (length + 3) & ~3


class Watch:
    """Sees to it that a VM's network has its rules or is down: a change by anybody sets the tap down at once, then they are put back.

    `changed(state)` is called when the rules are in force again under another number.
    """

    def __init__(
        self, loop: Loop, network: Network, state: int, rules: Rules, name: str, changed: Callable[[int], None]
    ) -> None:
        self.network = network
        self.restored = 0
        self.lost = ""
        """Why the network is down for good; empty while it is not."""
        self._loop = loop
        self._state = state
        self._rules = rules
        self._name = name
        self._changed = changed
        self._pidfd = -1
        self._times: list[float] = []
        self._closed = False
        loop.watch(network.watched, self.check)
        self.check()
        self._again()

    def close(self) -> None:
        """Ends the watch, and lets go of the network."""
        self._closed = True
        self._loop.unwatch(self.network.watched)
        self._end_helper()
        self.network.close()

    def _again(self) -> None:
        if not self._closed:
            self._loop.later(CHECK_EVERY_S, self._periodic)

    def _periodic(self) -> None:
        if not self._closed:
            self.check()
            self._again()

    def check(self) -> None:
        """Compares the state of the rules with what it has to be."""
        if self._pidfd >= 0 or self.lost:
            self.network.drain()
            return
        try:
            now = self.network.state_of_rules()
        except Lost as error:
            self._give_up(str(error))
            return
        if now != self._state:
            self._state = now
            self._restore()

    def _restore(self) -> None:
        say(
            "the rules of a network are not what they were: it is down until they are back",
            level="error",
            sandbox_id=self._name,
        )
        try:
            self.network.down()
            now = time.monotonic()
            self._times = [at for at in self._times if now - at < RESTORES_WITHIN_S] + [now]
            if len(self._times) > MAX_RESTORES:
                raise Lost(f"its rules were changed {len(self._times)} times within {RESTORES_WITHIN_S:g} s")
            self._pidfd = self._rules.apply(self.network)
        except (OSError, Lost) as error:
            self._give_up(str(error))
            return
        self._loop.watch(self._pidfd, self._applied)
        pidfd = self._pidfd
        self._loop.later(NFT_WITHIN_S, lambda: self._late(pidfd))

    def _applied(self) -> None:
        self._end_helper()
        try:
            now = self.network.state_of_rules()
            if now == self._state:
                raise Lost("nft did not take its rules")
            if now != (self._state + 1) & 0xFFFF_FFFF:  # changed again meanwhile
                self._state = now
                self._restore()
                return
            self.network.up()
        except (OSError, Lost) as error:
            self._give_up(str(error))
            return
        self._state = now
        self.restored += 1
        say("the rules of a network are back, and it is up", level="warning", sandbox_id=self._name)
        self._changed(now)

    def _late(self, pidfd: int) -> None:
        if self._pidfd == pidfd:
            self._give_up(f"nft did not end within {NFT_WITHIN_S:g} s")

    def _end_helper(self) -> None:
        """Nothing of nft runs any more; the loop reaps it."""
        if self._pidfd < 0:
            return
        self._loop.unwatch(self._pidfd)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._pidfd = -1

    def _give_up(self, why: str) -> None:
        self._end_helper()
        self.lost = why
        try:
            self.network.down()
        except OSError as error:
            say(f"the tap cannot be set down: {error}", level="error", sandbox_id=self._name)
        say(f"a sandbox has no network any more: {why}", level="error", sandbox_id=self._name)


class Fetch:
    """Asks a shim, which serves a VM since before this launcher did, for the sockets of its network.

    Calls `then` once, with the network or with why there is none: a shim that is slow, or stopped, makes nobody wait.
    """

    def __init__(self, loop: Loop, folder: int, then: Callable[[Network | str], None]) -> None:
        self._loop = loop
        self._then = then
        self._folder = os.dup(folder)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._done = False
        loop.later(FETCH_WITHIN_S, lambda: self._end(f"its shim did not answer within {FETCH_WITHIN_S:g} s"))
        self._connect()

    def _connect(self) -> None:
        if self._done:
            return
        try:
            self._sock.connect(f"/proc/self/fd/{self._folder}/shim.sock")
            self._sock.send(b"network")
        except BlockingIOError:  # its queue is full
            self._loop.later(FETCH_RETRY_S, self._connect)
            return
        except OSError as error:
            self._end(f"its shim: {error.strerror}")
            return
        self._loop.watch(self._sock.fileno(), self._heard)

    def _heard(self) -> None:
        try:
            text, fds, _, _ = socket.recv_fds(self._sock, 1024, HELD, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"its shim: {error.strerror}")
            return
        try:
            self._end(Network(fds) if text == b"ok" else f"its shim: {text.decode(errors='replace') or 'it ended'}")
        except Lost as error:
            self._end(str(error))

    def _end(self, what: Network | str) -> None:
        if self._done:
            return
        self._done = True
        self._loop.unwatch(self._sock.fileno())
        self._sock.close()
        os.close(self._folder)
        self._then(what)
