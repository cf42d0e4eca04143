"""Disk layers, qcow2 headers, manifests and the jail root: files that must be whole after a crash and false for nobody."""

import errno
import hashlib
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.domain.shapes import Shape
from hatchway.node.vmm import disk, manifest, qcow2, tree
from hatchway.node.vmm.manifest import Manifest
from hatchway.node.vmm.seam import Baked, SnapshotMismatch, VmmError, VmmMissing

MIB = 2**20


# -- qcow2


@given(sectors=st.integers(1, qcow2.MAX_SIZE // 512), name=st.sampled_from(["", "lower.raw", "ä" * 50]))
def test_every_table_lies_inside_and_every_cluster_is_counted_once(sectors: int, name: str) -> None:
    octets = qcow2.empty_image(sectors * 512, name, "raw")
    assert len(octets) % qcow2.CLUSTER == 0
    clusters = len(octets) // qcow2.CLUSTER
    magic, version, name_at, name_size, bits, size = struct.unpack_from(">4sIQIIQ", octets)
    assert (magic, version, bits, size) == (b"QFI\xfb", 3, 16, sectors * 512)
    assert octets[name_at : name_at + name_size].decode() == name
    l1_entries, l1_at, table_at, table_clusters = struct.unpack_from(">IQQI", octets, 36)
    assert l1_entries * 512 * MIB >= size > (l1_entries - 1) * 512 * MIB
    assert l1_at + l1_entries * 8 <= len(octets)
    assert not any(octets[l1_at : l1_at + l1_entries * 8])
    block_at, second = struct.unpack_from(">QQ", octets, table_at)
    assert (table_clusters, second) == (1, 0)
    counts = struct.unpack_from(f">{clusters + 1}H", octets, block_at)
    assert counts == (1,) * clusters + (0,)


@pytest.mark.parametrize("size", [0, -512, 511, qcow2.MAX_SIZE + 512])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="no size"):
        qcow2.empty_image(size)


def test_image_file_is_sparse_private_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    qcow2.create(path, 1024 * 1024 * MIB)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 <= 64 * 1024
    path.write_bytes(b"somebody's data")
    qcow2.create(path, MIB)
    assert path.read_bytes() == b"somebody's data"


@pytest.mark.parametrize("octets", [b"", b"QFI\xfb", b"\0" * 4096, b"QFI\xfb" + b"\xff" * 200])
def test_header_of_a_hostile_writer_is_not_believed(tmp_path: Path, octets: bytes) -> None:
    (tmp_path / "x").write_bytes(octets)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    with pytest.raises(ValueError, match=r"not a qcow2|impossible"):
        qcow2.virtual_size(fd)
    os.close(fd)


# -- disk


def raw(path: Path, content: bytes = b"lowest") -> Path:
    path.write_bytes(content)
    os.truncate(path, 4 * MIB)
    return path


def test_disk_is_made_once_and_keeps_its_layers_alive(tmp_path: Path) -> None:
    lowest, baked = raw(tmp_path / "upper.raw"), tmp_path / "baked.qcow2"
    qcow2.create(baked, 8 * MIB)
    made = disk.prepare(tmp_path / "vm", lowest, baked, 16 * MIB)
    lowest.unlink()
    baked.unlink()
    again = disk.prepare(tmp_path / "vm", lowest, None, 99 * MIB)
    assert again == made == disk.load(tmp_path / "vm")
    assert [layer.format for layer in made.layers] == ["raw", "qcow2", "qcow2"]
    assert made.size() == 16 * MIB
    opened = made.open()
    assert os.pread(opened[0], 6, 0) == b"lowest"
    for fd in opened[:-1]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
    assert os.pwrite(opened[-1], b"Q", 0) == 1
    for fd in opened:
        os.close(fd)


def test_disk_left_half_made_is_made_afresh(tmp_path: Path) -> None:
    folder = tmp_path / "vm"
    folder.mkdir()
    (folder / "upper.qcow2").write_bytes(b"half")
    (folder / "layer-1.qcow2").write_bytes(b"half")
    made = disk.prepare(folder, raw(tmp_path / "upper.raw"), None, MIB)
    assert made.size() == MIB
    assert not (folder / "layer-1.qcow2").exists()


@pytest.mark.parametrize(
    "record", [b"{", b"[]", b'[["../../etc/shadow", "raw"]]', b'[{"name": "../x", "format": "raw"}]']
)
def test_damaged_disk_record_is_an_error_and_not_a_new_disk(tmp_path: Path, record: bytes) -> None:
    (tmp_path / "disk.json").write_bytes(record)
    with pytest.raises(VmmError):
        disk.prepare(tmp_path, raw(tmp_path / "upper.raw"), None, MIB)


def test_top_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    made = disk.prepare(tmp_path / "vm", raw(tmp_path / "upper.raw"), None, MIB)
    (tmp_path / "secret").write_bytes(b"s")
    made.top.unlink()
    made.top.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links") as caught:
        made.open()
    assert caught.value.errno == errno.ELOOP


def test_sparse_copy_keeps_holes_and_content(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 5 * MIB + 123, 63 * MIB):
            file.seek(at)
            file.write(os.urandom(5000))
    disk.copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= source.stat().st_blocks + 64


# -- manifest


def described() -> Manifest:
    return Manifest(
        vmm="qemu 7.2.22",
        build="b" * 64,
        arguments=1,
        isolation="emulated",
        cpu="c" * 64,
        tsc_khz=2_000_000,
        network=True,
        shape=Shape(vcpus=1, memory_mib=2, disk_mib=0),
    )


def sealed(tmp_path: Path) -> Baked:
    vm = disk.prepare(tmp_path / "vm", raw(tmp_path / "upper.raw"), None, MIB)
    memory = tmp_path / "vm" / "memory"
    memory.write_bytes(bytes(2 * MIB))
    folder = tmp_path / "baked"
    state = manifest.create_state(folder)
    os.write(state, b"device state")
    manifest.seal_bake(folder, described(), state, memory, vm)
    manifest.close(state)
    return Baked(key="k", folder=folder, shape=Shape(vcpus=1, memory_mib=2, disk_mib=512))


def test_sealed_snapshot_is_read_only_and_loads(tmp_path: Path) -> None:
    baked = sealed(tmp_path)
    for path in (baked.memory, baked.state, baked.upper):
        assert stat.S_IMODE(path.stat().st_mode) == 0o444
    manifest.verify(baked, described())


@pytest.mark.parametrize(
    ("member", "value", "word"),
    [
        ("build", "x", "build of the VMM"),
        ("arguments", 2, "version of its arguments"),
        ("isolation", "hardware", "isolation"),
        ("cpu", "x", "CPU"),
        ("tsc_khz", 3_000_000, "frequency of the time-stamp counter"),
        ("network", False, "network"),
        ("shape", Shape(vcpus=2, memory_mib=2, disk_mib=0), "virtual CPUs"),
    ],
)
def test_every_condition_is_checked_and_named(tmp_path: Path, member: str, value: object, word: str) -> None:
    baked = sealed(tmp_path)
    with pytest.raises(SnapshotMismatch, match=word):
        manifest.verify(baked, msgspec.structs.replace(described(), **{member: value}))


def test_damage_is_found(tmp_path: Path) -> None:
    baked = sealed(tmp_path)
    os.chmod(baked.state, 0o600)
    baked.state.write_bytes(b"device stale")
    with pytest.raises(SnapshotMismatch, match=r"state.*damaged"):
        manifest.verify(baked, described())
    os.chmod(baked.memory, 0o600)
    os.truncate(baked.memory, MIB)
    with pytest.raises(SnapshotMismatch, match="memory"):
        manifest.verify(baked, described())
    (baked.folder / manifest.FILE).write_bytes(b"{")
    with pytest.raises(SnapshotMismatch, match="damaged"):
        manifest.verify(baked, described())
    (baked.folder / manifest.FILE).unlink()
    with pytest.raises(SnapshotMismatch, match="no manifest"):
        manifest.verify(baked, described())


def test_empty_state_is_refused(tmp_path: Path) -> None:
    vm = disk.prepare(tmp_path / "vm", raw(tmp_path / "upper.raw"), None, MIB)
    (tmp_path / "memory").write_bytes(b"m")
    state = manifest.create_state(tmp_path / "baked")
    with pytest.raises(VmmError, match="0 octets"):
        manifest.seal_bake(tmp_path / "baked", described(), state, tmp_path / "memory", vm)
    manifest.close(state)
    assert (tmp_path / "memory").exists()


# -- tree


@pytest.fixture
def program() -> Path:
    found = shutil.which("sh")
    assert found is not None
    return Path(found).resolve()


def test_tree_runs_its_program_with_its_own_libraries(tmp_path: Path, program: Path) -> None:
    made = tree.build(tmp_path, tree.gather(program))
    loader = tree.interpreter(program)
    assert loader is not None
    inside = made.folder / str(loader).lstrip("/")
    done = subprocess.run(
        [inside, "--library-path", made.folder / "libraries", made.folder / "vmm", "-c", "echo $((6*7))"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == "42\n"
    listed = subprocess.run(
        [inside, "--library-path", made.folder / "libraries", "--list", made.folder / "vmm"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout
    assert f"{made.folder}/libraries/" in listed
    assert "=> /lib" not in listed
    assert "=> /usr" not in listed


def test_tree_is_read_only_made_once_and_named_by_its_content(tmp_path: Path, program: Path) -> None:
    files = tree.gather(program)
    first = tree.build(tmp_path, files)
    before = first.folder.stat().st_ino
    assert tree.build(tmp_path, files) == first
    assert first.folder.stat().st_ino == before
    for current, folders, names in os.walk(first.folder):
        for name in (*folders, *names):
            assert stat.S_IMODE((Path(current) / name).stat().st_mode) == 0o555
    extra = tmp_path / "extra"
    extra.write_bytes(b"kernel")
    other = tree.build(tmp_path, {"/kernel": extra}, like=first)
    assert other.digest != first.digest
    assert (other.folder / "kernel").read_bytes() == b"kernel"
    assert (other.folder / "vmm").stat().st_ino == (first.folder / "vmm").stat().st_ino
    extra.write_bytes(b"kernel 2")
    assert tree.build(tmp_path, {"/kernel": extra}, like=first).digest != other.digest


def test_tree_survives_a_crash_in_the_middle(tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tree.gather(program)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space"):
            tree.build(tmp_path, files)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / ".making-old").mkdir()
    made = tree.build(tmp_path, files)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", made.digest]
    assert hashlib.sha256((made.folder / "vmm").read_bytes()).digest() == hashlib.sha256(program.read_bytes()).digest()


def test_missing_parts_are_named(tmp_path: Path, program: Path) -> None:
    with pytest.raises(VmmMissing, match=r"bios\.bin"):
        tree.gather(program, firmware=[tmp_path / "bios.bin"])
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n" + "#" * 100)
    with pytest.raises(VmmError, match="ELF"):
        tree.gather(script)
