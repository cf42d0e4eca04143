"""The ELF program inside a distribution's kernel: Firecracker boots that and no bzImage."""

import gzip
import lzma
import os
import struct
import subprocess
from pathlib import Path

from hatchway.node.vmm.seam import VmmError, VmmMissing
from hatchway.wire.small_files import sync_folder

MAX_ELF = 512 << 20
KEPT = 4
"""Kernels that stay unpacked, about 50 MiB each."""
_UNPACK_S = 300.0
_TOOLS = {b"\x28\xb5\x2f\xfd": ("zstd", ["-dcq"], 4), b"\x02\x21\x4c\x18": ("lz4", ["-dcq"], 4)}
"""Magic → tool, its arguments, octets behind the stream: the kernel's own note of its size."""


class Kernels:
    """Kernels that were unpacked, one file each in a folder of the driver's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def elf(self, image: Path) -> Path:
        """Returns the ELF kernel of `image`: the file itself when it is one, else one that was unpacked, once.

        Raises `VmmError` for what is no kernel, `VmmMissing` when the tool that unpacks it is not installed, `OSError`.
        """
        with image.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                return image
        found = image.stat()
        elf = self._folder / f"{found.st_dev:x}-{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}.elf"
        if elf.exists():
            return elf
        octets = extract(image)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = elf.with_suffix(f".{os.getpid()}.new")
        try:
            with temporary.open("wb") as file:
                file.write(octets)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o444)
            os.rename(temporary, elf)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        self._prune()
        return elf

    def _prune(self) -> None:
        """Removes all but the newest; a machine needs its kernel's file only until it runs, and has it open by then."""
        kept = sorted(self._folder.glob("*.elf"), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-KEPT]:
            path.unlink(missing_ok=True)


def extract(image: Path) -> bytes:
    """Takes the ELF kernel out of a bzImage (x86 boot protocol 2.08 or newer). Raises `VmmError`, `VmmMissing`."""
    data = image.read_bytes()
    if data[0x202:0x206] != b"HdrS":
        raise VmmError(f"{image} is neither an ELF kernel nor a bzImage.")
    start = ((data[0x1F1] or 4) + 1) * 512
    offset, length = struct.unpack_from("<II", data, 0x248)
    payload = data[start + offset : start + offset + length]
    elf = b""
    try:
        if payload.startswith(b"\x7fELF"):
            elf = payload
        elif payload.startswith(b"\x1f\x8b"):
            elf = gzip.decompress(payload[:-4])
        elif payload.startswith(b"\xfd7zXZ"):
            elf = lzma.LZMADecompressor().decompress(payload, max_length=MAX_ELF)
        elif payload[:4] in _TOOLS:
            tool, arguments, behind = _TOOLS[payload[:4]]
            elf = _piped(image, [tool, *arguments], payload[:-behind])
        else:
            raise VmmError(f"The kernel in {image} is packed in an unknown way.")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise VmmError(f"The kernel in {image} cannot be unpacked: {error}") from error
    if not elf.startswith(b"\x7fELF"):
        raise VmmError(f"What is packed in {image} is no ELF kernel.")
    return elf


def _piped(image: Path, command: list[str], octets: bytes) -> bytes:
    try:
        done = subprocess.run(command, input=octets, capture_output=True, check=True, timeout=_UNPACK_S)
    except FileNotFoundError as error:
        raise VmmMissing(
            f"The kernel in {image} is packed with {command[0]}, which is not installed. Install the package {command[0]}."
        ) from error
    except subprocess.SubprocessError as error:
        raise VmmError(f"The kernel in {image} cannot be unpacked: {error}") from error
    return done.stdout
