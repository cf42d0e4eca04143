"""The first file system's archive: what is in it, in which order, and that it is the same each time."""

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from hatchway.node.images.cpio import Entry, archive
from hatchway.node.images.initramfs import make


def parse(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Reads a newc archive back: path → (mode, content), in the order of the archive."""
    found: dict[str, tuple[int, bytes]] = {}
    offset = 0
    while True:
        assert data[offset : offset + 6] == b"070701"
        numbers = [int(data[offset + 6 + 8 * n : offset + 14 + 8 * n], 16) for n in range(13)]
        mode, size, name_size = numbers[1], numbers[6], numbers[11]
        name = data[offset + 110 : offset + 110 + name_size - 1].decode()
        body = offset + 110 + name_size
        body += -body % 4
        if name == "TRAILER!!!":
            assert body == len(data)
            return found
        assert numbers[5] == 0, "times must not be in it"
        found[name] = (mode, data[body : body + size])
        offset = body + size + -size % 4


def test_holds_files_and_the_folders_above_them() -> None:
    data = archive([Entry("lib/modules/a.ko", 0o644, b"abc"), Entry("init", 0o755, b"x" * 5), Entry("dev", 0o700)])
    assert parse(data) == {
        "dev": (0o040700, b""),
        "init": (0o100755, b"xxxxx"),
        "lib": (0o040755, b""),
        "lib/modules": (0o040755, b""),
        "lib/modules/a.ko": (0o100644, b"abc"),
    }


def test_folders_come_before_what_is_in_them_whatever_sorts_between() -> None:
    # "lib-x" sorts between "lib" and "lib/a" as text
    names = list(parse(archive([Entry("lib/a", 0o644, b""), Entry("lib-x", 0o644, b"")])))
    assert names.index("lib") < names.index("lib/a")


def test_same_entries_in_any_order_give_the_same_octets() -> None:
    entries = [Entry("b", 0o644, b"2"), Entry("a/c", 0o644, b"1"), Entry("a", 0o755)]
    assert archive(entries) == archive(entries[::-1])


@pytest.mark.parametrize("path", ["", "/init", "a//b", "a/../b", "./a", "a\0b", "TRAILER!!!", "a/"])
def test_refuses_paths_that_are_not_plain(path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        archive([Entry(path, 0o644, b"")])


def test_refuses_what_is_there_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        archive([Entry("a", 0o644, b""), Entry("a", 0o755)])
    with pytest.raises(ValueError, match="in the way"):
        archive([Entry("a", 0o644, b""), Entry("a/b", 0o644, b"")])


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_the_systems_cpio_reads_it(tmp_path: Path) -> None:
    data = archive([Entry("a/init", 0o750, b"hello"), Entry("empty", 0o600, b"")])
    subprocess.run(["cpio", "-id", "--quiet"], input=data, cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "a/init").read_bytes() == b"hello"
    assert (tmp_path / "a/init").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "empty").read_bytes() == b""


def test_initramfs_lists_the_modules_in_load_order() -> None:
    data = make(b"agent", {"virtio": b"1", "erofs": b"2", "vsock": b"3", "vmw_vsock_virtio_transport": b"4"})
    found = parse(gzip.decompress(data))
    assert found["init"] == (0o100755, b"agent")
    assert found["modules"][1] == b"/lib/modules/virtio.ko\n/lib/modules/erofs.ko\n"
    # Loaded only where there is such a device.
    assert found["modules-vsock"][1] == b"/lib/modules/vsock.ko\n/lib/modules/vmw_vsock_virtio_transport.ko\n"
    assert found["lib/modules/erofs.ko"][1] == b"2"
    assert make(b"agent", {"virtio": b"1", "erofs": b"2", "vsock": b"3", "vmw_vsock_virtio_transport": b"4"}) == data
