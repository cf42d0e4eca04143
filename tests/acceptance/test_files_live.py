"""Files of a real sandbox over HTTP: as its users, large and small, watched and packed, and what becomes of them with its states."""

import contextlib
import gzip
import hashlib
import http.client
import io
import json
import os
import random
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Service

from hatchway.client import Hatchway, Sandbox

pytestmark = pytest.mark.vm

WITHIN_S = 120
LARGE = 200 * 2**20


class Files:
    """The file routes of a sandbox, with a token of its own."""

    def __init__(self, service: Service, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        made = httpx.post(
            f"{service.url}/v1/sandboxes/{sandbox.id}/tokens",
            json={"scopes": ["files"], "ttl_s": 900},
            headers={"authorization": f"Bearer {service.key}"},
        )
        assert made.status_code == 201, made.text
        self.http = httpx.Client(
            base_url=f"{made.json()['data_plane_url']}/v1/sandboxes/{sandbox.id}/files/",
            headers={"authorization": f"Bearer {made.json()['token']}"},
            timeout=WITHIN_S,
        )

    def get(self, verb: str, **params: Any) -> httpx.Response:
        """A GET."""
        return self.http.get(verb, params=params, headers=params.pop("headers", None))

    def put(self, verb: str, content: Any, **params: Any) -> httpx.Response:
        """A PUT."""
        return self.http.put(verb, params=params, content=content, headers=params.pop("headers", None))

    def post(self, verb: str, **body: Any) -> httpx.Response:
        """A POST of JSON."""
        return self.http.post(verb, json=body)

    def shell(self, command: str, user: str = "user") -> str:
        """What a command prints in the sandbox."""
        result = self.sandbox.run(["/bin/sh", "-c", command], user=user)
        result.check()
        return result.stdout


@pytest.fixture(scope="module")
def hatchway(service: Service) -> Iterator[Hatchway]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def files(service: Service, hatchway: Hatchway) -> Iterator[Files]:
    with hatchway.sandboxes.create() as sandbox:
        files = Files(service, sandbox)
        yield files
        files.http.close()


def ok(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers.get("content-type") == "application/json" else answer.content


def check(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text


def test_sizes_that_others_lose(files: Files) -> None:
    for size in (0, 1, 18 * 1024, 18 * 1024 + 1, 300_000):
        octets = random.Random(size).randbytes(size)
        entry = ok(files.put("content", octets, path=f"size-{size}"), 201)["entry"]
        assert (entry["path"], entry["size"], entry["user"]) == (f"/home/user/size-{size}", size, "user")
        assert ok(files.get("content", path=f"size-{size}")) == octets
        assert files.shell(f"sha256sum < size-{size}").split()[0] == hashlib.sha256(octets).hexdigest()


def test_ranges_of_a_file_that_the_sandbox_wrote(files: Files) -> None:
    files.shell("seq 1 100000 > numbers")
    whole = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    for asked, part in (("bytes=0-9", whole[:10]), ("bytes=500000-", whole[500_000:]), ("bytes=-20", whole[-20:])):
        answer = files.get("content", path="numbers", headers={"range": asked})
        assert ok(answer, 206) == part
    check(files.get("content", path="numbers", headers={"range": f"bytes={len(whole)}-"}), 416, "range_unsatisfiable")


def test_each_user_may_what_the_sandbox_lets_him(files: Files) -> None:
    check(files.get("content", path="/etc/shadow"), 403, "file_permission_denied")
    assert ok(files.get("content", path="/etc/shadow", user="root")).startswith(b"root:")
    check(files.put("content", b"x", path="/etc/mine"), 403, "file_permission_denied")
    assert ok(files.put("content", b"x", path="/etc/mine", user="root", mode="600"), 201)["entry"]["user"] == "root"
    check(files.get("content", path="/etc/mine"), 403, "file_permission_denied")
    check(files.post("remove", path="/etc/mine"), 403, "file_permission_denied")
    ok(files.post("remove", path="/etc/mine", user="root"))
    check(files.put("content", b"x", path="/etc/hosts", user="root"), 409, "file_busy")
    check(files.get("stat", path="/", user="nosuchuser"), 422, "unknown_user")
    files.shell("mkdir -p links && ln -sf /etc/shadow links/away")
    check(files.get("content", path="links/away"), 403, "file_permission_denied")
    check(files.put("content", b"x", path="links/away"), 403, "file_permission_denied")


def node_memory(service: Service) -> int:
    """Octets of memory that the node process holds."""
    node = json.loads((service.data_dir / "run" / "roles.json").read_text())["node"]
    return int(Path(f"/proc/{node}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_hundred_megabytes_up_and_down_in_constant_memory(service: Service, files: Files) -> None:
    block = random.Random(7).randbytes(2**20)
    expected = hashlib.sha256(block * (LARGE // len(block))).hexdigest()
    before = node_memory(service)
    peak = [before]

    def pieces() -> Iterator[bytes]:
        for n in range(LARGE // len(block)):
            if n % 20 == 0:
                peak.append(node_memory(service))
            yield block

    ok(files.put("content", pieces(), path="large", headers={"content-length": str(LARGE)}), 201)
    digest, got = hashlib.sha256(), 0
    with files.http.stream("GET", "content", params={"path": "large"}) as response:
        assert response.headers["content-length"] == str(LARGE)
        for piece in response.iter_raw():
            digest.update(piece)
            got += len(piece)
            if got % (20 * 2**20) < len(piece):
                peak.append(node_memory(service))
    assert (got, digest.hexdigest()) == (LARGE, expected)
    assert max(peak) - before < 48 * 2**20
    ok(files.post("remove", path="large"))


def test_folders_go_up_and_come_down(files: Files) -> None:
    contents = {f"tree/{n}/file": random.Random(n).randbytes(n * 1000) for n in range(30)}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o640
            archive.addfile(info, io.BytesIO(content))
    done = ok(files.put("archive", gzip.compress(made.getvalue()), path="up", parents=1, format="tar.gz"))
    assert (done["files"], done["bytes"]) == (30, sum(map(len, contents.values())))
    assert files.shell("find up -type f -user user -perm 640 | wc -l").strip() == "30"
    with tarfile.open(fileobj=io.BytesIO(ok(files.get("archive", path="up"))), mode="r:") as archive:
        got = {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr] # a regular file has one
            for member in archive
            if member.isfile()
        }
    assert got == contents
    listed = ok(files.get("list", path="up", depth=3))["entries"]
    assert len(listed) == 1 + 30 + 30
    files.shell("chmod 700 up && mkdir up/empty")
    assert ok(files.post("remove", path="up", recursive=True))["removed"] == 63
    check(files.get("stat", path="up"), 404, "file_not_found")


def test_changes_are_watched(files: Files) -> None:
    ok(files.post("mkdir", path="watched"), 201)
    events: list[tuple[str, dict[str, Any]]] = []
    ready = threading.Event()

    def watch() -> None:
        name = ""
        with files.http.stream("GET", "watch", params={"path": "watched", "recursive": 1}) as response:
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                    if name == "ready":
                        ready.set()
                elif line.startswith("data: "):
                    events.append((name, json.loads(line.removeprefix("data: "))))

    watching = threading.Thread(target=watch)
    watching.start()
    assert ready.wait(WITHIN_S)
    files.shell("mkdir watched/sub && echo x > watched/sub/a && mv watched/sub/a watched/b && rm -r watched")
    watching.join(WITHIN_S)
    assert not watching.is_alive()
    assert events[-1] == ("end", {"reason": "removed"})
    told = {(data["event"], data["path"]) for name, data in events if name == "file"}
    assert {
        ("create", "/home/user/watched/sub"),
        ("rename", "/home/user/watched/b"),
        ("remove", "/home/user/watched/b"),
    } <= told


def test_memory_file_systems_take_what_they_hold_and_no_more(files: Files) -> None:
    """What lies in memory is charged to the users' share, not to that of the programs that work on files."""
    room = int(files.shell("df --output=avail -m /dev/shm | tail -1"))
    try:
        for number in range(3):
            ok(files.put("content", bytes((room // 4) << 20), path=f"/dev/shm/{number}"), 201)
        check(files.put("content", bytes(room << 20), path="/dev/shm/3"), 507, "sandbox_disk_full")
        assert ok(files.get("stat", path="/etc/hosts"))["entry"]["type"] == "file"
    finally:
        files.shell("rm -f /dev/shm/*")


def test_a_full_disk_is_said_and_leaves_the_old_file(files: Files) -> None:
    ok(files.put("content", b"before", path="kept"), 201)
    free = int(files.shell("df --output=avail -B1 . | tail -1"))
    connection = http.client.HTTPConnection(files.http.base_url.host, files.http.base_url.port or 80, timeout=WITHIN_S)
    connection.putrequest("PUT", f"{files.http.base_url.path}content?path=kept")
    connection.putheader("authorization", files.http.headers["authorization"])
    connection.putheader("content-length", str(free * 2))
    connection.endheaders(bytes(2**20))
    # The room is claimed before anything is written: the answer does not wait for the rest of the body.
    with contextlib.closing(connection):
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["code"]) == (507, "sandbox_disk_full")
    assert ok(files.get("content", path="kept")) == b"before"
    files.shell("rm kept")


def test_states_are_said(service: Service, hatchway: Hatchway) -> None:
    with hatchway.sandboxes.create() as sandbox:
        files = Files(service, sandbox)
        ok(files.put("content", b"kept", path="kept"), 201)
        sandbox.pause()
        check(files.get("content", path="kept"), 409, "sandbox_not_running")
        sandbox.resume()
        assert ok(files.get("content", path="kept")) == b"kept"
        sandbox.stop()
        check(files.get("content", path="kept"), 409, "sandbox_not_running")
    assert files.get("content", path="kept").status_code in (401, 403, 409)
    files.http.close()
