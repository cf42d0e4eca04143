"""Names, connections, TLS, HTTP/2 and frames, written by hand where a library would refuse."""

import contextlib
import fcntl
import os
import random
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .notes import facts, tried

QUIET_S = 3.0
"""How long an attempt waits for an answer: what is dropped is not answered at all."""
ME, GATEWAY = "10.200.0.2", "10.200.0.1"

# -- names and connections


def wire_name(*labels: bytes) -> bytes:
    """A name as in a DNS packet, of labels with whatever octets."""
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def labels_of(name: str) -> bytes:
    """A name as in a DNS packet."""
    return wire_name(*(label.encode("utf-8") for label in name.split(".") if label))


def query(
    name: bytes, kind: int = 1, *, flags: int = 0x0100, count: int = 1, extra: bytes = b"", cls: int = 1
) -> bytes:
    """A DNS packet with a question."""
    head = struct.pack(">HHHHHH", random.getrandbits(16), flags, count, 0, 0, 0)
    return head + name + struct.pack(">HH", kind, cls) + extra


def ask(packet: bytes, server: str = GATEWAY, port: int = 53, *, over_tcp: bool = False) -> bytes:
    """Sends a packet to a name server and returns what it answers; empty when nothing."""
    tried.append(f"dns {server}:{port}")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM if over_tcp else socket.SOCK_DGRAM) as sock:
        sock.settimeout(QUIET_S)
        sock.connect((server, port))
        sock.sendall(struct.pack(">H", len(packet)) + packet if over_tcp else packet)
        with contextlib.suppress(OSError):
            return sock.recv(4096)
    return b""


def addr(name: str) -> str:
    """The address that a name is given here; where it is given none, the one that the attacker knows it has."""
    for _ in range(3):
        answer = ask(query(labels_of(name)))
        if len(answer) >= 16 and answer[3] & 15 == 0 and answer[7]:
            return socket.inet_ntoa(answer[-4:]) if answer[-6:-4] == b"\0\4" else _first_address(answer, name)
        if answer:
            break
    return str(facts["zone"].get(name, facts["zone"]["evil.test"]))


def _first_address(answer: bytes, name: str) -> str:
    at = 12 + len(labels_of(name)) + 4
    return socket.inet_ntoa(answer[at + 12 : at + 16])


def tcp(where: str, port: int, data: bytes, *, source: str = "", urgent: bytes = b"") -> bytes:
    """Connects, sends, and returns the first answer."""
    tried.append(f"tcp {where}:{port}")
    family = socket.AF_INET6 if ":" in where else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(QUIET_S)
        if source:
            sock.bind((source, 0))
        sock.connect((where, port))
        sock.sendall(data)
        if urgent:
            sock.send(urgent, socket.MSG_OOB)
        return _answer(sock)


def udp(where: str, port: int, data: bytes) -> None:
    """Sends one datagram."""
    tried.append(f"udp {where}:{port}")
    with socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(ME))
        for _ in range(2):
            sock.sendto(data, (where, port))


def context(alpn: list[str] | None = None, *, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A client that trusts everybody."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = most
    if alpn:
        made.set_alpn_protocols(alpn)
    return made


def tls(
    where: str,
    data: bytes | list[bytes],
    server_name: str | None,
    *,
    port: int = 443,
    alpn: list[str] | None = None,
    how: ssl.SSLContext | None = None,
) -> bytes:
    """A TLS connection; sends each of the pieces, with an answer in between, and returns the last answer."""
    tried.append(f"tls {where}:{port} {server_name}")
    answer = b""
    raw = socket.create_connection((where, port), timeout=20)
    with raw, (how or context(alpn)).wrap_socket(raw, server_hostname=server_name) as sock:
        sock.settimeout(QUIET_S)
        for piece in [data] if isinstance(data, bytes) else data:
            sock.sendall(piece)
            answer = _answer(sock)
    return answer


def _answer(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def site(name: str, data: bytes | list[bytes], **more: Any) -> bytes:
    """Sends to a site over TLS, as its clients do."""
    return tls(addr(name), data, more.pop("sni", name), **more)


def anew(where: str, name: str, data: bytes) -> None:
    """A connection of old TLS that is negotiated anew before the data. Raises `LookupError` where there is no program for it."""
    tried.append(f"negotiate anew {where}")
    try:
        program = subprocess.Popen(
            ["openssl", "s_client", "-tls1_2", "-connect", f"{where}:443", "-servername", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise LookupError("there is no openssl") from error
    assert program.stdin is not None
    with contextlib.suppress(OSError):
        for piece in (b"GET /simple/ HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n", b"R\n", data):
            time.sleep(QUIET_S)
            program.stdin.write(piece)
            program.stdin.flush()
        time.sleep(QUIET_S)
    program.kill()
    program.wait()


# -- ClientHello


def extension(kind: int, body: bytes) -> bytes:
    """One extension."""
    return struct.pack(">HH", kind, len(body)) + body


def sni(*names: bytes, kind: int = 0) -> bytes:
    """The extension with server names."""
    entries = b"".join(bytes([kind]) + struct.pack(">H", len(name)) + name for name in names)
    return extension(0, struct.pack(">H", len(entries)) + entries)


def hello(extensions: bytes, mark: str, *, pieces: int = 0) -> bytes:
    """Records with a ClientHello; the marker is the protocol that it wants. `pieces`: octets of each record."""
    wants = mark.encode()
    protocols = bytes([len(wants)]) + wants
    extensions += extension(16, struct.pack(">H", len(protocols)) + protocols)
    extensions += extension(43, b"\x02\x03\x04") + extension(10, b"\0\x02\0\x17") + extension(13, b"\0\x02\x04\x03")
    body = (
        b"\3\3" + os.urandom(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + struct.pack(">H", len(extensions)) + extensions
    )
    message = b"\1" + len(body).to_bytes(3, "big") + body
    step = pieces or len(message)
    return b"".join(
        b"\x16\3\1" + struct.pack(">H", len(message[at : at + step])) + message[at : at + step]
        for at in range(0, len(message), step)
    )


# -- HTTP/2


def field(name: str, value: str) -> bytes:
    """A header field as it is, without table and without Huffman's code."""
    return b"\0" + _length(name) + _length(value)


def _length(text: str) -> bytes:
    data = text.encode("latin-1")
    head = bytes([len(data)]) if len(data) < 127 else b"\x7f" + _rest(len(data) - 127)
    return head + data


def _rest(number: int) -> bytes:
    out = b""
    while number >= 128:
        out += bytes([number % 128 + 128])
        number //= 128
    return out + bytes([number])


def h2_frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """One frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + body


def h2_request(stream: int, *fields: tuple[str, str], end: bool = True) -> bytes:
    """HEADERS with these fields in their order."""
    return h2_frame(1, 5 if end else 4, stream, b"".join(field(*one) for one in fields))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def get(path: str, authority: str = "index.test", method: str = "GET", scheme: str = "https") -> list[tuple[str, str]]:
    """The pseudo fields of a request."""
    return [(":method", method), (":scheme", scheme), (":authority", authority), (":path", path)]


def h2(*frames: bytes, name: str = "index.test") -> bytes:
    """Sends frames to a site after what a connection begins with."""
    return site(name, PREFACE + h2_frame(4, 0, 0) + b"".join(frames), alpn=["h2"])


# -- frames


def checksum(data: bytes) -> int:
    """The sum of IP, TCP and UDP."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip4(
    dst: str, protocol: int, body: bytes, *, src: str = ME, options: bytes = b"", frag: int = 0, ttl: int = 64
) -> bytes:
    """An IPv4 packet."""
    words = 5 + len(options) // 4
    head = struct.pack(
        ">BBHHHBBH4s4s", 0x40 | words, 0, words * 4 + len(body), 4242, frag, ttl, protocol, 0, socket.inet_aton(src), socket.inet_aton(dst)
    )  # fmt: skip
    head += options
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + body


def udp4(dst: str, port: int, data: bytes, *, src: str = ME) -> bytes:
    """An UDP datagram, without a sum."""
    return struct.pack(">HHHH", 40000, port, 8 + len(data), 0) + data


def tcp4(
    dst: str, port: int, data: bytes, *, src: str = ME, flags: int = 2, sport: int = 40001, seq: int = 7, ack: int = 0
) -> bytes:
    """A TCP segment (a SYN, unless told otherwise) with data."""
    head = struct.pack(">HHIIBBHHH", sport, port, seq, ack, 0x50, flags, 64000, 0, 0)
    pseudo = socket.inet_aton(src) + socket.inet_aton(dst) + struct.pack(">BBH", 0, 6, len(head) + len(data))
    total = checksum(pseudo + head + data)
    return head[:16] + struct.pack(">H", total) + head[18:] + data


def ip6(dst: str, next_header: int, body: bytes, *, src: str = "fd00:200::2") -> bytes:
    """An IPv6 packet."""
    ends = socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst)
    return struct.pack(">IHBB", 0x60000000, len(body), next_header, 64) + ends + body


def gateway_mac() -> bytes:
    """The gateway's hardware address, as the kernel learnt it."""
    udp(GATEWAY, 9, b"")
    for _ in range(30):
        for line in Path("/proc/net/arp").read_text().splitlines()[1:]:
            words = line.split()
            if words[0] == GATEWAY and words[3] != "00:00:00:00:00:00":
                return bytes.fromhex(words[3].replace(":", ""))
        time.sleep(0.1)
    return b"\xff" * 6


def my_mac() -> bytes:
    """The guest's hardware address."""
    return bytes.fromhex(Path("/sys/class/net/eth0/address").read_text().strip().replace(":", ""))


def frame(packet: bytes, *, kind: int = 0x0800, source: bytes = b"", to: bytes = b"", tags: bytes = b"") -> None:
    """Writes a frame onto the link, as it is, twice."""
    tried.append(f"frame {kind:#06x}")
    whole = (to or gateway_mac()) + (source or my_mac()) + tags + struct.pack(">H", kind) + packet
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind(("eth0", 0))
        for _ in range(2):
            sock.send(whole)


def by_hand(where: str, port: int, data: bytes, *, src: str = ME, sport: int = 0) -> bool:
    """A TCP connection of frames, past the kernel: whether somebody took it. What it wants to say is in its first segment, too."""
    tried.append(f"frames to {where}:{port}")
    sport = sport or random.randrange(20000, 30000)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as sock:
        sock.bind(("eth0", 0x0800))
        sock.settimeout(0.5)
        mac, mine = gateway_mac(), my_mac()

        def send(segment: bytes) -> None:
            sock.send(mac + mine + b"\x08\0" + ip4(where, 6, segment, src=src))

        send(tcp4(where, port, b"", src=src, sport=sport, seq=100))
        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            try:
                got = sock.recv(2048)
            except OSError:
                send(tcp4(where, port, b"", src=src, sport=sport, seq=100))
                continue
            if got[23] != 6 or struct.unpack(">H", got[36:38])[0] != sport or got[47] & 0x12 != 0x12:
                continue
            theirs = struct.unpack(">I", got[38:42])[0] + 1
            for _ in range(2):
                send(tcp4(where, port, data, src=src, sport=sport, seq=101, ack=theirs, flags=0x18))
            time.sleep(0.3)
            return True
    return False


@contextlib.contextmanager
def another_address(address: str) -> Iterator[None]:
    """The guest has one more address meanwhile."""
    alias = f"eth0:{random.randrange(1000)}".encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:

        def set_to(text: str) -> None:
            request = struct.pack("16sH2s4s8s", alias, socket.AF_INET, b"", socket.inet_aton(text), b"")
            fcntl.ioctl(sock, 0x8916, request)

        set_to(address)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                set_to("0.0.0.0")
