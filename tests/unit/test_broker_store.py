"""Sealed sources: nothing readable on the disk, nothing taken that was changed, nothing lost when a process ends in the middle."""

import base64
import errno
import os
import pickle
from pathlib import Path

import msgspec
import pytest

from hatchway.broker.secret import Secret
from hatchway.broker.store import KEY_OCTETS, MasterKey, Store, read_keys, read_private
from hatchway.domain.errors import Conflict, HatchwayError, Unavailable
from hatchway.wire import handed
from hatchway.wire.broker import Source, VaultPath

VALUE = b"c4n4ry-value-of-the-source"
SOURCE = Source(project="default", name="github", hosts=("api.example",), value=VALUE)


def other(**changes: object) -> Source:
    return msgspec.structs.replace(SOURCE, **changes)


def key() -> MasterKey:
    return MasterKey(os.urandom(KEY_OCTETS))


def test_a_value_comes_back_in_the_next_life(tmp_path: Path) -> None:
    Store(tmp_path).put(SOURCE)
    again = Store(tmp_path)
    secret = again.secret("default", "github")
    assert secret.reveal() == VALUE
    found = again.find("default", "github")
    assert found is not None
    assert (found.hosts, found.version, found.value) == (("api.example",), 1, None)
    assert again.find("other", "github") is None


def test_nothing_readable_lies_on_the_disk(tmp_path: Path) -> None:
    Store(tmp_path).put(SOURCE)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        if path.is_file():
            content = path.read_bytes()
            assert VALUE not in content
            assert VALUE[:8] not in content
            assert base64.b64encode(VALUE)[:8] not in content


def test_the_same_value_is_sealed_anew_each_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (file,) = _put(store, tmp_path)
    first = file.read_bytes()
    store.put(other(version=2))
    assert file.read_bytes()[-40:] != first[-40:]


def _put(store: Store, folder: Path) -> list[Path]:
    store.put(SOURCE)
    return list((folder / "sources").glob("*.sealed"))


@pytest.mark.parametrize("at", [0, 5, 20, 60, -1])
def test_a_file_that_was_changed_is_not_used(tmp_path: Path, at: int) -> None:
    store = Store(tmp_path)
    (file,) = _put(store, tmp_path)
    store.put(other(name="whole"))
    octets = bytearray(file.read_bytes())
    octets[at] ^= 1
    file.write_bytes(octets)
    again = Store(tmp_path)
    with pytest.raises(Unavailable, match="source_damaged"):
        again.find("default", "github")
    assert again.secret("default", "whole").reveal() == VALUE
    again.put(other(version=2))
    assert Store(tmp_path).secret("default", "github").reveal() == VALUE


def test_a_file_in_the_place_of_another_is_not_used(tmp_path: Path) -> None:
    """Who can write the folder, and has no key, cannot give one project the secret of another, nor widen its hosts."""
    store = Store(tmp_path)
    (mine,) = _put(store, tmp_path)
    store.put(other(project="tenant", value=b"c4n4ry-of-the-tenant"))
    (theirs,) = [file for file in (tmp_path / "sources").glob("*.sealed") if file != mine]
    theirs.write_bytes(mine.read_bytes())
    widened = mine.read_bytes().replace(b"api.example", b"api.evil-ex")
    mine.write_bytes(widened)
    again = Store(tmp_path)
    for project in ("default", "tenant"):
        with pytest.raises(Unavailable, match="source_damaged"):
            again.find(project, "github")


def test_a_damaged_file_can_be_deleted(tmp_path: Path) -> None:
    (file,) = _put(Store(tmp_path), tmp_path)
    file.write_bytes(b"HWS1")
    again = Store(tmp_path)
    assert again.delete("default", "github")
    assert again.find("default", "github") is None
    assert not again.delete("default", "github")


def test_an_older_version_does_not_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(other(version=3))
    with pytest.raises(Conflict, match="stale_version"):
        store.put(other(version=2))
    store.put(other(version=3, hosts=("b.example",)))  # a repetition


def test_without_a_value_there_is_nothing_to_open(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = VaultPath(server="main", mount="m", path="p", field="f")
    store.put(other(value=None, vault=path))
    found = Store(tmp_path).find("default", "github")
    assert found is not None
    assert found.vault == path
    with pytest.raises(Unavailable, match="source_unknown"):
        store.secret("default", "github")


# -- master keys


def test_a_rotation_seals_everything_anew_and_drops_the_old_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in "abc":
        store.put(other(name=name))
    old, before = store.key_id, (tmp_path / "master.keys").read_bytes()
    assert store.rotate() == 3
    assert store.key_id != old
    assert len((tmp_path / "master.keys").read_bytes().split()) == 1
    assert (tmp_path / "master.keys").read_bytes() != before
    again = Store(tmp_path)
    assert [again.secret("default", name).reveal() for name in "abc"] == [VALUE] * 3
    (tmp_path / "master.keys").write_bytes(before)
    (tmp_path / "master.keys").chmod(0o600)
    with pytest.raises(Unavailable, match="source_damaged"):
        Store(tmp_path).find("default", "a")


@pytest.mark.parametrize("full_at", range(1, 6))
def test_a_rotation_that_ends_in_the_middle_goes_on(
    tmp_path: Path, full_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at each of its writes in turn: the keys, each file, the keys again."""
    store = Store(tmp_path)
    for name in "abc":
        store.put(other(name=name))
    writes = 0

    def reached(kind: str, name: str) -> None:
        nonlocal writes
        writes += kind == "file"
        if writes == full_at:
            raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr("hatchway.wire.small_files.reached", reached)
        with pytest.raises(OSError, match="full"):
            store.rotate()
    again = Store(tmp_path)
    assert [again.secret("default", name).reveal() for name in "abc"] == [VALUE] * 3
    assert len((tmp_path / "master.keys").read_bytes().split()) == 1
    store.put(other(version=2))  # the process that failed goes on as well


def test_keys_of_the_operator(tmp_path: Path) -> None:
    old, new = key(), key()
    store = Store(tmp_path, [old])
    store.put(SOURCE)
    assert not (tmp_path / "master.keys").exists()
    with pytest.raises(Conflict, match="master_key_foreign"):
        store.rotate()
    assert Store(tmp_path, [new, old]).secret("default", "github").reveal() == VALUE
    assert Store(tmp_path, [new]).secret("default", "github").reveal() == VALUE
    with pytest.raises(Unavailable, match="source_damaged"):
        Store(tmp_path, [old]).find("default", "github")


def test_a_lost_key_is_told_and_no_other_is_made(tmp_path: Path) -> None:
    Store(tmp_path).put(SOURCE)
    (tmp_path / "master.keys").unlink()
    with pytest.raises(Unavailable, match="master_key_missing"):
        Store(tmp_path)
    assert not (tmp_path / "master.keys").exists()


@pytest.mark.parametrize("text", [b"", b"short", b"!!!", base64.b64encode(b"x" * 31)])
def test_what_is_no_key_is_refused_without_a_word_of_it(text: bytes) -> None:
    with pytest.raises(Unavailable) as error:
        read_keys(text, "the place")
    assert error.value.code == "master_key_invalid"
    assert not text or text.decode() not in str(error.value.as_dict())


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    Store(tmp_path)
    (tmp_path / "master.keys").chmod(0o640)
    with pytest.raises(Unavailable, match="unsafe_file"):
        Store(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "master.keys")
    with pytest.raises(OSError, match="symbolic"):
        read_private(link)


# -- in memory


def test_a_secret_shows_itself_nowhere() -> None:
    secret = Secret(VALUE)
    assert "c4n4ry" not in f"{secret} {secret!r} {key()!r} {SOURCE!r} {[SOURCE]}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    secret.wipe()
    secret.wipe()
    with pytest.raises(ValueError, match="closed"):
        secret.reveal()


def test_errors_have_nothing_of_a_value() -> None:
    with pytest.raises(HatchwayError) as error:
        Secret(VALUE + b"\r\nx: y")
    assert "c4n4ry" not in str(error.value.as_dict()) + str(error.value)


def test_variables_are_taken_from_a_sealed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "c4n4ry=with=signs")
    monkeypatch.setenv("TWO", "two")
    became: list[tuple[str, list[str], dict[str, str]]] = []

    class Became(Exception):
        pass

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        became.append((path, argv, env))
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Became):
        handed.hand_over({"TAKEN": ["ONE", "TWO", "THREE"]}, ["/bin/program", "up"])
    ((path, argv, env),) = became
    assert (path, argv) == ("/bin/program", ["/bin/program", "up"])
    assert "c4n4ry" not in str(env)
    monkeypatch.setenv("TAKEN", env["TAKEN"])
    monkeypatch.delenv("ONE")
    fd = handed.hand_over({"TAKEN": ["ONE"]})["TAKEN"]
    assert fd == int(env["TAKEN"])
    assert "TAKEN" not in os.environ
    assert handed.value(fd, "ONE") == b"c4n4ry=with=signs"
    assert handed.value(fd, "TWO") == b"two"
    assert handed.value(fd, "THREE") is None
    with pytest.raises(OSError, match="not permitted"):
        os.write(fd, b"x")
    os.close(fd)


def test_without_variables_nothing_is_handed_over() -> None:
    assert handed.hand_over({"TAKEN": ["HATCHWAY_NOT_THERE"]}) == {}
