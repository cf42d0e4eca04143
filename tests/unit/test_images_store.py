"""References, tags, digests, and what a reader does about damage and crashes."""

import hashlib
from pathlib import Path

import msgspec
import pytest

from hatchway.domain.errors import InvalidRequest, NotFound, Unavailable
from hatchway.node.images import files
from hatchway.node.images.manifest import Manifest, Part, Reference, parse_reference
from hatchway.node.images.store import Images, set_tag

PARTS = {"kernel": "vmlinuz", "initrd": "initrd", "base": "base.erofs", "upper": "upper.raw"}


def manifest(contents: dict[str, bytes], **changes: object) -> Manifest:
    values: dict[str, object] = {
        "format": 1,
        "name": "seed",
        "tag": "latest",
        "description": "",
        "architecture": "x86_64",
        "kernel_release": "6.1",
        "cmdline": "quiet",
        "parts": {
            kind: Part(file=file, sha256=hashlib.sha256(contents[kind]).hexdigest(), size_bytes=len(contents[kind]))
            for kind, file in PARTS.items()
        },
        "made_of": {"b": "2", "a": "1"},
        "created_at": 1.5,
    }
    return msgspec.convert({**values, **changes}, Manifest)


def publish(folder: Path, tag: str | None = "latest", seed: bytes = b"", **changes: object) -> str:
    contents = {kind: kind.encode() + seed for kind in PARTS}
    made = folder / "made"
    made.mkdir()
    for kind, file in PARTS.items():
        (made / file).write_bytes(contents[kind])
    described = manifest(contents, **changes)
    (made / "manifest.json").write_bytes(described.encode())
    digest = described.digest()
    (folder / "templates").mkdir(exist_ok=True)
    files.publish_folder(made, folder / "templates" / digest.removeprefix("sha256:"), file_mode=0o644)
    if tag is not None:
        set_tag(folder, described.name, tag, digest)
    return digest


def test_digest_covers_everything_but_the_time() -> None:
    contents = {kind: kind.encode() for kind in PARTS}
    one = manifest(contents)
    assert one.digest() == manifest(contents, created_at=99.0).digest()
    assert one.digest() == manifest(contents, made_of={"a": "1", "b": "2"}).digest()
    changed = [{"cmdline": "x"}, {"tag": "v2"}, {"kernel_release": "6.2"}, {"made_of": {}}]
    assert len({one.digest(), *(manifest(contents, **change).digest() for change in changed)}) == 5
    assert one.digest() != manifest({**contents, "base": b"other"}).digest()
    # written down once: it must never change, or every release would get another name
    assert one.digest() == "sha256:fb01a20a917abd165fec1c4b65d5c72e9e394e10a88b32d197a2da5c3b945121"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed", Reference(name="seed", tag="latest")),
        ("seed:v1.2_A", Reference(name="seed", tag="v1.2_A")),
        ("a.b-c_1:0", Reference(name="a.b-c_1", tag="0")),
        ("seed@sha256:" + "a" * 64, Reference(name="seed", digest="sha256:" + "a" * 64)),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "seed:",
        ":latest",
        "Seed",
        "-seed",
        "seed-",
        "../seed",
        "seed/x",
        "seed:..",
        "seed:a/b",
        "seed@",
        "seed@sha256:" + "A" * 64,
        "seed@sha256:" + "a" * 63,
        "seed:x@sha256:" + "a" * 64,
        "a" * 64,
        "seed:" + "t" * 129,
        "seed\n",
        "seed:latest\n",
        "sé",
        "seed\0",
    ],
)
def test_malformed_references(text: str) -> None:
    with pytest.raises(InvalidRequest, match="malformed_template"):
        parse_reference(text)


def test_resolves_by_name_tag_and_digest(tmp_path: Path) -> None:
    first = publish(tmp_path, seed=b"1")
    second = publish(tmp_path, seed=b"2")
    images = Images(tmp_path)
    assert images.resolve("seed").digest == second
    assert images.resolve("seed:latest").digest == second
    assert images.resolve(f"seed@{first}").digest == first
    release = images.resolve_digest(first)
    boot = release.boot_files()
    assert boot.base.read_bytes() == b"base1"
    assert (boot.kernel.name, boot.initrd.name, boot.upper.name, boot.cmdline) == (
        "vmlinuz",
        "initrd",
        "upper.raw",
        "quiet",
    )
    release.verify()
    (listed,) = images.list()
    assert (listed.name, listed.tag, listed.digest) == ("seed", "latest", second)


def test_a_second_tag_is_listed_under_its_own_name(tmp_path: Path) -> None:
    digest = publish(tmp_path)
    set_tag(tmp_path, "seed", "stable", digest)
    assert [(item.tag, item.digest) for item in Images(tmp_path).list()] == [("latest", digest), ("stable", digest)]


def test_unknown_references_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as empty:
        Images(tmp_path).resolve("seed")
    assert "No template is built yet" in empty.value.remedy
    digest = publish(tmp_path)
    for reference in ("other", "seed:v2", "seed@sha256:" + "0" * 64, f"other@{digest}"):
        with pytest.raises(NotFound) as caught:
            Images(tmp_path).resolve(reference)
        assert caught.value.code == "unknown_template"
        assert "seed:latest" in caught.value.remedy


def test_what_a_crash_left_is_not_seen(tmp_path: Path) -> None:
    digest = publish(tmp_path)
    (tmp_path / "tags/seed/.latest.77.new").write_text("sha256:")
    (tmp_path / "templates" / ("0" * 64)).mkdir()
    images = Images(tmp_path)
    assert [item.digest for item in images.list()] == [digest]
    with pytest.raises(NotFound):
        images.resolve_digest("sha256:" + "0" * 64)


def test_damage_is_found(tmp_path: Path) -> None:
    digest = publish(tmp_path)
    images = Images(tmp_path)
    base = images.resolve("seed").boot_files().base
    base.write_bytes(b"bade")
    with pytest.raises(Unavailable, match=r"base\.erofs has digest"):
        images.resolve("seed").verify()
    base.write_bytes(b"bas")
    with pytest.raises(Unavailable, match=r"base\.erofs is not the file of 4 octets"):
        images.resolve("seed")
    base.unlink()
    base.symlink_to("/etc/passwd")
    with pytest.raises(Unavailable, match="template_damaged"):
        images.resolve_digest(digest)
    assert images.list() == ()


@pytest.mark.parametrize("data", [b"", b"{", b'{"format": 1}', b"\xff" * 100])
def test_malformed_manifests(tmp_path: Path, data: bytes) -> None:
    digest = publish(tmp_path)
    (tmp_path / "templates" / digest.removeprefix("sha256:") / "manifest.json").write_bytes(data)
    with pytest.raises(Unavailable, match="template_damaged"):
        Images(tmp_path).resolve("seed")


def test_a_changed_manifest_is_found(tmp_path: Path) -> None:
    digest = publish(tmp_path)
    path = tmp_path / "templates" / digest.removeprefix("sha256:") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"quiet", b"init=/x"))
    with pytest.raises(Unavailable, match="its manifest was changed"):
        Images(tmp_path).resolve("seed")


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "."])
def test_a_part_outside_the_release_is_refused(tmp_path: Path, file: str) -> None:
    contents = {kind: kind.encode() for kind in PARTS}
    parts = {**manifest(contents).parts, "base": Part(file=file, sha256="", size_bytes=0)}
    publish(tmp_path, parts=msgspec.to_builtins(parts))
    with pytest.raises(Unavailable, match="template_damaged"):
        Images(tmp_path).resolve("seed")


def test_a_tag_is_checked_before_it_becomes_a_path(tmp_path: Path) -> None:
    for name, tag in (("../x", "latest"), ("seed", "../x"), ("seed", ".hidden")):
        with pytest.raises(ValueError, match="not a tag"):
            set_tag(tmp_path, name, tag, "sha256:" + "0" * 64)
