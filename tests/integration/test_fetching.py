"""Archives that a node fetches by itself: from which addresses, what becomes of a source that breaks, changes, lies or says nothing."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hatchway.domain.errors import HatchwayError, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.node.artifacts import fetching, sources
from hatchway.node.artifacts.fetching import Fetches
from hatchway.node.artifacts.spool import MAX_UPLOADS, Spool
from hatchway.wire.node import UploadStatus

OCTETS = os.urandom(5 * 2**20 + 17)
WITHIN = 30.0


class Server:
    """A web server with one file, which can break off, change, lie and lead elsewhere."""

    def __init__(self) -> None:
        self.octets = OCTETS
        self.etag = '"one"'
        self.breaks: list[int] = []
        """After how many octets of the body the next connections end."""
        self.ranges = True
        self.head: Callable[[str], bytes] | None = None
        self.asked: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/archives/"
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            asked = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(asked)
            headers = {line.partition(":")[0].lower(): line.partition(": ")[2] for line in asked.split("\r\n")[1:]}
            at = int(headers["range"].removeprefix("bytes=").rstrip("-")) if "range" in headers else 0
            at = at if self.ranges and headers.get("if-range") == self.etag else 0
            if self.head is not None:
                writer.write(self.head(asked))
            else:
                size = len(self.octets)
                more = f"Content-Range: bytes {at}-{size - 1}/{size}\r\n" if at else ""
                status = "206 Partial" if at else "200 OK"
                writer.write(
                    f"HTTP/1.1 {status}\r\nETag: {self.etag}\r\n{more}Content-Length: {size - at}\r\n\r\n".encode()
                )
            end = at + self.breaks.pop(0) if self.breaks else len(self.octets)
            writer.write(self.octets[at:end])
            await writer.drain()
        writer.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PAUSE_S", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    async with one.serving() as one.prefix:  # type: ignore[attr-defined]
        yield one


def spool(folder: Path) -> Spool:
    made = Spool(folder / "uploads")
    made.load()
    return made


async def ended(fetches: Fetches, upload: str) -> UploadStatus:
    async with asyncio.timeout(WITHIN):
        while (status := fetches.status(upload)).fetching:
            await asyncio.sleep(0.005)
    return status


async def fetched(fetches: Fetches, url: str, upload: str | None = None) -> tuple[str, UploadStatus]:
    upload = upload or new_id()
    await fetches.begin(upload, "mine", url)
    return upload, await ended(fetches, upload)


# -- from where

STORE = "s3://bucket/prefix"
ALLOWED = ("https://files.example/out/", "file:///srv/archives/", "http://127.0.0.1:8080/a/")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix/archives/mine/one.archive",
        "https://files.example/out/a/b.archive",
        "file:///srv/archives/one",
        "http://127.0.0.1:8080/a/one",
    ],
)
def test_what_lies_under_an_allowed_prefix_may_be_fetched(url: str) -> None:
    assert sources.find(url, "mine", store=STORE, allowed=ALLOWED)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "one.archive",
        "/srv/archives/one",
        "https://files.example/out/",
        "https://files.example/outside/one",
        "https://files.example/out/../secret",
        "https://files.example/out/%2e%2e/secret",
        "https://files.example/out/./one",
        "https://files.example/out//one",
        "https://files.example/out/one?x=1",
        "https://files.example/out/one#x",
        "https://files.example/out/one\\..\\two",
        "https://files.example/out/one\r\nX: y",
        "https://files.example/out/o\u0131e",
        "https://files.example.other.test/out/one",
        "https://files.example@other.test/out/one",
        "https://user:pass@files.example/out/one",
        "https://FILES.example/out/one",
        "http://files.example/out/one",
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:8081/a/one",
        "file:///srv/archives/../../etc/passwd",
        "file://localhost/srv/archives/one",
        "file:///etc/passwd",
        "gopher://files.example/out/one",
        "s3://bucket/prefix/pieces/0000",
        "s3://bucket/prefix/archives/other/one",
        "s3://bucket/prefix/archives/mine",
        "s3://bucket/prefix/archives/mine/../other/one",
        "s3://bucket/prefixes/archives/mine/one",
        "s3://other/prefix/archives/mine/one",
        "https://files.example/out/" + "a" * 1000,
    ],
)
def test_no_other_address_is_asked(url: str) -> None:
    with pytest.raises(Unprocessable) as caught:
        sources.find(url, "mine", store=STORE, allowed=ALLOWED)
    assert caught.value.code == "url_not_allowed"


def test_without_a_store_nothing_is_allowed_by_itself() -> None:
    with pytest.raises(Unprocessable):
        sources.find("s3://bucket/prefix/archives/mine/one", "mine", store=None, allowed=())


@pytest.mark.parametrize(
    "prefix",
    ["", "/", "https://files.example/out", "http://files.example/", "https://a.example/../", "ftp://a.example/"],
)
def test_a_prefix_that_is_none_is_told_at_the_start(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(HatchwayError) as caught:
        Fetches(spool(tmp_path), allowed=[prefix])
    assert caught.value.code == "config_invalid"


async def test_a_link_out_of_the_folder_is_no_archive(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "archives" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"s" * 100)
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    fetches = Fetches(spool(tmp_path), store=f"file://{tmp_path}/store")
    for name in ("link", "pipe", "sub", "none"):
        upload, status = await fetched(fetches, f"file://{folder}/{name}")
        assert (status.error or {}).get("code") == "unknown_archive", name
        assert status.offset == 0
        await fetches.end(upload)


async def test_a_server_that_leads_elsewhere_is_not_followed(tmp_path: Path, server: Any) -> None:
    other = Server()
    async with other.serving() as elsewhere:
        server.head = lambda _: f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}x\r\nContent-Length: 0\r\n\r\n".encode()
        fetches = Fetches(spool(tmp_path), allowed=[server.prefix])
        _, status = await fetched(fetches, server.prefix + "one")
    assert (status.error or {}).get("code") == "archive_unreachable"
    assert other.asked == []


# -- what comes


async def test_a_file_and_an_object_come_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore.store

    folder = tmp_path / "store" / "archives" / "mine"
    folder.mkdir(parents=True)
    (folder / "one").write_bytes(OCTETS)
    monkeypatch.setattr(obstore.store, "from_url", lambda _: obstore.store.LocalStore(prefix=folder))
    for number, store in enumerate((f"file://{tmp_path}/store", "s3://bucket")):
        uploads = spool(tmp_path / str(number))
        fetches = Fetches(uploads, store=store)
        upload, status = await fetched(fetches, f"{store}/archives/mine/one")
        assert (status.complete, status.offset, status.size) == (True, len(OCTETS), len(OCTETS)), status
        assert uploads.path(upload).read_bytes() == OCTETS
        _, gone = await fetched(fetches, f"{store}/archives/mine/two")
        assert (gone.error or {}).get("code") == "unknown_archive"


async def test_a_source_that_breaks_is_taken_up_where_it_was(tmp_path: Path, server: Any) -> None:
    server.breaks = [2**20 + 5, 0, 0, 2**20, 1]
    uploads = spool(tmp_path)
    fetches = Fetches(uploads, allowed=[server.prefix])
    upload, status = await fetched(fetches, server.prefix + "one")
    assert status.complete, status
    assert uploads.path(upload).read_bytes() == OCTETS
    assert len(server.asked) == 6
    assert f"range: bytes={2**20 + 5}-" in server.asked[1].lower()


async def test_one_that_gives_nothing_more_is_given_up_and_goes_on_when_it_is_asked_for_again(
    tmp_path: Path, server: Any
) -> None:
    server.breaks = [2**20, *[0] * fetching.TRIES]
    uploads = spool(tmp_path)
    upload, status = await fetched(Fetches(uploads, allowed=[server.prefix]), server.prefix + "one")
    assert (status.error or {}).get("code") == "archive_unreachable"
    assert (status.offset, status.complete) == (2**20, False)
    server.asked.clear()
    # A node that was started anew knows nothing but what lies there.
    fetches = Fetches(uploads, allowed=[server.prefix])
    with pytest.raises(HatchwayError) as caught:
        fetches.require_whole(upload)
    assert caught.value.code == "upload_not_whole"
    _, status = await fetched(fetches, server.prefix + "one", upload)
    assert status.complete
    fetches.require_whole(upload)
    assert uploads.path(upload).read_bytes() == OCTETS
    assert f"range: bytes={2**20}-" in server.asked[0].lower()


@pytest.mark.parametrize("ranges", [True, False])
async def test_what_changed_meanwhile_begins_anew(tmp_path: Path, server: Any, ranges: bool) -> None:
    server.breaks = [2**20, *[0] * fetching.TRIES]
    uploads = spool(tmp_path)
    fetches = Fetches(uploads, allowed=[server.prefix])
    upload, _ = await fetched(fetches, server.prefix + "one")
    server.octets, server.etag, server.ranges = os.urandom(1000), '"two"', ranges
    _, status = await fetched(fetches, server.prefix + "one", upload)
    assert (status.complete, status.size) == (True, 1000)
    assert uploads.path(upload).read_bytes() == server.octets


async def test_an_end_of_the_node_leaves_what_has_come(tmp_path: Path, server: Any) -> None:
    reached, loop = asyncio.Event(), asyncio.get_running_loop()
    uploads = spool(tmp_path)
    whole = uploads.append

    def append(*arguments: Any) -> int:
        loop.call_soon_threadsafe(reached.set)
        return whole(*arguments)

    uploads.append = append  # type: ignore[method-assign]
    fetches = Fetches(uploads, allowed=[server.prefix])
    upload = new_id()
    await fetches.begin(upload, "mine", server.prefix + "one")
    await asyncio.wait_for(reached.wait(), WITHIN)
    await fetches.close()
    left = fetches.status(upload)
    assert not left.fetching
    again, status = await fetched(Fetches(spool(tmp_path), allowed=[server.prefix]), server.prefix + "one", upload)
    assert (again, status.complete) == (upload, True)
    assert uploads.path(upload).read_bytes() == OCTETS


BAD_HEADS = [
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "archive_unreachable"),
    (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "archive_unreachable"),
    (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "unknown_archive"),
    (b"HTTP/1.1 206 Part\r\nContent-Range: bytes 7-9/10\r\nContent-Length: 3\r\n\r\n", "archive_unreachable"),
    (b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-99999999/3\r\nContent-Length: 99999999\r\n\r\n", "archive_invalid"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n", "host_disk_full"),
    (b"no HTTP at all\r\n\r\n", "archive_unreachable"),
]


@pytest.mark.parametrize(("head", "code"), BAD_HEADS)
async def test_a_server_that_lies_is_told_of_and_leaves_nothing_whole(
    tmp_path: Path, server: Any, head: bytes, code: str
) -> None:
    server.head = lambda _: head
    fetches = Fetches(spool(tmp_path), allowed=[server.prefix])
    _, status = await fetched(fetches, server.prefix + "one")
    assert ((status.error or {}).get("code"), status.complete) == (code, False)


async def test_uploads_are_their_projects_own_and_bounded(tmp_path: Path, server: Any) -> None:
    fetches = Fetches(spool(tmp_path), allowed=[server.prefix])
    upload, _ = await fetched(fetches, server.prefix + "one")
    for project, url in (("other", server.prefix + "one"), ("mine", server.prefix + "two")):
        with pytest.raises(HatchwayError) as caught:
            await fetches.begin(upload, project, url)
        assert caught.value.code == "upload_exists"
    for _ in range(MAX_UPLOADS - 1):
        await fetched(fetches, server.prefix + "one")
    with pytest.raises(HatchwayError) as caught:
        await fetches.begin(new_id(), "mine", server.prefix + "one")
    assert caught.value.code == "too_many_uploads"
    await fetches.end(upload)
