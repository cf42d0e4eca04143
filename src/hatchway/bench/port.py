"""The bare channel: a VM whose only program moves octets through the agent's port, and a reader or writer at its host end.

What it moves in a second is what the emulator and the kernel of the guest allow; `guest/bench/floor.c` is the program.
"""

import gzip
import struct
import time
from pathlib import Path

from hatchway.bench.bare import BareQemu, Ground, command, connect
from hatchway.node.images.cpio import Entry, archive
from hatchway.supervisor.settings import libexec

PIECE = 256 * 1024
"""Octets that the host end moves at once at most."""


class BarePort:
    """One booted VM, with the processor of our sandboxes or another emulated one; `end` must be called whatever happens."""

    def __init__(self, ground: Ground, folder: Path, emulated_cpu: str | None = None) -> None:
        folder.mkdir()
        self._qemu = BareQemu(ground, folder)
        try:
            # A later archive replaces files of an earlier one: the same modules, another first process.
            program = Entry("init", 0o755, libexec("hatchway-floor").read_bytes())
            initrd, memory = folder / "initrd", folder / "memory"
            initrd.write_bytes(ground.release.part("initrd").read_bytes() + gzip.compress(archive([program]), 1))
            with memory.open("wb") as file:
                file.truncate(ground.shape.memory_mib * 2**20)
            self._qemu.start(command(ground, memory, (ground.release.part("kernel"), initrd), emulated_cpu))
            self._port = connect(folder / "agent")
            self.take(1)
        except BaseException:
            self._qemu.end()
            raise

    def take(self, octets: int) -> float:
        """Takes so many octets from the guest; returns the seconds. Raises `TimeoutError`, `ConnectionError`."""
        buffer = bytearray(PIECE)
        began = time.perf_counter()
        self._port.sendall(struct.pack("<c7xQ", b"w", octets))
        left = octets
        while left:
            count = self._port.recv_into(buffer)
            if count == 0:
                raise ConnectionError(f"the bare VM ended: {self._qemu.words()}")
            left -= count
        return time.perf_counter() - began

    def give(self, octets: int) -> float:
        """Gives the guest so many octets, until it has them; returns the seconds. Raises `TimeoutError`, `ConnectionError`."""
        piece = bytes(PIECE)
        began = time.perf_counter()
        self._port.sendall(struct.pack("<c7xQ", b"r", octets))
        for at in range(0, octets, PIECE):
            self._port.sendall(piece[: octets - at])
        if not self._port.recv(1):
            raise ConnectionError(f"the bare VM ended: {self._qemu.words()}")
        return time.perf_counter() - began

    def end(self) -> None:
        """Ends the VM and removes its files."""
        self._port.close()
        self._qemu.end()
