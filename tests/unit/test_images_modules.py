"""Which kernel modules a guest needs, from the module files themselves."""

import lzma
import struct
from pathlib import Path

import pytest

from hatchway.domain.errors import Unavailable
from hatchway.node.images import modules


def elf(**values: str) -> bytes:
    """A 64-bit ELF file with nothing but a `.modinfo` section."""
    info = b"".join(f"{key}={value}".encode() + b"\0" for key, value in values.items())
    names = b"\0.modinfo\0.shstrtab\0"
    info_at = 64
    names_at = info_at + len(info)
    table_at = names_at + len(names)
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table_at, 0, 64, 0, 0, 64, 3, 2)
    )
    sections = [
        bytes(64),
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, info_at, len(info), 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 10, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
    ]
    return header + info + names + b"".join(sections)


def write(folder: Path, name: str, **values: str) -> None:
    path = folder / "kernel" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = elf(**values)
    path.write_bytes(lzma.compress(data) if name.endswith(".xz") else data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "virtio-ring.ko.xz", depends="")
    write(tmp_path, "virtio.ko", depends="virtio_ring")
    write(tmp_path, "drivers/net/virtio_net.ko", depends="virtio-ring,virtio,failover")
    write(tmp_path, "failover.ko", depends="")
    write(tmp_path, "erofs.ko", depends="crc", softdep="pre: fast_crc missing_one post: late")
    write(tmp_path, "crc.ko")
    write(tmp_path, "fast-crc.ko")
    write(tmp_path, "late.ko")
    (tmp_path / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\nkernel/fs/mb-cache.ko\n")
    return tmp_path


def test_dependencies_come_first_and_once(folder: Path) -> None:
    found = modules.collect(folder, ("virtio_net", "virtio"))
    assert list(found) == ["virtio_ring", "virtio", "failover", "virtio_net"]
    assert found["virtio_ring"].startswith(b"\x7fELF"), "it must be decompressed"


def test_soft_dependencies_come_first_where_they_are_there(folder: Path) -> None:
    assert list(modules.collect(folder, ("erofs",))) == ["fast_crc", "crc", "erofs"]


def test_what_is_compiled_in_is_left_out(folder: Path) -> None:
    assert list(modules.collect(folder, ("ext4", "mb_cache"))) == []


def test_a_missing_module_is_named(folder: Path) -> None:
    with pytest.raises(Unavailable, match="no module overlay"):
        modules.collect(folder, ("overlay",))
    write(folder, "odd.ko", depends="nowhere")
    with pytest.raises(Unavailable, match="no module nowhere that odd needs"):
        modules.collect(folder, ("odd",))


def test_a_cycle_ends(folder: Path) -> None:
    write(folder, "a.ko", depends="b")
    write(folder, "b.ko", depends="a")
    assert set(modules.collect(folder, ("a",))) == {"a", "b"}


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", elf(depends="x")[:200], elf(depends="")[:-64] + bytes(64)])
def test_damaged_modules_are_refused(folder: Path, damage: bytes) -> None:
    (folder / "kernel/virtio.ko").write_bytes(damage)
    with pytest.raises(Unavailable):
        modules.collect(folder, ("virtio",))


def test_damaged_compression_is_refused(folder: Path) -> None:
    path = folder / "kernel/virtio-ring.ko.xz"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Unavailable, match="cannot be decompressed"):
        modules.collect(folder, ("virtio_ring",))
