"""The store of artifacts, over each of its backends: what is put is fetched, once for all, verified, and gone with its last user."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.node.artifacts import backends, store
from hatchway.node.artifacts.backends import Backend, connect
from hatchway.node.artifacts.store import PIECE, Store

Made = Callable[[], Backend]


@pytest.fixture(params=["folder", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return connect(f"file://{tmp_path}/store" if request.param == "folder" else "memory://")


def sparse(path: Path, *pieces: bytes) -> Path:
    """A file with a piece of the store for each; b"" is a hole."""
    with path.open("wb") as file:
        os.ftruncate(file.fileno(), PIECE * len(pieces) - 5)
        for number, octets in enumerate(pieces):
            if octets:
                os.pwrite(file.fileno(), octets, number * PIECE)
    return path


async def keys(backend: Backend, what: str) -> list[str]:
    return await backend.keys(f"{what}/", 100)


async def test_what_is_put_is_fetched(backend: Backend, tmp_path: Path) -> None:
    kept, seen = Store(backend), list[float]()
    path = sparse(tmp_path / "a", b"one", b"", os.urandom(100_000), b"")
    blob = await kept.put(path, "me", seen.append)
    assert (blob.pieces[1], blob.pieces[3], blob.size) == ("", "", 4 * PIECE - 5)
    assert seen[-1] == 1.0
    await kept.fetch(blob, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == path.read_bytes()
    assert (tmp_path / "b").stat().st_blocks * 512 < 1 << 20
    assert len(await keys(backend, "pieces")) == 2
    assert await kept.get_octets(await kept.put_octets(b"x", "me")) == b"x"


async def test_what_is_there_is_neither_sent_nor_fetched_again(
    backend: Backend, tmp_path: Path, monkeypatch: Any
) -> None:
    kept = Store(backend)
    path = sparse(tmp_path / "a", b"one", b"two", b"three")
    blob = await kept.put(path, "me")
    sent: list[str] = []
    put, get = backend.put, backend.get

    async def counted_put(key: str, octets: bytes) -> None:
        sent.append(key)
        await put(key, octets)

    async def counted_get(key: str) -> bytes | None:
        sent.append(key)
        return await get(key)

    monkeypatch.setattr(backend, "put", counted_put)
    monkeypatch.setattr(backend, "get", counted_get)
    assert await kept.put(path, "you") == blob
    assert not [key for key in sent if key.startswith("pieces/")]
    sparse(tmp_path / "b", b"one", b"xxx", b"three")
    sent.clear()
    await kept.fetch(blob, tmp_path / "b")
    assert sent == [f"pieces/{blob.pieces[1]}"]
    assert (tmp_path / "b").read_bytes() == path.read_bytes()


async def test_the_last_user_takes_it_along(backend: Backend, tmp_path: Path) -> None:
    kept = Store(backend)
    shared, own = sparse(tmp_path / "a", b"shared"), sparse(tmp_path / "b", b"own")
    both = await kept.put(shared, "one")
    await kept.put(shared, "two")
    alone = await kept.put(own, "one")
    await kept.release([*both.pieces, *alone.pieces], "one")
    assert await keys(backend, "pieces") == [f"pieces/{both.pieces[0]}"]
    await kept.need(both.pieces, "three")
    await kept.release(both.pieces, "two")
    await kept.release(both.pieces, "two")
    await kept.fetch(both, tmp_path / "c")
    await kept.release(both.pieces, "three")
    assert not await keys(backend, "pieces")
    assert not await keys(backend, f"refs/{both.pieces[0]}")
    assert not await keys(backend, "doomed")
    with pytest.raises(HatchwayError) as caught:
        await kept.need(both.pieces, "four")
    assert caught.value.code == "artifact_damaged"


async def test_who_needs_it_while_it_is_removed_has_it_afterwards(
    backend: Backend, tmp_path: Path, monkeypatch: Any
) -> None:
    kept, path = Store(backend), sparse(tmp_path / "a", b"wanted")
    blob = await kept.put(path, "one")
    delete, reached, go_on = backend.delete, asyncio.Event(), asyncio.Event()

    async def slow(key: str) -> None:
        if key.startswith("pieces/"):
            reached.set()
            await go_on.wait()
        await delete(key)

    monkeypatch.setattr(backend, "delete", slow)
    releasing = asyncio.create_task(kept.release(blob.pieces, "one"))
    await reached.wait()
    putting = asyncio.create_task(Store(backend).put(path, "two"))
    while not await keys(backend, f"refs/{blob.pieces[0]}"):
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(releasing, putting)
    await kept.fetch(blob, tmp_path / "b")


@pytest.mark.parametrize("change", [b"", b"garbage", None, "other"])
async def test_what_the_store_changed_is_not_taken(backend: Backend, tmp_path: Path, change: Any) -> None:
    kept = Store(backend)
    blob = await kept.put(sparse(tmp_path / "a", b"one", b"two"), "me")
    key = f"pieces/{blob.pieces[0]}"
    if change is None:
        await backend.delete(key)
    else:
        other = await backend.get(f"pieces/{blob.pieces[1]}")
        assert other is not None
        await backend.put(key, other if change == "other" else change)
    with pytest.raises(HatchwayError) as caught:
        await kept.fetch(blob, tmp_path / "b")
    assert caught.value.code == "artifact_damaged"


async def test_an_object_that_unpacks_to_too_much_is_cut_off(backend: Backend) -> None:
    import zstandard

    await backend.put("pieces/" + "0" * 64, zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    with pytest.raises(HatchwayError) as caught:
        await Store(backend).get_octets("0" * 64)
    assert caught.value.code == "artifact_damaged"


async def test_a_store_that_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable) as caught:
        await Store(connect(f"file://{tmp_path}/file")).put(sparse(tmp_path / "a", b"x"), "me")
    assert caught.value.code == "store_unavailable"


@pytest.mark.parametrize(
    "url",
    ["", "x", "http://host.test/x", "file://host.test/x", "file:x", "s3://user:secret@bucket.test", "ftp://a.test"],
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(HatchwayError) as caught:
        connect(url)
    assert caught.value.code == "store_invalid"
    assert "secret" not in str(caught.value)


async def test_nothing_half_written_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    backend = connect(f"file://{tmp_path}/store")
    monkeypatch.setattr(backends.os, "write", full)
    with pytest.raises(Unavailable):
        await backend.put("pieces/x", b"y")
    assert not await backend.exists("pieces/x")
    assert list((tmp_path / "store" / "pieces").iterdir()) == []


def test_the_bound_is_what_memory_is_planned_for() -> None:
    assert store.AT_ONCE * store.PIECE * 2 <= 64 << 20


async def test_a_bucket_that_is_not_there_says_so() -> None:
    class Missing:
        async def put_async(self, key: str, octets: bytes) -> None:
            raise FileNotFoundError(key)

        def list(self, prefix: str, chunk_size: int) -> Any:
            raise FileNotFoundError(prefix)

    objects: Any = connect("memory://")
    objects._store = Missing()
    for attempt in (objects.put("pieces/x", b"y"), objects.keys("pieces/", 1)):
        with pytest.raises(Unavailable) as caught:
            await attempt
        assert caught.value.code == "store_unavailable"
