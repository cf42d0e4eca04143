"""Archives: what is written is read, and nothing else: not altered, cut off, longer, of a stranger, too large, under another passphrase."""

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hatchway.domain.errors import HatchwayError
from hatchway.domain.lifecycle import SnapshotKind
from hatchway.domain.shapes import Shape
from hatchway.node.artifacts import archive, extents, layers, memory, sealed
from hatchway.node.artifacts.archive import Manifest, Part, Template
from hatchway.node.artifacts.extents import GRAIN, Extent, ExtentError
from hatchway.node.vmm import captures, disk, qcow2
from hatchway.node.vmm.seam import SnapshotMismatch, VmmError

MIB = 1 << 20
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
TRUSTED = {"key-1": KEY.public_key()}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def manifest(**more: object) -> Manifest:
    members: dict[str, object] = {
        "kind": SnapshotKind.DISK,
        "key_id": "key-1",
        "created_at": 1.0,
        "source": "a" * 20,
        "template": Template(name="seed", tag="latest", digest="sha256:" + "0" * 64),
        "shape": Shape(disk_mib=512),
        "hostname": "box",
        "labels": {"name": "x", "metadata": {"k": "v"}},
    }
    return Manifest(**{**members, **more})  # type: ignore[arg-type]


def write(
    path: Path,
    parts: dict[str, bytes],
    described: Manifest | None = None,
    change: Callable[[bytes], bytes] | None = None,
) -> Path:
    """An archive; `change` changes its head before it is signed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    writer = archive.Writer(fd)
    for name, octets in parts.items():
        writer.add(name, [octets[: len(octets) // 2], octets[len(octets) // 2 :]])
    head = writer.finish(described or manifest())
    head = head if change is None else change(head)
    archive.seal(fd, head, archive.signed(KEY, head))
    os.close(fd)
    return path


def opened(path: Path) -> archive.Archive:
    found = archive.read(os.open(path, os.O_RDONLY), TRUSTED)
    found.verify()
    return found


@pytest.mark.parametrize(
    ("boot_id", "labels", "of_snapshot", "processes"),
    [
        ("", {}, True, 0),
        ("imported", {"name": "x"}, False, 0),
        ("b", {"snapshot": None, "processes": "12"}, False, 12),
        ("", {"snapshot": None}, False, 0),
        ("", {"snapshot": "s" * 20, "processes": "7"}, True, 7),
        ("b", {"snapshot": "s" * 20, "processes": "-1"}, True, 0),
        ("b", {"snapshot": None, "processes": "9" * 12}, False, 0),
        ("b", {"snapshot": None, "processes": 3}, False, 0),
    ],
)
def test_an_archive_tells_whether_it_is_a_snapshots(
    tmp_path: Path, boot_id: str, labels: dict[str, object], of_snapshot: bool, processes: int
) -> None:
    """With the label and, as before there was one, without."""
    found = opened(write(tmp_path / "one", {"disk": b"d"}, manifest(boot_id=boot_id, labels=labels))).manifest
    assert (found.of_snapshot, found.processes) == (of_snapshot, processes)


def refused(path: Path) -> str:
    with pytest.raises(HatchwayError) as caught:
        opened(path)
    return caught.value.code


def remade(head: bytes, **members: object) -> bytes:
    """The head with other members of its manifest."""
    found = msgspec.json.decode(head[16:])
    octets = msgspec.json.encode({**found, **members})
    return head[:12] + struct.pack(">I", len(octets)) + octets


# -- the archive


def test_parts_come_back(tmp_path: Path) -> None:
    parts = {"disk": bytes(3 * MIB) + os.urandom(100), "template": b""}
    found = opened(write(tmp_path / "a", parts))
    assert {part.name: b"".join(found.open(part.name).chunks()) for part in found.manifest.parts} == parts
    assert found.manifest.labels == {"name": "x", "metadata": {"k": "v"}}
    assert (tmp_path / "a").stat().st_size < archive.HEADER + 2000


def test_every_bit_counts(tmp_path: Path) -> None:
    octets = bytearray(write(tmp_path / "a", {"disk": os.urandom(3000)}).read_bytes())
    step = 211
    places = [
        *range(0, 2000, 7),
        *range(2000, archive.HEADER, 5003),
        *range(archive.HEADER, len(octets), step),
        len(octets) - 1,
    ]
    for place in places:
        octets[place] ^= 1 << place % 8
        (tmp_path / "b").write_bytes(octets)
        assert refused(tmp_path / "b").startswith("archive_"), place
        octets[place] ^= 1 << place % 8
    (tmp_path / "b").write_bytes(octets)
    opened(tmp_path / "b")


@pytest.mark.parametrize("cut", [0, 1, 16, 1000, archive.HEADER - 1, archive.HEADER, archive.HEADER + 1, -1])
def test_a_truncated_one_is_refused(tmp_path: Path, cut: int) -> None:
    octets = write(tmp_path / "a", {"disk": os.urandom(3000)}).read_bytes()
    (tmp_path / "a").write_bytes(octets[:cut])
    assert refused(tmp_path / "a") == "archive_invalid"


def test_trailing_garbage_is_refused(tmp_path: Path) -> None:
    with write(tmp_path / "a", {"disk": b"x"}).open("ab") as file:
        file.write(b"\0")
    assert refused(tmp_path / "a") == "archive_invalid"


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {"disk": b"x"}, manifest(key_id="other"))
    assert refused(tmp_path / "a") == "archive_untrusted"


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", {"disk": b"x"}, change=lambda head: head[:8] + struct.pack(">I", 2) + head[12:])
    assert refused(tmp_path / "a") == "archive_too_new"


_PART = msgspec.to_builtins(Part(name="disk", stored=0, sha256="0" * 64, size=0))


@pytest.mark.parametrize(
    "members",
    [
        {"parts": [{**_PART, "name": "../disk"}]},
        {"parts": [{**_PART, "name": "/etc/passwd"}]},
        {"parts": [{**_PART, "name": "template.../x"}]},
        {"parts": [{**_PART, "name": "disk\0"}]},
        {"parts": [_PART, _PART]},
        {"parts": []},
        {"parts": [{**_PART, "size": 600 * MIB}]},
        {"parts": [{**_PART, "size": -1}]},
        {"parts": [{**_PART, "stored": 1 << 60}]},
        {"parts": [_PART, {**_PART, "name": "memory"}]},
        {"parts": [_PART] * 40},
        {"kind": "full"},
        {"kind": "half"},
        {"shape": {"vcpus": 0, "memory_mib": 512, "disk_mib": 512}},
        {"shape": {"vcpus": 1, "memory_mib": 1 << 40, "disk_mib": 512}},
        {"shape": {"vcpus": 1, "memory_mib": 512, "disk_mib": 1 << 40}},
        {"template": {"name": "a", "tag": "b", "digest": "../../x"}},
        {"unknown": 1},
        {"labels": []},
        {"created_at": "then"},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused_whoever_signed_it(tmp_path: Path, members: dict[str, object]) -> None:
    write(tmp_path / "a", {"disk": b""}, change=lambda head: remade(head, **members))
    assert refused(tmp_path / "a") == "archive_invalid"


def test_a_part_that_unpacks_to_more_than_it_says_is_cut_off(tmp_path: Path) -> None:
    def change(head: bytes) -> bytes:
        parts = msgspec.json.decode(head[16:])["parts"]
        parts[0]["size"] = 1000
        return remade(head, parts=parts)

    found = opened(write(tmp_path / "a", {"disk": bytes(100 * MIB)}, change=change))
    with pytest.raises(HatchwayError) as caught:
        found.open("disk").all(10_000)
    assert caught.value.code == "archive_invalid"
    with pytest.raises(HatchwayError):
        found.open("disk").all(10)


@quick
@given(octets=st.binary(max_size=300))
def test_noise_is_refused(tmp_path: Path, octets: bytes) -> None:
    (tmp_path / "a").write_bytes((archive.MAGIC + struct.pack(">I", 1) + octets).ljust(archive.HEADER, b"\0"))
    assert refused(tmp_path / "a").startswith("archive_")


# -- under a passphrase


def through(opener: sealed.Opener, octets: bytes, step: int) -> bytes:
    out = [piece for at in range(0, len(octets), step) for piece in opener.feed(octets[at : at + step])]
    return b"".join(out) + opener.finish()


@pytest.mark.parametrize("size", [0, 1, sealed.CHUNK - 1, sealed.CHUNK, sealed.CHUNK + 1, 3 * sealed.CHUNK])
def test_what_is_sealed_opens(size: int) -> None:
    plain = os.urandom(size)
    octets = b"".join(sealed.seal_all(b"word", b"s" * 16, [plain[:70], plain[70:]]))
    assert len(octets) == sealed.Sealer.size(size)
    assert sealed.is_sealed(octets)
    assert through(sealed.Opener(b"word"), octets, 50_000) == plain


def test_another_passphrase_and_every_change_are_noticed() -> None:
    octets = b"".join(sealed.seal_all(b"word", b"s" * 16, [os.urandom(sealed.CHUNK + 10)]))
    with pytest.raises(HatchwayError) as caught:
        through(sealed.Opener(b"Word"), octets, 1000)
    assert caught.value.code == "passphrase_wrong"
    cut = sealed.HEAD + sealed.CHUNK + sealed.TAG
    swapped = octets[: sealed.HEAD] + octets[cut:] + octets[sealed.HEAD : cut]
    for bad in (
        octets[:-1],
        octets[:cut],
        octets[:30],
        b"",
        octets + b"x",
        swapped,
        octets[:100] + bytes([octets[100] ^ 1]) + octets[101:],
    ):
        with pytest.raises(HatchwayError) as caught:
            through(sealed.Opener(b"word"), bad, 100_000)
        assert caught.value.code in ("archive_altered", "archive_invalid")


# -- sparse streams

pieces = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["data", "zero"])), max_size=20, unique_by=lambda one: one[0]
)


@quick
@given(pieces=pieces)
def test_extents_come_back(pieces: list[tuple[int, str]]) -> None:
    said = [
        Extent(at * GRAIN, GRAIN, bytes([at + 1]) * GRAIN if kind == "data" else None) for at, kind in sorted(pieces)
    ]
    octets = b"".join(extents.encode(said, 41 * GRAIN))
    assert list(extents.decode(io.BytesIO(octets), 41 * GRAIN, 41 * GRAIN)) == said
    with pytest.raises(ExtentError):
        list(extents.decode(io.BytesIO(octets[:-1]), 41 * GRAIN, 41 * GRAIN))
    with pytest.raises(ExtentError):
        list(extents.decode(io.BytesIO(octets + b"x"), 41 * GRAIN, 41 * GRAIN))
    if any(kind == "data" for _, kind in pieces):
        with pytest.raises(ExtentError, match="announced"):
            list(extents.decode(io.BytesIO(octets), 41 * GRAIN, GRAIN - 1))


@quick
@given(
    octets=st.binary(max_size=100),
    records=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 5))),
)
def test_any_stream_is_read_within_its_bounds(octets: bytes, records: list[tuple[int, int, int]]) -> None:
    stream = b"".join(extents.HEAD.pack(*record) for record in records) + octets
    try:
        for extent in extents.decode(io.BytesIO(stream), 10 * GRAIN, 10 * GRAIN):
            assert 0 <= extent.offset < extent.offset + extent.length <= 10 * GRAIN
    except ExtentError:
        pass


# -- disks and memories

SIZE = 514 * MIB


def lowest(folder: Path) -> Path:
    """An empty file system: some data, and holes."""
    path = folder / "template.raw"
    path.write_bytes(b"L" * 3 * GRAIN)
    os.truncate(path, 512 * MIB)
    return path


def layered(folder: Path, *tops: list[Extent]) -> disk.Disk:
    """A disk of layers that have these extents."""
    disk.link_or_copy(lowest(folder), folder / disk.LOWEST)
    names = [disk.LayerFile(disk.LOWEST, "raw")]
    for number, said in enumerate(tops):
        names.append(disk.LayerFile("layer-1.qcow2" if number < len(tops) - 1 else disk.TOP, "qcow2"))
        layers.write_layer(folder / names[-1].name, SIZE, said)
    return disk.Disk(folder, tuple(names))


def data(at: int, octet: bytes) -> Extent:
    return Extent(at, GRAIN, octet * GRAIN)


def test_layers_are_flattened_and_made_again(tmp_path: Path) -> None:
    far = 513 * MIB
    made = layered(
        tmp_path,
        [data(0, b"a"), data(GRAIN, b"b"), Extent(2 * GRAIN, GRAIN, None), data(far, b"c")],
        [data(GRAIN, b"d"), data(5 * GRAIN, b"\0"), data(100 * MIB, b"e"), Extent(far, GRAIN, None)],
    )
    flat = list(layers.flattened(made))
    expected = [
        data(0, b"a"),
        data(GRAIN, b"d"),
        Extent(2 * GRAIN, GRAIN, None),
        Extent(5 * GRAIN, GRAIN, None),
        data(100 * MIB, b"e"),
    ]
    assert flat == expected
    (tmp_path / "again").mkdir()
    again = layered(tmp_path / "again", flat)
    assert list(layers.flattened(again)) == flat
    assert again.size() == SIZE
    assert again.top.stat().st_size < 20 * GRAIN

    # As one raw file, and from that back.
    layers.write_raw(tmp_path / "whole.raw", lowest(tmp_path / "again"), SIZE, flat)
    with (tmp_path / "whole.raw").open("rb") as whole:
        assert whole.read(6 * GRAIN) == b"a" * GRAIN + b"d" * GRAIN + bytes(4 * GRAIN)
        whole.seek(100 * MIB)
        assert whole.read(GRAIN) == b"e" * GRAIN
    from_raw = list(layers.flattened_raw(tmp_path / "whole.raw", tmp_path / "template.raw"))
    assert [one for one in from_raw if one.offset != 5 * GRAIN] == [one for one in expected if one.offset != 5 * GRAIN]
    assert (tmp_path / "whole.raw").stat().st_blocks * 512 < 2 * MIB


def test_every_cluster_of_a_made_layer_is_counted_once(tmp_path: Path) -> None:
    many = [data(at * 2 * GRAIN, b"x") for at in range(3000)]
    path = layered(tmp_path, many).top
    octets = path.read_bytes()
    clusters = len(octets) // GRAIN
    (block,) = struct.unpack_from(">Q", octets, GRAIN)
    assert struct.unpack_from(f">{GRAIN // 2}H", octets, block) == (1,) * clusters + (0,) * (GRAIN // 2 - clusters)
    assert (
        list(
            layers.flattened(
                disk.Disk(tmp_path, (disk.LayerFile(disk.LOWEST, "raw"), disk.LayerFile(disk.TOP, "qcow2")))
            )
        )
        == many
    )


@quick
@given(place=st.integers(0, 5 * qcow2.CLUSTER), octets=st.binary(min_size=1, max_size=16))
@example(place=40, octets=b"\xff" * 8)  # where its first table is: no offset of any file
def test_a_layer_of_a_hostile_monitor_is_refused_or_read_from_itself(tmp_path: Path, place: int, octets: bytes) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    made = layered(tmp_path, [data(0, b"a"), data(GRAIN, b"b")])
    with made.top.open("r+b") as file:
        file.seek(place)
        file.write(octets)
    try:
        found = list(layers.flattened(made))
    except VmmError:
        return
    assert sum(extent.length for extent in found) <= 64 * MIB


def capture(folder: Path, size: int, base: dict[int, bytes], changed: list[tuple[int, bytes]]) -> Path:
    folder.mkdir()
    with (folder / captures.BASE).open("wb") as file:
        os.ftruncate(file.fileno(), size)
        for at, octets in base.items():
            os.pwrite(file.fileno(), octets, at)
    table = b"".join(struct.pack("<QQ", at // 4096, len(octets) // 4096) for at, octets in changed)
    head = struct.pack("<8sQQQ", b"HWCAP1\0\0", 4096, size, len(changed))
    (folder / captures.DIFF).write_bytes(head + table + b"".join(octets for _, octets in changed))
    return folder


@quick
@given(
    base=st.dictionaries(st.integers(0, 63), st.integers(0, 255), max_size=8),
    changed=st.dictionaries(st.integers(0, 2047), st.integers(0, 255), max_size=12),
)
def test_the_whole_memory_is_base_and_changes(
    tmp_path_factory: pytest.TempPathFactory, base: dict[int, int], changed: dict[int, int]
) -> None:
    size = 8 * MIB
    folder = capture(
        tmp_path_factory.mktemp("capture") / "c",
        size,
        {at * 32 * 4096: bytes([octet]) * 4096 for at, octet in base.items()},
        [(at * 4096, bytes([octet]) * 4096) for at, octet in changed.items()],
    )
    expected = bytearray(size)
    for source in ({at * 32: octet for at, octet in base.items()}, changed):
        for at, octet in source.items():
            expected[at * 4096 : (at + 1) * 4096] = bytes([octet]) * 4096
    with (folder / "out").open("w+b") as out:
        os.ftruncate(out.fileno(), size)
        extents.write_sparse(out.fileno(), memory.whole(folder, size))
        assert os.pread(out.fileno(), size, 0) == bytes(expected)


def test_a_damaged_list_of_changes_is_noticed(tmp_path: Path) -> None:
    folder = capture(tmp_path / "c", MIB, {}, [(0, b"x" * 4096)])
    os.truncate(folder / captures.DIFF, 3000)
    with pytest.raises(SnapshotMismatch):
        list(memory.whole(folder, MIB))
