"""The internet that attacks aim at: a network namespace in which every address is there and every server writes down what arrives.

As `Ground(naive=False)` it is joined to this host by a link of a private network that is free: gateways reach it by their policies alone. Routes
of those who carry requests (`users`) also lead metadata services and addresses of nobody into it, so that what should not have left is
seen there. As `Ground(naive=True)` a namespace in the place of a guest is joined to it, with nothing in between. Needs root; `close` leaves nothing, and
what a run leaves that is killed `leftovers` removes.
"""

import contextlib
import ctypes
import ipaddress
import itertools
import os
import random
import re
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hatchway.redteam.leftovers import FOLDERS, SPACES, own_stamp
from hatchway.redteam.marks import Oracle, Tail

T = TypeVar("T")

NAMES = {"index.test": 10, "files.test": 10, "api.test": 10, "other.test": 10, "clear.test": 11, "git.test": 12,
         "raw.test": 13, "drop.test": 14, "fine.wild.test": 15, "denied.wild.test": 15, "projects.wild.test": 15,
         "evil.test": 66, "private.test": 80, "tenant.test": 81}  # fmt: skip
"""Names of the sites, and the last number of their address. `index`, `files`, `api` and `other` are on one address."""
PORTS = (22, 25, 80, 443, 853, 3306, 5432, 8080, 8443, 9090, 15001, 15053)
METADATA = "169.254.169.254"
NOBODYS = ("203.0.113.0/24", "198.51.100.0/24", f"{METADATA}/32", "100.100.100.200/32", "168.63.129.16/32")
"""Addresses where no site of anybody's is, and those of metadata services: no gateway has business there."""
_REBOUND = {"loopback": "127.0.0.1", "aws": METADATA, "alibaba": "100.100.100.200", "azure": "168.63.129.16", "slot": "10.200.0.1", "nobody": "0.0.0.0",
            "group": "224.0.0.1", "mapped": "::ffff:127.0.0.1", "embedded": "64:ff9b::7f00:1", "local": "169.254.1.1"}  # fmt: skip
"""Where names are that a rule allows and that no rule may lead to, beside addresses of this host and a private one."""
PLACE = "/root/redteam"
"""A folder of the guest's in which its program and the suite tell each other how far they are."""
DEVICE = (7, 0)
"""A block device that an archive has a node for."""
_STORIES = {
    b"redirect": b"HTTP/1.1 302 Found\r\nLocation: https://evil.test/%s\r\nContent-Length: 0\r\n\r\n",
    b"alternative": b'HTTP/1.1 200 OK\r\nAlt-Svc: h3="203.0.113.66:443"; ma=9\r\nX: %s\r\nContent-Length: 0\r\n\r\n',
    b"unasked": b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\nX: %s\r\n\r\n",
    b"interim": b"HTTP/1.1 103 Early Hints\r\nX: %s\r\n\r\n" * 200 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"twice": b"HTTP/1.1 200 OK\r\nX: %s\r\nContent-Length: 0\r\n\r\nHTTP/1.1 101 Switching Protocols\r\n\r\n",
}
"""What sites answer to requests that ask for it; `%s` is the marker, which the request spells backwards."""
_STORY = re.compile(rb"/simple/(\w+)/(z[0-9a-f]{12}xh) ")
GUEST, GATEWAY = "10.200.0.2", "10.200.0.1"
GUEST6, GATEWAY6 = "fd00:200::2", "fd00:200::1"
QUIET_S = 0.5
BACKLOG = 128

_ALLOW_CLIENT_RENEGOTIATION = 1 << 8
_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 3
_IP_PKTINFO = 8
_SO_ATTACH_FILTER, _SOL_PACKET, _PACKET_STATISTICS = 26, 263, 6
_QUESTIONS = (
    (0x28, 0, 0, 12), (0x15, 0, 11, 0x0800),  # an IPv4 packet
    (0x30, 0, 0, 23), (0x15, 1, 0, 17), (0x15, 0, 8, 6),  # of UDP or TCP
    (0x28, 0, 0, 20), (0x45, 6, 0, 0x1FFF),  # its first fragment
    (0xB1, 0, 0, 14), (0x48, 0, 0, 16),  # for a port of name servers
    (0x15, 2, 0, 53), (0x15, 1, 0, 853), (0x15, 0, 1, 5353),
    (0x06, 0, 0, 0xFFFF), (0x06, 0, 0, 0),
)  # fmt: skip
"""A filter of the kernel's, so that the traffic of a busy loopback costs nothing."""
_libc = ctypes.CDLL(None, use_errno=True)


def lacking() -> str:
    """What this machine lacks for it; empty when nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        subprocess.run(["ip", "-V"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "there is no `ip` (iproute2)"
    return ""


class Ground:
    """See the module. `users` are ids of users whose routes lead `NOBODYS` into it."""

    def __init__(self, *, naive: bool, users: frozenset[int] = frozenset()) -> None:
        self.oracle = Oracle()
        self.naive = naive
        self.run = secrets.token_hex(3)
        self.token = f"honey-{self.run}-{secrets.token_hex(16)}"
        """What a file of this host says that no guest may read."""
        self._stack = ExitStack()
        self._stamp = own_stamp(self.run)
        self._inside, self._guest = (f"{space}{self._stamp}" for space in SPACES)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sniffing: list[socket.socket] = []
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        self._stack.callback(setattr, sys, "unraisablehook", self._hook)
        try:
            self._make(users)
        except BaseException:
            self.close()
            raise

    def _unraisable(self, what: "sys.UnraisableHookArgs") -> None:
        """A server name that is no text is refused by the library of TLS, which has nobody to tell."""
        if not isinstance(what.exc_value, UnicodeDecodeError):
            self._hook(what)

    @property
    def zone(self) -> dict[str, str]:
        """The addresses of the sites."""
        return {name: f"{self.net}.{number}" for name, number in NAMES.items()}

    @property
    def rebound(self) -> dict[str, str]:
        """Addresses of the names that no rule may lead to."""
        found = {**_REBOUND, "here": self.own_addresses()[-1], "private": self.zone["private.test"]}
        return {f"{name}.rebound.test": address for name, address in found.items()}

    @property
    def rebound_api(self) -> dict[str, str]:
        """The same, of names that a credential is for."""
        return {"api-loopback.test": "127.0.0.1", "api-metadata.test": METADATA, "api-here.test": self.own_addresses()[-1]}  # fmt: skip

    def facts(self) -> dict[str, object]:
        """What an attacker who knows the ground knows."""
        return {
            "zone": self.zone,
            "resolver": f"{self.net}.53",
            "port": self.port,
            "here": self.own_addresses(),
            "honey": str(self.honey),
            "abstract": self.abstract,
            "run": self.run,
            "devices": [str(self.honey)] if self.naive else [],
            "downloads": str(self.downloads),
            "device": DEVICE,
            "place": str(self.folder / "place") if self.naive else PLACE,
            "vsock_port": self.port,
            **self.undefended,
        }

    def own_addresses(self) -> list[str]:
        """Addresses of this host that an attacker may know."""
        return [f"{self.net}.1", "127.0.0.1", *_addresses()[:2]]

    @property
    def inside(self) -> str:
        """The namespace of the sites."""
        return self._inside

    def guest_command(self, *argv: str) -> list[str]:
        """A command line that runs in the place of a guest (`naive`)."""
        return ["ip", "netns", "exec", self._guest, *argv]

    def close(self) -> None:
        """Removes all of it; may be repeated."""
        self._closing.set()
        self._stack.close()
        for thread in self._threads:
            thread.join(5)

    # -- making

    def _make(self, users: frozenset[int]) -> None:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{FOLDERS}{self._stamp}-")))
        self.honey = self.folder / "secret" / "honeytoken"
        self.honey.parent.mkdir()
        self.honey.write_text(self.token)
        self.downloads = self.folder / "downloads"
        self.downloads.mkdir()
        self.net = _free_network()
        self.authority = _Authority(self.folder)
        self._namespace(self._inside)
        # Every address is there: routes that are more specific than this one alone go elsewhere.
        _ip("link set lo up\nroute add local default dev lo table main", self._inside)
        if self.naive:
            self._join_guest()
        else:
            self._join_host(users)
        self._listen_here()
        self._serve_inside()

    def _join_guest(self) -> None:
        self._namespace(self._guest)
        _ip(f"link add eth1 netns {self._inside} type veth peer name eth0 netns {self._guest}")
        _ip(
            f"link set lo up\naddr add {GUEST}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY}",
            self._guest,
        )
        _ip(f"addr add {GATEWAY}/24 dev eth1\nlink set eth1 up", self._inside)
        _ip(f"-6 addr add {GUEST6}/64 dev eth0 nodad\n-6 route add default via {GATEWAY6}", self._guest, quiet=True)
        _ip(
            f"-6 addr add {GATEWAY6}/64 dev eth1 nodad\n-6 route add local default dev lo table main",
            self._inside,
            quiet=True,
        )
        within(self._inside, _open)

    def _join_host(self, users: frozenset[int]) -> None:
        link = self._stamp.link
        _ip(f"link add {link} type veth peer name eth1 netns {self._inside}")
        self._stack.callback(_ip, f"link del {link}", quiet=True)
        _ip(f"addr add {self.net}.2/32 dev eth1\nlink set eth1 up\nroute add {self.net}.1/32 dev eth1", self._inside)
        _ip(f"addr add {self.net}.1/24 dev {link}\nlink set {link} up")
        self._routes(users, link)

    def _namespace(self, name: str) -> None:
        self._stack.callback(subprocess.run, ["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        _run(["ip", "netns", "add", name])

    def _routes(self, users: frozenset[int], link: str) -> None:
        table = self._stamp.table
        if not users:
            return
        for network in NOBODYS:
            _ip(f"route add {network} via {self.net}.2 dev {link} table {table}")
        for user in users:
            _ip(f"rule add pref {table} uidrange {user}-{user} lookup {table}")
            self._stack.callback(_ip, f"rule del pref {table} uidrange {user}-{user}", quiet=True)

    def _listen_here(self) -> None:
        """What an attack on this host arrives at: one port of all its addresses, names in questions, and a socket without a file."""
        self.abstract = f"hatchway-redteam-{self.run}"

        def abstract() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind("\0" + self.abstract)
            sock.listen()
            return sock

        self.undefended: dict[str, str] = {}
        if self.naive:
            self.port = random.randrange(40_000, 60_000)
            self._accept(within(self._guest, abstract), "a socket of this host", None)
            self._play_the_monitor()
            return
        self._accept(abstract(), "a socket of this host", None)
        sock = socket.create_server(("", 0), backlog=BACKLOG)
        self.port = sock.getsockname()[1]
        self._accept(sock, "this host", None)
        self._listen_past_the_network()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind(("", self.port))
        self._loop(datagrams, lambda one: self.oracle.note("this host", one.recv(65536)))
        # On the loopback questions alone: there the suite itself talks with the service.
        self._sniff("lo", "a name server of this host", _QUESTIONS)
        for _, interface in socket.if_nameindex():
            if interface != "lo":
                self._sniff(interface, f"the interface {interface}", ())

    def _play_the_monitor(self) -> None:
        """A socket, a disk and a memory of the monitor's, as a guest would have them of one that shares all with it."""
        monitor = socket.socket(socket.AF_UNIX)
        monitor.bind(str(self.folder / "monitor"))
        monitor.listen(BACKLOG)
        self._accept(monitor, "a socket of the monitor", None)
        for name in ("disk", "memory"):
            (self.folder / name).write_bytes(bytes(4 << 20))
            self.undefended[name] = str(self.folder / name)
        self.undefended["monitor"] = str(self.folder / "monitor")

    def _listen_past_the_network(self) -> None:
        """For what guests send to their host by AF_VSOCK, where this kernel has it."""
        with contextlib.suppress(OSError, AttributeError):
            sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
            sock.bind((socket.VMADDR_CID_ANY, self.port))
            sock.listen()
            self._accept(sock, "this host, past the network", None)

    def _sniff(self, interface: str, where: str, only: tuple[tuple[int, int, int, int], ...]) -> None:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        with contextlib.suppress(OSError):  # one that went away meanwhile carries nothing
            if only:
                program = b"".join(struct.pack("HBBI", *one) for one in only)
                held = ctypes.create_string_buffer(program)
                sock.setsockopt(
                    socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", len(only), ctypes.addressof(held))
                )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sock.bind((interface, _ETH_P_ALL))
            self._sniffing.append(sock)
            self._loop(sock, lambda one: self.oracle.note(where, one.recv(65536)))
            return
        sock.close()

    def unseen(self) -> int:
        """How many frames passed this host's interfaces, since the last call, faster than they could be looked at."""
        lost = 0
        for sock in self._sniffing:
            with contextlib.suppress(OSError):
                lost += struct.unpack("II", sock.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        return lost

    def _serve_inside(self) -> None:
        context = self.authority.context(self.oracle)

        def listener(port: int) -> socket.socket:
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
            return socket.create_server(("", port), backlog=BACKLOG)

        for port in (*PORTS, self.port):
            sock = within(self._inside, lambda port=port: listener(port))  # type: ignore[misc]
            self._accept(sock, f"a site, port {port}", context if port in (443, 8443, 853) else None)

        def names() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
            sock.bind(("", 53))
            return sock

        def wire() -> socket.socket:
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sock.bind(("eth1", _ETH_P_ALL))
            return sock

        self._loop(within(self._inside, names), self._name)
        self._accept(within(self._inside, lambda: listener(53)), "a name server, over TCP", None)
        # Tags of VLANs are taken off before a frame is seen here; what they are around is not.
        self._loop(within(self._inside, wire), lambda sock: self.oracle.note("the wire", sock.recv(65536)))

    def _name(self, sock: socket.socket) -> None:
        data, ancillary, _, peer = sock.recvmsg(4096, 256)
        self.oracle.note("a name server", data)
        answer = _answer(data, self.zone)
        if answer:
            came_to = ancillary[0][2] if ancillary else b""
            told = struct.pack("I4s4s", 0, came_to[8:12], b"\0" * 4)
            sock.sendmsg([answer], [(socket.IPPROTO_IP, _IP_PKTINFO, told)], 0, peer)

    # -- serving

    def _accept(self, sock: socket.socket, where: str, context: ssl.SSLContext | None) -> None:
        def take(listener: socket.socket) -> None:
            stream, _ = listener.accept()
            threading.Thread(target=self._serve, args=(stream, where, context), daemon=True).start()

        self._loop(sock, take)

    def _serve(self, stream: socket.socket, where: str, context: ssl.SSLContext | None) -> None:
        tail = Tail(self.oracle, where)
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            stack.callback(stream.close)
            stream.settimeout(30)
            if context is not None and stream.recv(1, socket.MSG_PEEK) == b"\x16":
                secured = stack.enter_context(context.wrap_socket(stream, server_side=True))
                tail = Tail(
                    self.oracle, f"{where}, as {self.authority.names.get(secured.context, 'whoever is asked for')}"
                )
                stream = secured
            while data := stream.recv(65536):
                tail.note(data)
                stream.sendall(_reply(data))

    def _loop(self, sock: socket.socket, step: Callable[[socket.socket], None]) -> None:
        sock.settimeout(QUIET_S)

        def loop() -> None:
            with sock:
                while not self._closing.is_set():
                    try:
                        step(sock)
                    except TimeoutError:
                        continue
                    except OSError:
                        if sock.fileno() < 0:
                            return

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        self._threads.append(thread)


_OPEN = (
    ("ipv4/conf/all/rp_filter", 0),
    ("ipv4/conf/eth1/rp_filter", 0),
    ("ipv4/conf/all/accept_source_route", 1),
    ("ipv4/conf/eth1/accept_source_route", 1),
    ("ipv4/conf/eth1/route_localnet", 1),
    ("ipv4/conf/eth1/accept_local", 1),
)
"""Where nothing is defended: addresses of the host itself are taken from the link, whoever they come from."""


def _open() -> None:
    for name, value in _OPEN:
        Path(f"/proc/sys/net/{name}").write_text(str(value))


@contextmanager
def standing(*, naive: bool, users: frozenset[int] = frozenset()) -> Iterator[Ground]:
    """A `Ground` that is removed in the end."""
    ground = Ground(naive=naive, users=users)
    try:
        yield ground
    finally:
        ground.close()


def within(namespace: str, call: Callable[[], T]) -> T:
    """Calls in a network namespace, on a thread that ends: none that is used again may have been elsewhere."""

    def work() -> T:
        fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        try:
            if _libc.setns(fd, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            return call()
        finally:
            os.close(fd)

    with ThreadPoolExecutor(1) as ending:
        return ending.submit(work).result()


def _reply(data: bytes) -> bytes:
    """What a site answers."""
    if story := _STORY.search(data):
        told = _STORIES.get(story[1])
        if told is not None:
            return told.replace(b"%s", story[2][::-1])
    return b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes" * max(1, data.count(b"\r\n\r\n"))


def _answer(data: bytes, zone: dict[str, str]) -> bytes:
    """An answer to the first question of a packet; every name is somewhere."""
    at, labels = 12, []
    while at < len(data) and data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1").lower())
        at += 1 + data[at]
    if at + 5 > len(data):
        return b""
    address = zone.get(".".join(labels), zone["evil.test"])
    record = b"\xc0\x0c\0\1\0\1" + struct.pack(">IH", 30, 4) + ipaddress.IPv4Address(address).packed
    return data[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + data[12 : at + 5] + record


class _Authority:
    """Who vouches for the sites: one certificate for each name, shown to whoever asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: dict[ssl.SSLContext, str] = {}
        """Which site's each context of a server is."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sites of hatchway redteam")])
        own = self._certificate(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.pem = own.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def context(self, oracle: Oracle) -> ssl.SSLContext:
        """What a server needs; the names that clients ask for are noted."""
        contexts = {name: self._for(name) for name in NAMES}
        self.names = {context: name for name, context in contexts.items()}
        first, other = contexts["index.test"], self._for("other.test")

        def choose(sock: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: object) -> None:
            oracle.note("a site, as its name", (name or "").encode("utf-8", "replace"))
            sock.context = contexts.get((name or "").lower(), other)

        first.sni_callback = choose
        return first

    def _for(self, name: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._certificate(subject, key, x509.SubjectAlternativeName([x509.DNSName(name)]))
        path = self._folder / f"{name}.pem"
        path.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        context.options |= _ALLOW_CLIENT_RENEGOTIATION
        return context

    def _certificate(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, more: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(more, critical=isinstance(more, x509.BasicConstraints))
            .sign(self._key, hashes.SHA256())
        )


def _free_network() -> str:
    """The first three numbers of a private network that no route of this host leads to."""
    taken = [
        ipaddress.ip_network(word)
        for line in _run(["ip", "-4", "route", "show", "table", "all"]).splitlines()
        for word in line.split()
        if "/" in word and word.count(".") == 3
    ]
    for _ in range(200):
        net = ipaddress.ip_network(f"10.{random.randrange(201, 251)}.{random.randrange(256)}.0/24")
        if not any(net.overlaps(one) for one in taken):
            return str(net.network_address).rpartition(".")[0]
    raise OSError("no private network is free")


def _addresses() -> list[str]:
    words = _run(["ip", "-4", "-o", "addr", "show", "scope", "global"]).split()
    return [after.partition("/")[0] for word, after in itertools.pairwise(words) if word == "inet"]


def _ip(script: str, namespace: str = "", *, quiet: bool = False) -> None:
    for line in script.splitlines():
        _run(["ip", *(["-n", namespace] if namespace else []), *line.split()], quiet=quiet)


def _run(argv: list[str], *, quiet: bool = False) -> str:
    done = subprocess.run(argv, text=True, capture_output=True, check=False)
    if done.returncode != 0 and not quiet:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
