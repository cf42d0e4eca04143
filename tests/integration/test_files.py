"""Files over HTTP against the real agent, run on this host: the files program, a node process, a client. No VM."""

import asyncio
import base64
import contextlib
import gzip
import hashlib
import io
import os
import random
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dataplane_fixtures import Opener, agent, module_opened, module_plane, own_opened, own_plane
from dataplane_harness import WITHIN, Event, Plane, events

__all__ = ["agent", "module_opened", "module_plane", "own_opened", "own_plane"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
opened = own_opened


class Client:
    """The file routes of one sandbox."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.plane = plane
        self.folder = folder
        self.token = plane.token(None, scopes=frozenset({"files"}))

    @property
    def headers(self) -> dict[str, str]:
        """With the token."""
        return {"authorization": f"Bearer {self.token}"}

    def url(self, verb: str) -> str:
        """The address of a route."""
        return f"{self.plane.url}/v1/sandboxes/{self.plane.sandbox_id}/files/{verb}"

    async def ask(self, method: str, verb: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """One request."""
        return await self.plane.client.request(method, self.url(verb), headers=self.headers | (headers or {}), **more)

    async def get(self, verb: str, **params: Any) -> httpx.Response:
        """A GET; `headers` are headers."""
        headers = params.pop("headers", None)
        return await self.ask("GET", verb, headers, params=_texts(params))

    async def put(self, verb: str, content: Any, **params: Any) -> httpx.Response:
        """A PUT; `headers` are headers."""
        headers = params.pop("headers", None)
        return await self.ask("PUT", verb, headers, params=_texts(params), content=content)

    async def post(self, verb: str, **body: Any) -> httpx.Response:
        """A POST of JSON."""
        return await self.ask("POST", verb, json={name.rstrip("_"): _text(value) for name, value in body.items()})


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _text(value) for name, value in values.items()}


def ok(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers.get("content-type") == "application/json" else answer.content


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    problem: dict[str, Any] = answer.json()
    assert problem["cause"]
    assert problem["remedy"]
    return problem


@pytest.fixture
def files(module_plane: Plane, tmp_path: Path) -> Client:
    """On the plane that most tests share, and leave as they found it."""
    folder = tmp_path / "home"
    folder.mkdir()
    return Client(module_plane, folder)


@pytest.fixture
def own(own_plane: Plane, tmp_path: Path) -> Client:
    """On a plane of the test's own, for those that change or end it."""
    folder = tmp_path / "home"
    folder.mkdir()
    return Client(own_plane, folder)


def builtins_of(plane: Plane) -> int:
    """How many programs of its own the agent runs."""
    assert plane.agent is not None
    count = 0
    for task in Path(f"/proc/{plane.agent.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in task.read_text().split():
                with contextlib.suppress(OSError):
                    count += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"files\0")
    return count


async def until_none_runs(plane: Plane) -> None:
    async with asyncio.timeout(WITHIN):
        while builtins_of(plane):
            await asyncio.sleep(0.01)


async def until_one_runs(plane: Plane) -> None:
    async with asyncio.timeout(WITHIN):
        while not builtins_of(plane):
            await asyncio.sleep(0.01)


# -- content


async def test_what_was_uploaded_is_downloaded(files: Client) -> None:
    for size in (0, 1, 18_432, 18_433, 65_536, 1_000_003):
        octets = random.Random(size).randbytes(size)
        path = files.folder / f"file-{size}"
        done = ok(await files.put("content", octets, path=path), 201)
        assert (done["created"], done["entry"]["size"], done["entry"]["type"]) == (True, size, "file")
        assert path.read_bytes() == octets
        answer = await files.get("content", path=path)
        assert ok(answer) == octets
        assert answer.headers["content-length"] == str(size)
        assert answer.headers["hatchway-mode"] == "0644"
        assert answer.headers["last-modified"].endswith(" GMT")
        head = await files.ask("HEAD", "content", params={"path": str(path)})
        assert (head.status_code, head.headers["content-length"], head.content) == (200, str(size), b"")
    await until_none_runs(files.plane)


async def test_an_upload_replaces_and_keeps_mode_or_takes_the_one_that_is_given(files: Client) -> None:
    path = files.folder / "deep" / "file"
    check(await files.put("content", b"x", path=path), 404, "file_not_found")
    ok(await files.put("content", b"one", path=path, parents=1, mode="600"), 201)
    done = ok(await files.put("content", b"two", path=path))
    assert (done["created"], done["entry"]["mode"], path.read_bytes()) == (False, 0o600, b"two")
    assert ok(await files.put("content", b"three", path=path, mode="0755"))["entry"]["mode"] == 0o755


RANGES: list[tuple[str, int, slice | None]] = [
    ("bytes=0-0", 206, slice(0, 1)),
    ("bytes=10-19", 206, slice(10, 20)),
    ("bytes=990-", 206, slice(990, 1000)),
    ("bytes=990-5000", 206, slice(990, 1000)),
    ("bytes=-7", 206, slice(993, 1000)),
    ("bytes=-5000", 206, slice(0, 1000)),
    ("bytes=0-1,5-6", 200, slice(0, 1000)),
    ("bytes=5-4", 200, slice(0, 1000)),
    ("lines=1-2", 200, slice(0, 1000)),
    ("bytes=x-", 200, slice(0, 1000)),
    ("bytes=-", 200, slice(0, 1000)),
    ("bytes=1000-", 416, None),
    ("bytes=-0", 416, None),
]


async def test_ranges(files: Client) -> None:
    octets = random.Random(3).randbytes(1000)
    path = files.folder / "file"
    path.write_bytes(octets)
    for asked, status, part in RANGES:
        answer = await files.get("content", path=path, headers={"range": asked})
        if part is None:
            assert check(answer, status, "range_unsatisfiable")["size"] == 1000
            assert answer.headers["content-range"] == "bytes */1000"
            continue
        assert ok(answer, status) == octets[part], asked
        if status == 206:
            assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/1000"
        assert answer.headers["content-length"] == str(part.stop - part.start)


async def test_a_range_with_a_condition_is_the_whole_file(files: Client) -> None:
    (files.folder / "file").write_bytes(b"abc")
    answer = await files.get("content", path=files.folder / "file", headers={"range": "bytes=1-", "if-range": '"x"'})
    assert ok(answer) == b"abc"


async def test_files_of_the_kernel_have_no_length_beforehand(files: Client) -> None:
    assert b"Name:" in ok(await files.get("content", path="/proc/self/status"))
    answer = await files.get("content", path="/proc/kallsyms")
    assert len(ok(answer)) > 65_536
    assert "content-length" not in answer.headers
    partly = await files.get("content", path="/proc/kallsyms", headers={"range": "bytes=10-19"})
    assert partly.status_code in (200, 206)


async def test_an_upload_that_is_cut_off_changes_nothing(files: Client) -> None:
    path = files.folder / "file"
    path.write_bytes(b"before")
    octets = random.Random(4).randbytes(3_000_000)

    async def half() -> AsyncIterator[bytes]:
        yield octets[:1_500_000]
        await until_one_runs(files.plane)
        raise ConnectionResetError

    for headers in ({"content-length": "3000000"}, {}):  # with a length, and in chunks
        with pytest.raises((httpx.HTTPError, ConnectionResetError)):
            await files.put("content", half(), path=path, headers=headers)
        await until_none_runs(files.plane)
        assert path.read_bytes() == b"before"
        assert os.listdir(files.folder) == ["file"]


async def test_an_upload_in_chunks_has_no_length_and_is_whole(files: Client) -> None:
    octets = random.Random(5).randbytes(700_000)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(octets), 7_777):
            yield octets[start : start + 7_777]

    ok(await files.put("content", pieces(), path=files.folder / "file"), 201)
    assert (files.folder / "file").read_bytes() == octets


async def test_wrong_parameters_are_named(files: Client) -> None:
    for parameter in ("mode=8", "mode=10000", "mode=", "mode=-1", "parents=2", "parents=yes", "user=a%20b", "user="):
        url = f"{files.url('content')}?path=/x&{parameter}"
        answer = await files.plane.client.put(url, headers=files.headers, content=b"")
        assert check(answer, 422, "invalid_field")["field"] == parameter.partition("=")[0]


async def test_unknown_and_repeated_parameters_are_refused(files: Client) -> None:
    check(await files.get("stat", path="/", colour="red"), 422, "unknown_field")
    check(
        await files.plane.client.get(f"{files.url('stat')}?path=/&path=/tmp", headers=files.headers),
        400,
        "invalid_field",
    )
    check(await files.get("stat"), 422, "invalid_field")
    check(await files.get("stat", path=""), 422, "invalid_field")
    check(await files.get("stat", path="a" * 4096), 422, "invalid_field")
    check(await files.plane.client.get(f"{files.url('stat')}?path=/%00", headers=files.headers), 422, "invalid_field")
    check(await files.get("stat", path="/", path_base64="Lw=="), 422, "invalid_field")
    check(await files.get("stat", path_base64="=="), 422, "invalid_field")


# -- what there is


async def test_names_of_any_octets(files: Client) -> None:
    name = b"\xff\xfe +&=%\n\t\"'"
    path = os.fsencode(files.folder) + b"/" + name
    encoded = base64.b64encode(path).decode()
    ok(await files.put("content", b"octets", path_base64=encoded), 201)
    assert Path(os.fsdecode(path)).read_bytes() == b"octets"
    raw = "".join(f"%{octet:02X}" for octet in path)
    entry = ok(await files.plane.client.get(f"{files.url('stat')}?path={raw}", headers=files.headers))["entry"]
    assert base64.b64decode(entry["name_base64"]) == name
    assert base64.b64decode(entry["path_base64"]) == path
    (listed,) = ok(await files.get("list", path=files.folder))["entries"]
    assert listed == entry
    moved = ok(await files.post("move", from_base64=encoded, to=files.folder / "naïve ☃"))["entry"]
    assert (moved["name"], "name_base64" in moved) == ("naïve ☃", False)
    assert ok(await files.get("content", path=files.folder / "naïve ☃")) == b"octets"


async def test_stat_follows_where_it_is_asked_to(files: Client) -> None:
    (files.folder / "target").write_bytes(b"12345")
    (files.folder / "link").symlink_to("target")
    link = ok(await files.get("stat", path=files.folder / "link"))["entry"]
    assert (link["type"], link["target"], link["name"]) == ("symlink", "target", "link")
    followed = ok(await files.get("stat", path=files.folder / "link", follow=1))["entry"]
    assert (followed["type"], followed["size"], followed["name"]) == ("file", 5, "link")
    assert abs(followed["mtime_ns"] - time.time_ns()) < 3600 * 10**9
    assert (followed["uid"], followed["user"]) == (os.getuid(), "root" if os.getuid() == 0 else followed["user"])


async def test_a_listing_in_pages_has_everything_once(files: Client) -> None:
    names = sorted(f"{n:05d}-{'x' * (n % 200)}" for n in range(3000))
    for name in names:
        (files.folder / name).touch()
    (files.folder / "zfolder").mkdir()
    (files.folder / "zfolder" / "inside").touch()
    seen: list[str] = []
    cursor = None
    pages = 0
    while True:
        more = {} if cursor is None else {"cursor": cursor}
        page = ok(await files.get("list", path=files.folder, limit=1100, depth=2, **more))
        seen += [entry["name"] for entry in page["entries"]]
        cursor = page["next_cursor"]
        pages += 1
        if cursor is None:
            break
        assert len(page["entries"]) == 1100
    assert seen == [*names, "zfolder", "inside"]
    assert pages == 3
    check(await files.get("list", path=files.folder, cursor="%%%"), 400, "invalid_cursor")
    check(await files.get("list", path=files.folder, limit=2001), 422, "invalid_field")
    check(await files.get("list", path=files.folder, depth=0), 422, "invalid_field")


async def test_folders_moves_modes_and_removal(files: Client) -> None:
    made = ok(await files.post("mkdir", path=files.folder / "a" / "b", parents=True, mode="700"), 201)
    assert (made["created"], made["entry"]["mode"]) == (True, 0o700)
    assert ok(await files.post("mkdir", path=files.folder / "a" / "b", parents=True))["created"] is False
    check(await files.post("mkdir", path=files.folder / "a"), 409, "file_exists")
    (files.folder / "a" / "b" / "file").write_text("x")
    (files.folder / "other").write_text("y")
    check(
        await files.post("move", from_=files.folder / "other", to=files.folder / "a" / "b" / "file"), 409, "file_exists"
    )
    ok(await files.post("move", from_=files.folder / "other", to=files.folder / "a" / "b" / "file", overwrite=True))
    assert (files.folder / "a" / "b" / "file").read_text() == "y"
    assert ok(await files.post("chmod", path=files.folder / "a", mode="750", recursive=True))["changed"] == 3
    assert (files.folder / "a" / "b" / "file").stat().st_mode & 0o7777 == 0o750
    check(await files.post("remove", path=files.folder / "a"), 409, "folder_not_empty")
    assert ok(await files.post("remove", path=files.folder / "a", recursive=True))["removed"] == 3
    check(await files.post("remove", path=files.folder / "a"), 404, "file_not_found")
    assert os.listdir(files.folder) == []


async def test_errors_have_codes_of_their_own(files: Client) -> None:
    (files.folder / "file").touch()
    (files.folder / "loop").symlink_to("loop")
    os.mkfifo(files.folder / "fifo")
    check(await files.get("content", path=files.folder), 409, "is_a_folder")
    check(await files.put("content", b"", path=files.folder), 409, "is_a_folder")
    check(await files.get("content", path=files.folder / "file" / "x"), 409, "not_a_folder")
    check(await files.get("list", path=files.folder / "file"), 409, "not_a_folder")
    check(await files.get("content", path=files.folder / "loop"), 409, "link_loop")
    check(await files.get("content", path=files.folder / "fifo"), 422, "file_operation_invalid")
    check(await files.get("content", path=files.folder / ("n" * 256)), 422, "path_too_long")
    check(await files.get("content", path=files.folder / "file", user="nosuchuser"), 422, "unknown_user")
    check(await files.get("archive", path=files.folder / "nothing"), 404, "file_not_found")
    check(await files.get("watch", path=files.folder / "nothing"), 404, "file_not_found")
    problem = check(await files.get("content", path=files.folder / "nothing"), 404, "file_not_found")
    assert "nothing" in problem["cause"]
    for verb in ("mkdir", "move", "remove", "chmod"):
        check(await files.post(verb, path=str(files.folder), surplus=1, mode="7"), 422, "unknown_field")
        check(await files.ask("POST", verb), 400, "body_missing")
        check(await files.ask("POST", verb, content=b"{" + b" " * 70_000), 413, "body_too_large")
    check(await files.post("remove"), 422, "invalid_field")
    check(await files.post("chmod", path="/x", mode="rwx"), 422, "invalid_field")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
async def test_work_is_done_as_the_user_that_is_asked_for(files: Client) -> None:
    for folder in (files.folder, *files.folder.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    secret = files.folder / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    check(await files.get("content", path=secret, user="nobody"), 403, "file_permission_denied")
    check(await files.put("content", b"y", path=secret, user="nobody"), 403, "file_permission_denied")
    check(await files.post("remove", path=str(secret), user="nobody"), 403, "file_permission_denied")
    files.folder.chmod(0o777)
    done = ok(await files.put("content", b"mine", path=files.folder / "mine", user="nobody"), 201)
    assert done["entry"]["user"] == "nobody"
    assert ok(await files.get("content", path=secret)) == b"x"  # no user `user` here: as root


# -- archives


def tar_of(entries: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
async def test_a_folder_goes_up_and_comes_down_as_an_archive(files: Client, kind: str) -> None:
    contents = {f"f{n}": random.Random(n).randbytes(n * 40_000) for n in range(8)} | {"sub/" + "long" * 40: b"deep"}
    body = tar_of(contents)
    if kind == "tar.gz":
        body = gzip.compress(body[:100_000]) + gzip.compress(body[100_000:]) + bytes(512)
    into = files.folder / "into"
    done = ok(await files.put("archive", body, path=into, format=kind, parents=1))
    assert (done["files"], done["bytes"]) == (9, sum(map(len, contents.values())))
    assert {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()} == contents
    answer = await files.get("archive", path=into, format=kind)
    assert answer.headers["content-type"] == {"tar": "application/x-tar", "tar.gz": "application/gzip"}[kind]
    with tarfile.open(fileobj=io.BytesIO(ok(answer)), mode="r:gz" if kind == "tar.gz" else "r:") as archive:
        got = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}  # type: ignore[union-attr] # a regular file has one
    assert got == contents


async def test_the_media_type_says_that_an_archive_is_compressed(files: Client) -> None:
    body = gzip.compress(tar_of({"a": b"1"}))
    ok(await files.put("archive", body, path=files.folder, headers={"content-type": "application/gzip"}))
    assert (files.folder / "a").read_bytes() == b"1"
    check(await files.put("archive", body, path=files.folder), 422, "archive_malformed")


async def test_archives_that_are_none_or_lead_out_are_refused(files: Client) -> None:
    into = files.folder / "into"
    into.mkdir()
    whole = tar_of({"first": b"1", "second": b"2" * 5000})
    for name in ("../out", "/out", "a/../../out"):
        problem = check(
            await files.put("archive", tar_of({"good": b"1", name: b"2"}), path=into), 422, "archive_malformed"
        )
        assert (problem["files"], problem["bytes"]) == (1, 1)
        assert os.listdir(files.folder) == ["into"]
    check(await files.put("archive", whole[:3000], path=into), 422, "archive_malformed")
    check(await files.put("archive", b"no archive" * 100, path=into), 422, "archive_malformed")
    for body in (gzip.compress(whole)[:-20], b"no gzip", b"\x1f\x8b\x08" + b"x" * 100, b""):
        check(await files.put("archive", body, path=into, format="tar.gz"), 422, "archive_malformed")
    check(await files.put("archive", whole, path=into, format="zip"), 422, "invalid_field")
    await until_none_runs(files.plane)


async def test_a_gzip_bomb_costs_the_node_nothing(files: Client) -> None:
    before = int(str(await files.plane.tell("memory")))
    info = tarfile.TarInfo("bomb")
    info.size = 200 * 2**20
    bomb = io.BytesIO()
    with gzip.GzipFile(fileobj=bomb, mode="wb", compresslevel=9) as packed:
        packed.write(info.tobuf())
        for _ in range(200):
            packed.write(bytes(2**20))
        packed.write(bytes(1024))
    assert len(bomb.getvalue()) < 2**20
    done = ok(await files.put("archive", bomb.getvalue(), path=files.folder, format="tar.gz"))
    assert done["bytes"] == 200 * 2**20
    assert int(str(await files.plane.tell("memory"))) - before < 32 * 2**20
    (files.folder / "bomb").unlink()


# -- watching


@contextlib.asynccontextmanager
async def watching(files: Client, **params: Any) -> AsyncIterator[AsyncIterator[Event]]:
    async with files.plane.client.stream(
        "GET", files.url("watch"), headers=files.headers, params=_texts(params)
    ) as response:
        if response.status_code != 200:
            raise AssertionError((await response.aread()).decode())
        stream = events(response)
        ready = await anext(stream)
        assert ready.name == "ready"
        assert ready.data["entry"]["type"] == "dir"  # type: ignore[index] # an object
        yield stream


async def test_changes_are_told_and_a_client_that_goes_ends_the_watch(files: Client) -> None:
    (files.folder / "sub").mkdir()
    async with asyncio.timeout(WITHIN), watching(files, path=files.folder, recursive=1) as stream:
        ok(await files.put("content", b"x", path=files.folder / "sub" / "new"), 201)
        seen = [await anext(stream)]
        while seen[-1].data["event"] != "create" or seen[-1].data["name"] != "new":
            seen.append(await anext(stream))
        ok(await files.post("move", from_=files.folder / "sub" / "new", to=files.folder / "newer"))
        while seen[-1].data["event"] != "rename" or seen[-1].data["name"] != "newer":
            seen.append(await anext(stream))
        assert seen[-1].data["from"] == str(files.folder / "sub" / "new")
        (files.folder / "newer").unlink()
        while seen[-1].data["event"] != "remove":
            seen.append(await anext(stream))
        assert {event.name for event in seen} == {"file"}
    await until_none_runs(files.plane)


async def test_a_watch_says_how_it_ends(own: Client) -> None:
    gone = own.folder / "gone"
    gone.mkdir()
    async with asyncio.timeout(WITHIN), watching(own, path=gone) as stream:
        gone.rmdir()
        last = [event async for event in stream][-1]
    assert (last.name, last.data) == ("end", {"reason": "removed"})
    async with asyncio.timeout(WITHIN), watching(own, path=own.folder) as stream:
        await own.plane.tell("generation", 2)
        assert (await anext(stream)).data == {"reason": "superseded"}
        assert [event async for event in stream] == []
    own.token = own.plane.token(None, scopes=frozenset({"files"}), generation=2)
    async with asyncio.timeout(WITHIN), watching(own, path=own.folder) as stream:
        await own.plane.tell("lose", "ended")
        last = await anext(stream)
        assert (last.name, last.data["reason"], last.data["code"]) == ("end", "failed", "sandbox_unreachable")


async def test_a_quiet_watch_pings(opened: Opener, tmp_path: Path) -> None:
    files = Client(await opened(files={"ping_s": 0.05}), tmp_path)
    async with asyncio.timeout(WITHIN), watching(files, path=files.plane.folder / "sessions") as stream:
        assert (await anext(stream)).name == "ping"


# -- who may, when, and how much


ROUTES = [
    ("GET", "content"), ("HEAD", "content"), ("PUT", "content"), ("GET", "stat"), ("GET", "list"), ("POST", "mkdir"), ("POST", "move"),
    ("POST", "remove"), ("POST", "chmod"), ("GET", "watch"), ("GET", "archive"), ("PUT", "archive"),
]  # fmt: skip


async def test_every_route_refuses_without_a_token_for_it(files: Client) -> None:
    plane = files.plane
    wrong = {
        "": (401, "token_missing"),
        "nonsense": (401, "token_invalid"),
        plane.token(None, scopes=frozenset({"sessions", "ports"})): (403, "wrong_scope"),
        plane.token("s" * 20): (403, "wrong_scope"),
        plane.token(None, scopes=frozenset({"files"}), sandbox_id="x" * 20): (403, "wrong_sandbox"),
        plane.token(None, scopes=frozenset({"files"}), project="other"): (403, "wrong_sandbox"),
        plane.token(None, scopes=frozenset({"files"}), ttl_s=-5): (401, "token_expired"),
    }
    for method, verb in ROUTES:
        for token, (status, code) in wrong.items():
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = await plane.client.request(method, files.url(verb), headers=headers, params={"path": "/"})
            assert answer.status_code == status, (method, verb)
            if method != "HEAD":
                check(answer, status, code)
    assert builtins_of(plane) == 0


async def test_states_have_the_errors_that_sessions_have(own: Client) -> None:
    for state in ("paused", "stopped"):
        await own.plane.tell("state", state)
        for method, verb in ROUTES:
            if method == "POST":
                answer = await own.post(
                    verb,
                    **(
                        {"from_": "/a", "to": "/b"}
                        if verb == "move"
                        else {"path": "/a"} | ({"mode": "7"} if verb == "chmod" else {})
                    ),
                )
            else:
                answer = await own.ask(method, verb, params={"path": "/a"})
            assert answer.status_code == 409, (state, verb)
            if method != "HEAD":
                assert check(answer, 409, "sandbox_not_running")["state"] == state


async def test_operations_of_one_sandbox_are_bounded(opened: Opener, tmp_path: Path) -> None:
    files = Client(await opened(files={"per_sandbox": 3, "watches": 2}), tmp_path)
    async with asyncio.timeout(WITHIN), watching(files, path=tmp_path), watching(files, path=tmp_path):
        check(await files.get("watch", path=tmp_path), 429, "too_many_file_operations")
        ok(await files.get("stat", path=tmp_path))
    await until_none_runs(files.plane)
    async with asyncio.timeout(WITHIN), watching(files, path=tmp_path):
        pass


async def test_operations_of_all_sandboxes_are_bounded(opened: Opener, tmp_path: Path) -> None:
    files = Client(await opened(files={"per_node": 1}), tmp_path)
    async with asyncio.timeout(WITHIN), watching(files, path=tmp_path):
        check(await files.get("stat", path=tmp_path), 429, "too_many_file_operations")
    await until_none_runs(files.plane)
    async with asyncio.timeout(WITHIN):
        while (await files.get("stat", path=tmp_path)).status_code != 200:
            pass


async def test_a_token_that_ends_cuts_what_it_opened_off(own: Client) -> None:
    path = own.folder / "large"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    async with own.plane.client.stream(
        "GET", own.url("content"), headers=own.headers, params={"path": str(path)}
    ) as response:
        pieces = response.aiter_raw()
        await anext(pieces)
        await own.plane.tell("generation", 2)
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass
    await until_none_runs(own.plane)


async def test_a_slow_client_costs_no_memory_and_a_client_that_goes_ends_the_program(files: Client) -> None:
    path = files.folder / "large"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    before = int(str(await files.plane.tell("memory")))
    pieces: list[AsyncIterator[bytes]] = []
    async with contextlib.AsyncExitStack() as stack:
        for verb in ("content", "archive", "content", "archive"):
            response = await stack.enter_async_context(
                files.plane.client.stream("GET", files.url(verb), headers=files.headers, params={"path": str(path)})
            )
            assert response.status_code == 200
            pieces.append(response.aiter_raw())  # one that is dropped closes its response
            await anext(pieces[-1])
        assert builtins_of(files.plane) == 4
        ok(await files.get("stat", path=path))  # nobody else is held up
        assert int(str(await files.plane.tell("memory"))) - before < 32 * 2**20
    await until_none_runs(files.plane)


async def test_a_hundred_megabytes_each_way_in_constant_memory(files: Client) -> None:
    size = 100 * 2**20
    block = random.Random(6).randbytes(2**20)
    path = files.folder / "large"
    before = int(str(await files.plane.tell("memory")))

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // len(block)):
            yield block

    ok(await files.put("content", body(), path=path, headers={"content-length": str(size)}), 201)
    expected = hashlib.sha256(block * (size // len(block))).digest()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == expected
    digest = hashlib.sha256()
    async with files.plane.client.stream(
        "GET", files.url("content"), headers=files.headers, params={"path": str(path)}
    ) as response:
        async for piece in response.aiter_raw():
            digest.update(piece)
    assert digest.digest() == expected
    assert int(str(await files.plane.tell("memory"))) - before < 24 * 2**20
    path.unlink()


async def test_a_sandbox_that_ends_cuts_a_download_off(own: Client) -> None:
    path = own.folder / "large"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    async with own.plane.client.stream(
        "GET", own.url("content"), headers=own.headers, params={"path": str(path)}
    ) as response:
        pieces = response.aiter_raw()
        await anext(pieces)
        await own.plane.tell("lose", "ended")
        with pytest.raises(httpx.RemoteProtocolError):
            async for _ in pieces:
                pass


async def test_a_node_that_was_killed_leaves_no_program_behind(own: Client) -> None:
    path = own.folder / "large"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    async with own.plane.client.stream(
        "GET", own.url("content"), headers=own.headers, params={"path": str(path)}
    ) as response:
        pieces = response.aiter_raw()
        await anext(pieces)
        assert builtins_of(own.plane) == 1
        await own.plane.restart_node()
    await until_none_runs(own.plane)
    ok(await own.get("stat", path=path))


async def test_a_client_that_stands_still_is_broken_off_and_its_program_ended(opened: Opener, tmp_path: Path) -> None:
    files = Client(await opened(plane={"client_grace_s": 2.0}), tmp_path)
    path = files.folder / "large"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)
    host, port = files.plane.url.removeprefix("http://").split(":")
    for verb in ("content", "archive"):
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        target = f"/v1/sandboxes/{files.plane.sandbox_id}/files/{verb}?path={path}"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {files.token}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until_none_runs(files.plane)  # nothing is read meanwhile
        got = 0
        while piece := await reader.read(2**20):
            got += len(piece)
        assert got < 300 * 2**20
        writer.close()
    reader, writer = await asyncio.open_connection(host, int(port))
    target = f"/v1/sandboxes/{files.plane.sandbox_id}/files/content?path={files.folder}/new"
    head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {files.token}\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b"some")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    await asyncio.wait_for(reader.readuntil(b"body_too_slow"), 60)  # the body may come behind the head
    writer.close()
    await until_none_runs(files.plane)
    assert not (files.folder / "new").exists()
