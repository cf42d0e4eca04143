"""The SDK's files against a node that is broken or hostile: nothing is taken for whole that is not, and nothing is sent twice
that may not be. Every case runs with the blocking client and with the asyncio one."""

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from place_double import SANDBOX, Answer, Asked, double, entry, problem, told

from hatchway.client import (
    AsyncHatchway,
    BadAnswer,
    ConnectionFailed,
    FileChange,
    Hatchway,
    InvalidRequest,
    NotFound,
    OutputLimit,
    TransferFailed,
    UnsafeArchive,
    calls,
    streams,
)

Do = Callable[..., Any]


def blocking(url: str, method: str, *args: Any, **options: Any) -> Any:
    with Hatchway(url, "hw_x") as client:
        files = client.sandboxes.get(SANDBOX).files
        done = getattr(files, method)(*args, **options)
        return list(done) if isinstance(done, Iterator) else done


def with_asyncio(url: str, method: str, *args: Any, **options: Any) -> Any:
    async def body() -> Any:
        async with AsyncHatchway(url, "hw_x") as client:
            files = (await client.sandboxes.get(SANDBOX)).files
            done = getattr(files, method)(*args, **options)
            return [item async for item in done] if isinstance(done, AsyncIterator) else await done

    return asyncio.run(body())


@pytest.fixture(params=[blocking, with_asyncio], ids=["blocking", "async"])
def do(request: pytest.FixtureRequest) -> Do:
    return request.param  # type: ignore[no-any-return]  # one of the two above


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BACKOFF_S", (0.001, 0.002, 0.003))
    monkeypatch.setattr(calls, "RETRIES", (0.001, 0.002))


def once(*answers: Answer) -> Callable[[Asked], Answer]:
    """Answers one after the other; the last one again and again."""
    left = list(answers)
    return lambda _asked: left.pop(0) if len(left) > 1 else left[0]


def test_a_file_that_is_cut_off_is_not_returned(do: Do, tmp_path: Path) -> None:
    for cut in (Answer(b"half", length=10, cut=True), Answer(b"half", length=None, cut=True)):
        with double(once(cut)) as node, pytest.raises(ConnectionFailed):
            do(node.url, "read", "x")

        def script(asked: Asked, cut: Answer = cut) -> Answer:
            return told({"entry": entry("/x", size=10)}) if asked.verb == "stat" else cut

        with double(script) as node, pytest.raises(ConnectionFailed):
            do(node.url, "download", "x", tmp_path / "x")
        assert list(tmp_path.iterdir()) == []


def test_parts_of_files(do: Do) -> None:
    content = bytes(range(100))

    def ranged(asked: Asked) -> Answer:
        first, last = asked.headers["range"].removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1 if last else None]
        return Answer(part, 206, {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/100"})

    with double(ranged) as node:
        assert do(node.url, "read", "x", offset=10, length=5) == content[10:15]
        assert do(node.url, "read", "x", offset=90) == content[90:]
    with double(once(Answer(content, length=None))) as node:  # what has no size has no parts
        assert do(node.url, "read", "x", offset=10, length=5) == content[10:15]
        assert do(node.url, "read", "x", offset=200, length=5) == b""
    with double(once(Answer(content, 206, {"Content-Range": "bytes 0-99/100"}))) as node:
        for part in ({"offset": 5}, {"length": 5}):
            with pytest.raises(BadAnswer):
                do(node.url, "read", "x", **part)
    with double() as node, pytest.raises(InvalidRequest):
        do(node.url, "read", "x", offset=-1)


def test_a_file_that_is_larger_than_it_may_be(do: Do) -> None:
    with double(once(Answer(bytes(1001), length=None))) as node:
        with pytest.raises(OutputLimit) as caught:
            do(node.url, "read", "x", max_bytes=1000)
        assert caught.value.code == "file_too_large"
        assert len(do(node.url, "read", "x", max_bytes=1001)) == 1001


def written(asked: Asked) -> Answer:
    return told({"entry": entry("/x", size=len(asked.body)), "created": True}, 201)


CONTENTS: list[Any] = [b"octets", "téxt", bytearray(b"array"), memoryview(b"view"), b""]


def test_contents_of_all_kinds(do: Do, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with double(written) as node:
        for content in CONTENTS:
            assert do(node.url, "write", "x", content).size == len(
                content.encode() if isinstance(content, str) else content
            )
        with (tmp_path / "file").open("rb") as file:
            file.seek(3)
            assert do(node.url, "write", "x", file).size == 7
        assert node.asked[-1].headers["content-length"] == "7"
        assert do(node.url, "write", "x", iter([b"a", b"", b"bc"]), mode=0o600, parents=True, user="root").size == 3
        assert node.asked[-1].query == {"path": "x", "mode": "600", "parents": "1", "user": "root"}
        read, write = os.pipe()
        os.write(write, b"piped")
        os.close(write)
        with open(read, "rb") as pipe:
            assert do(node.url, "write", "x", pipe).size == 5
        for wrong in (5, io.StringIO("text"), ["text"], None):
            with pytest.raises(InvalidRequest):
                do(node.url, "write", "x", wrong)


def test_an_asynchronous_iterator_is_for_asyncio() -> None:
    async def content() -> AsyncIterator[bytes]:
        for piece in (b"a", b"bc"):
            yield piece

    with double(written) as node:
        assert with_asyncio(node.url, "write", "x", content()).size == 3
        with pytest.raises(InvalidRequest):
            blocking(node.url, "write", "x", content())


def test_a_size_that_is_not_what_was_sent(do: Do) -> None:
    with double(once(told({"entry": entry("/x", size=5)}))) as node, pytest.raises(BadAnswer):
        do(node.url, "write", "x", b"123456")


def test_a_file_that_changes_while_it_is_sent(do: Do, tmp_path: Path) -> None:
    class Growing(io.BytesIO):
        def __init__(self, change: int) -> None:
            super().__init__(bytes(100_000))
            self._change = change

        def read(self, size: int | None = -1) -> bytes:
            if self._change > 0:
                return bytes(size or 0)
            return super().read(size)[: 100_000 + self._change]

    for change in (-1, 1):
        with double(written) as node:
            with pytest.raises(TransferFailed) as caught:
                do(node.url, "write", "x", Growing(change))
            assert caught.value.code == "source_changed"
    (tmp_path / "d").mkdir()
    with double(written) as node:
        for bad in (tmp_path / "none", "/dev/null", "\0"):
            with pytest.raises(InvalidRequest):
                do(node.url, "upload", bad, "x")


def test_an_iterator_that_fails_ends_the_upload(do: Do) -> None:
    def content() -> Iterator[bytes]:
        yield b"first"
        raise KeyError("mine")

    with double(written) as node:
        with pytest.raises(KeyError):
            do(node.url, "write", "x", content())
        assert not any(asked.method == "PUT" and asked.whole for asked in node.asked)


def test_what_can_be_sent_again_is_and_what_cannot_is_not(do: Do) -> None:
    puts = 0

    def script(asked: Asked) -> Answer:
        nonlocal puts
        if asked.method != "PUT":
            return told({"entry": entry("/", "dir")})
        puts += 1
        return written(asked) if puts > 1 else problem(503, "launcher_unavailable")

    with double(script) as node:
        assert do(node.url, "write", "x", b"again").size == 5
        puts = 0
        with pytest.raises(Exception, match="launcher_unavailable"):
            do(node.url, "write", "x", iter([b"once"]))
        assert puts == 1


def test_an_expired_token_is_renewed(do: Do) -> None:
    with double(written) as node:
        node.first_good = 2
        assert do(node.url, "write", "x", b"abc").size == 3
        assert [asked.token for asked in node.asked] == ["Bearer token-1", "Bearer token-2"]
    stat = told({"entry": entry("/", "dir")})
    with double(lambda asked: stat if asked.verb == "stat" else written(asked)) as node:
        node.first_good = 2
        # What can be sent but once is sent with a token that is known to be good.
        assert do(node.url, "write", "x", iter([b"abc"])).size == 3
        assert [asked.verb for asked in node.asked] == ["stat", "stat", "content"]
    with double(once(Answer(b"content"))) as node:
        node.first_good = 2
        assert do(node.url, "read", "x") == b"content"


def test_listings_page_by_page(do: Do) -> None:
    def script(asked: Asked) -> Answer:
        at = int(asked.query.get("cursor", "0"))
        names = [entry(f"/d/{n}") for n in range(at, at + 3)]
        return told({"entries": names, "skipped": 0, "next_cursor": str(at + 3) if at < 6 else None})

    with double(script) as node:
        assert [one.name for one in do(node.url, "list", "/d", depth=2)] == [str(n) for n in range(9)]
        assert node.asked[0].query["depth"] == "2"
    for page in ({"entries": [], "next_cursor": "x"}, {"entries": [entry("/a")], "next_cursor": "same"}):
        with double(once(told(page))) as node, pytest.raises(BadAnswer):
            do(node.url, "list", ".")


def test_names_of_any_octets(do: Do) -> None:
    name = os.fsdecode(b"\xff\xfe")
    odd = entry("/d/??", path_base64="L2Qv//4=", name_base64="//4=")
    with double(once(told({"entry": odd, "removed": 1, "changed": 1}))) as node:
        found = do(node.url, "stat", f"/d/{name}")
        assert (found.path, found.name) == (f"/d/{name}", name)
        assert node.asked[-1].query["path"] == "/d/\xff\xfe"
        do(node.url, "remove", found.path)
        assert json.loads(node.asked[-1].body) == {"path_base64": "L2Qv//4=", "recursive": False}
        do(node.url, "move", found.path, "plain", overwrite=True)
        sent = json.loads(node.asked[-1].body)
        assert sent == {"from_base64": "L2Qv//4=", "to": "plain", "overwrite": True}
        with pytest.raises(InvalidRequest):
            do(node.url, "stat", "")


def test_existence(do: Do) -> None:
    with double(once(problem(404, "file_not_found"))) as node:
        assert do(node.url, "exists", "x") is False
    with double(once(problem(404, "unknown_sandbox"))) as node, pytest.raises(NotFound):
        do(node.url, "exists", "x")
    with double(once(told({"entry": entry("/x")}))) as node:
        assert do(node.url, "exists", "x") is True


def sse(*events: tuple[str, dict[str, Any]]) -> bytes:
    return b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events)


def test_a_watch_goes_on_and_says_that_it_was_away(do: Do) -> None:
    created = ("file", {"event": "create", "path": "/w/a", "name": "a", "dir": False})
    moved = ("file", {"event": "rename", "path": "/w/b", "name": "b", "dir": False, "from": "/w/a"})
    answers = (
        Answer(sse(("ready", {}), created), length=None, cut=True),
        Answer(
            sse(("ready", {}), ("overflow", {"reason": "queue", "path": "/w"}), ("end", {"reason": "expired"})),
            length=None,
        ),
        Answer(sse(("ready", {}), ("ping", {}), moved, ("end", {"reason": "removed"})), length=None),
    )
    with double(once(*answers)) as node:
        seen = do(node.url, "watch", "/w")
    again = FileChange(event="overflow", path="/w", reason="reconnected")
    assert [(change.event, change.reason) for change in seen] == [
        ("ready", None),
        ("create", None),
        ("overflow", "reconnected"),
        ("overflow", "queue"),
        ("overflow", "reconnected"),
        ("rename", None),
    ]
    assert again in seen
    assert seen[-1].from_ == "/w/a"
    failing = Answer(
        sse(("ready", {}), ("end", {"reason": "failed", "code": "file_not_found", "cause": "x"})), length=None
    )
    for bad in (failing, Answer(sse(("file", {"event": 5})), length=None), problem(404, "file_not_found")):
        with double(once(bad)) as node, pytest.raises(Exception, match=r"file_not_found|bad_answer"):
            do(node.url, "watch", "/w")


def test_an_archive_that_is_cut_off_or_hostile_leaves_nothing(do: Do, tmp_path: Path) -> None:
    def script(content: Answer) -> Callable[[Asked], Answer]:
        return lambda asked: told({"entry": entry("/d", "dir")}) if asked.verb == "stat" else content

    for content in (b"", bytes(512), b"not tar" * 1000):
        with double(script(Answer(content, length=None))) as node, pytest.raises(UnsafeArchive):
            do(node.url, "download", "d", tmp_path / "d")
    with double(script(Answer(bytes(1024), length=None, cut=True))) as node, pytest.raises(ConnectionFailed):
        do(node.url, "download", "d", tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_never_ends_is_bounded(do: Do, tmp_path: Path) -> None:
    def script(asked: Asked) -> Answer:
        return told({"entry": entry("/x", size=1)}) if asked.verb == "stat" else Answer(bytes(100_000), length=None)

    with double(script) as node, pytest.raises(UnsafeArchive) as caught:
        do(node.url, "download", "x", tmp_path / "x", max_bytes=99_999)
    assert caught.value.code == "download_too_large"
    assert list(tmp_path.iterdir()) == []
