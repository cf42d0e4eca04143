"""Runs a program with a file system of FUSE's, empty, mounted at a folder: `python own_fuse.py FOLDER PROGRAM …`, in a mount namespace of one's own.

It answers what the kernel asks when somebody looks at the root and watches it, and nothing else.
"""

import ctypes
import errno
import os
import signal
import struct
import sys

PR_SET_PDEATHSIG = 1
GETATTR, STATFS, INIT, OPENDIR, READDIR, RELEASEDIR = 3, 17, 26, 27, 28, 29
SILENT = (2, 36, 42)
"""Forgetting and interrupting, which are not answered."""
_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")


def answer(opcode: int) -> bytes | None:
    """The answer's content; None: that there is no such thing. As `linux/fuse.h` lays it out, version 7.31."""
    if opcode == INIT:
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, 0)
    if opcode == GETATTR:
        return struct.pack("<QII6Q10I", 3600, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
    if opcode == STATFS:
        return struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
    if opcode == OPENDIR:
        return bytes(16)
    return b"" if opcode in (READDIR, RELEASEDIR) else None


def serve(device: int) -> None:
    """Answers until the file system is gone."""
    while True:
        try:
            asked = os.read(device, 256 * 1024)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            continue
        _, opcode, unique, *_rest = _IN.unpack_from(asked)
        if opcode not in SILENT:
            found = answer(opcode)
            content = found or b""
            os.write(
                device, _OUT.pack(_OUT.size + len(content), -errno.ENOSYS if found is None else 0, unique) + content
            )


def main() -> None:
    folder, *program = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"fuse", os.fsencode(folder), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    if os.fork() == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for inherited in range(3):  # else whoever reads them waits for this one, too
            os.close(inherited)
        serve(device)
        os._exit(0)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
