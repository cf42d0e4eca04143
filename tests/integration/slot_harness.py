"""The guest's end of a slot: the tap of a real one, with frames written by hand."""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from types import TracebackType

from launcher_harness import WITHIN, Site

from hatchway.wire.launcher import TAP_FD, VmRecord

GATEWAY_MAC = bytes.fromhex("02fc00000001")
GUEST_MAC = bytes.fromhex("02fc00000002")
GUEST = "10.200.0.2"
GATEWAY = "10.200.0.1"
SYN, ACK, RST, FIN = 2, 16, 4, 1


def inside(vm: VmRecord, *command: str, stdin: str = "") -> str:
    """Runs a program of the host in the VM's network namespace, as its operator might."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{vm.shim_pid}/ns/net", *command],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(payload: bytes, kind: int = 0x0800, *, source: bytes = GUEST_MAC, to: bytes = GATEWAY_MAC) -> bytes:
    return to + source + kind.to_bytes(2, "big") + payload


def ipv4(
    payload: bytes, protocol: int, to: str, *, source: str = GUEST, options: bytes = b"", fragment: int = 0x4000
) -> bytes:
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x40 | (5 + len(options) // 4),
        0,
        20 + len(options) + len(payload),
        7,
        fragment,
        64,
        protocol,
        0,
        socket.inet_aton(source),
        socket.inet_aton(to),
    )
    head += options
    return head[:10] + checksum(head).to_bytes(2, "big") + head[12:] + payload


def tcp(
    to: str,
    port: int,
    *,
    source: str = GUEST,
    source_port: int = 40000,
    flags: int = SYN,
    seq: int = 1000,
    ack: int = 0,
) -> bytes:
    head = struct.pack("!HHIIBBHHH", source_port, port, seq, ack, 0x50, flags, 64_000, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(to) + struct.pack("!BBH", 0, 6, len(head))
    return head[:16] + checksum(pseudo + head).to_bytes(2, "big") + head[18:]


def udp(data: bytes, port: int, source_port: int = 5353) -> bytes:
    return struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data  # no checksum, as IPv4 allows


class Guest:
    """Whoever has the tap of a VM."""

    def __init__(self, tap: int) -> None:
        self.tap = tap
        self._port = 30_000

    @classmethod
    async def of(cls, here: Site, vm: VmRecord) -> "Guest":
        """The test VMM hands out the tap that the launcher gave it."""
        folder = os.open(here.run / "vm" / vm.sandbox_id, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(WITHIN)
                control.connect(f"/proc/self/fd/{folder}/qmp.sock")
                control.sendall(f"hand {TAP_FD}\n".encode())
                _, (tap,), _, _ = await asyncio.to_thread(socket.recv_fds, control, 1, 1)
        finally:
            os.close(folder)
        os.set_blocking(tap, False)
        return cls(tap)

    def __enter__(self) -> "Guest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.tap)

    def frame(self, frame: bytes) -> None:
        """Sends a frame; a tap that is down takes none."""
        with contextlib.suppress(OSError):
            os.write(self.tap, bytes(10) + frame)  # the head of virtio-net: nothing is left to the host

    def frames(self) -> list[bytes]:
        """What came meanwhile."""
        found = []
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                found.append(os.read(self.tap, 2048)[10:])
        return found

    def syn(self, to: str, port: int, **more: object) -> bytes:
        source = str(more.get("source", GUEST))
        return ethernet(ipv4(tcp(to, port, source=source, source_port=self._next()), 6, to, source=source))

    def _next(self) -> int:
        self._port += 1
        return self._port

    async def until(self, wanted, within: float = WITHIN) -> bytes:  # type: ignore[no-untyped-def]
        """The first frame that is `wanted`."""
        async with asyncio.timeout(within):
            while True:
                for frame in self.frames():
                    if wanted(frame):
                        return frame
                await asyncio.sleep(0.002)

    async def connect(self, to: str, port: int) -> None:
        """Opens a connection: SYN, SYN and ACK, ACK."""
        mine = self._next()
        self.frame(ethernet(ipv4(tcp(to, port, source_port=mine), 6, to)))
        answer = await self.until(lambda frame: is_tcp(frame, to, port, mine, SYN | ACK))
        sequence = int.from_bytes(answer[38:42], "big")
        self.frame(ethernet(ipv4(tcp(to, port, source_port=mine, flags=ACK, seq=1001, ack=sequence + 1), 6, to)))

    async def reached(self, to: str, port: int) -> bool:
        """Whether a connection can be begun: what follows it, which always is answered where anything is, is waited for."""
        mine = self._next()
        self.frame(ethernet(ipv4(tcp(to, port, source_port=mine), 6, to)))
        await asyncio.sleep(0.2)
        return any(is_tcp(frame, to, port, mine, SYN | ACK) for frame in self.frames())

    def ask(self, to: str, source_port: int, data: bytes, port: int = 53) -> None:
        """Sends a datagram."""
        self.frame(ethernet(ipv4(udp(data, port, source_port), 17, to)))

    async def answer(self) -> tuple[str, int, bytes]:
        """The next datagram: from where, and what."""
        frame = await self.until(lambda frame: frame[12:14] == b"\x08\x00" and frame[23] == 17)
        return socket.inet_ntoa(frame[26:30]), int.from_bytes(frame[34:36], "big"), frame[42:]


def is_tcp(frame: bytes, source: str, port: int, to_port: int, flags: int) -> bool:
    at = 14 + 4 * (frame[14] & 15)
    return (
        frame[12:14] == b"\x08\x00"
        and frame[23] == 6
        and frame[26:30] == socket.inet_aton(source)
        and frame[at : at + 4] == struct.pack("!HH", port, to_port)
        and frame[at + 13] & 0x17 == flags
    )
