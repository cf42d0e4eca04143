"""What leaves a sandbox, with real machines and all roles: what arrived at a server outside is what counts."""

import http.server
import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Service
from tests.support.certificates import Authority

from hatchway.client import Output, Sandbox

pytestmark = pytest.mark.vm

NAME = "site.test"
CANARY = "canary-0123456789abcdef"
WITHIN_S = 60.0
FETCH = """
import sys, time, urllib.request, urllib.error
for one in sys.argv[1:]:
    url, _, token = one.partition("#")
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            print(answer.status, answer.read().decode().strip())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print("failed", error)
"""
READ_ON = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=40) as answer:
    print("first", answer.read1(5).decode(), flush=True)
    try:
        print("then", answer.read(1), flush=True)
    except Exception as error:
        print("cut", type(error).__name__, flush=True)
"""


class Site:
    """An HTTPS server on loopback. `arrived` are method, path and authorization of all requests."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "outside")
        self.arrived: list[tuple[str, str, str]] = []
        self.connections = 0
        self.release = threading.Event()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                told = self.headers.get("Authorization", "")
                site.arrived.append((self.command, self.path, told))
                self.send_response(200)
                if self.path.endswith("/endless"):
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.wfile.write(b"5\r\nhello\r\n")
                    self.wfile.flush()
                    site.release.wait(WITHIN_S)
                    return
                body = f"you sent {told or 'nothing'}".encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.authority.issue(NAME))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.arrived]

    def policy(self, *, credential: bool = False, paths: str = "/ok/**") -> dict[str, Any]:
        """Lets GET of `paths` pass."""
        rule: dict[str, Any] = {
            "id": "site",
            "to": {"hosts": [NAME]},
            "ports": [self.port],
            "protocol": "http",
            "resolve": {"private": "allow"},
            "http": {"allow": [{"methods": ["GET"], "paths": [paths]}]},
        }
        document: dict[str, Any] = {"version": 1, "dns": {"records": {NAME: ["127.0.0.1"]}}, "rules": [rule]}
        if credential:
            rule["credentials"] = ["bot"]
            inject = [{"where": "header", "name": "authorization", "format": "Bearer {}"}]
            document["credentials"] = [
                {"id": "bot", "source": "store:bot", "expose": {"env": "BOT_TOKEN"}, "inject": inject}
            ]
        return document


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def outward(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose operator lets policies name the site on this host's loopback."""
    if os.geteuid() != 0:
        pytest.skip("without root the roles share one user: what each of them may reach is not shown")
    service = Service(tmp_path_factory.mktemp("outward"))
    settings = service.data_dir / "hatchway.toml"
    settings.write_text(
        f'[egress]\ntrusted_ca_files = ["{site.authority.ca}"]\nshards = 2\n'
        f'[[egress.host_services]]\nnetwork = "127.0.0.1/32"\nport = {site.port}\n'
    )
    settings.chmod(0o600)
    up = service.up()
    assert up.returncode == 0, up.stderr.decode()
    try:
        with service.client() as hatchway:
            hatchway.policies.put("lan", {"version": 1, "private_networks": ["127.0.0.1/32"]}, tier="project")
        yield service
    finally:
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for a condition."""
    end = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def fetch(sandbox: Sandbox, *urls: str) -> list[str]:
    """What a client in the guest gets, for each URL, `URL#TOKEN` with a token. One process asks for all: it takes seconds to start."""
    return sandbox.run(["python3", "-c", FETCH, *urls]).stdout.splitlines()


def test_what_the_policy_allows_arrives_and_nothing_else(outward: Service, site: Site) -> None:
    site.arrived.clear()
    with outward.client() as hatchway, hatchway.sandboxes.create(policy=site.policy()) as sandbox:
        url = f"https://{NAME}:{site.port}"
        allowed, refused, *others = fetch(
            sandbox,
            f"{url}/ok/one",
            f"{url}/other",
            f"https://elsewhere.test:{site.port}/ok/",
            f"http://198.51.100.7:{site.port}/ok/",
        )
        assert allowed == "200 you sent nothing"
        assert refused.startswith("403")
        assert "path_not_allowed" in refused
        assert [one.startswith("failed") for one in others] == [True, True]
        assert site.paths() == ["/ok/one"]
        info = sandbox.refresh()
        assert info.policy is not None
        assert info.policy["applied_revision"] == info.policy["revision"]
        assert info.conditions == ()
        why = hatchway.policies.check(sandbox.id, NAME, port=site.port, method="GET", path="/other")
        assert (why["action"], why["reason"]) == ("deny", "path_not_allowed")

        # Narrowed: what is open is cut, and the answer to the change says when it holds.
        said, narrowed = "", False
        for event in sandbox.start(["python3", "-u", "-c", READ_ON, f"{url}/ok/endless"]):
            said += event.text if isinstance(event, Output) else ""
            if "first hello" in said and not narrowed:
                narrowed = True
                sandbox.update(policy=site.policy(paths="/nothing"))
        assert narrowed
        assert "cut " in said, said  # it would have gone on for as long as the server holds it
        until(lambda: _applied(sandbox), "the narrower policy never held")
        assert site.paths() == ["/ok/one", "/ok/endless"]


def _applied(sandbox: Sandbox) -> bool:
    policy = sandbox.refresh().policy
    return policy is not None and policy["applied_revision"] == policy["revision"]


def files_with(folder: Path, what: str) -> list[Path]:
    """The files below a folder that have a text in them; holes are not read."""
    found = []
    for path in folder.rglob("*"):
        if not path.is_file() or path.is_symlink():
            continue
        with open(path, "rb") as file:
            if any(what.encode() in piece for piece in _data(file.fileno())):
                found.append(path)
    return found


def _data(fd: int) -> Iterator[bytes]:
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, at, os.SEEK_HOLE)
        while at < end:
            piece = os.pread(fd, min(1 << 24, end - at) + 64, at)  # the next piece begins within this one's end
            yield piece
            at += max(1, len(piece) - 64) if at + len(piece) < end else len(piece)


def memory_has(pid: int, what: str) -> bool:
    """Whether a text is anywhere in a process's memory."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            begin, end = (int(text, 16) for text in span.split("-"))
            if "r" in rights and "[v" not in line:
                try:
                    memory.seek(begin)
                    if what.encode() in memory.read(end - begin):
                        return True
                except (OSError, OverflowError):
                    continue  # a mapping of a device, or one that is gone
    return False


def test_a_secret_never_enters_and_each_generation_has_placeholders_of_its_own(outward: Service, site: Site) -> None:
    url = f"https://{NAME}:{site.port}/ok/secret"
    put = outward.run("credentials", "put", "bot", "--host", NAME, "--from-stdin", input=CANARY.encode())
    assert put.returncode == 0, put.stderr
    script = 'echo "$BOT_TOKEN"; sha256sum /run/hatchway/ca.crt | cut -c1-64; openssl x509 -in /run/hatchway/ca.crt -pubkey -noout 2>/dev/null | tail -2 | head -1'

    def identity(one: Sandbox) -> tuple[str, str]:
        token, _, *key = one.run(["sh", "-c", script]).stdout.split("\n")
        return token, "".join(key)

    with (
        outward.client() as hatchway,
        hatchway.sandboxes.create(policy=site.policy(credential=True)) as sandbox,
    ):
        before = identity(sandbox)
        site.arrived.clear()
        (answer,) = fetch(sandbox, f"{url}#{before[0]}")
        assert site.arrived == [("GET", "/ok/secret", f"Bearer {CANARY}")]
        assert answer.startswith("200")
        assert CANARY not in answer
        assert CANARY not in sandbox.run(["sh", "-c", "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"]).stdout

        memories = {name: memory_has(pid, CANARY) for name, pid in _roles(outward).items() if name != "launcher"}
        assert {name for name, has in memories.items() if has} <= {"broker", "control"}, memories
        assert memories["broker"]

        sandbox.suspend()
        # All that there is of the guest, and all else that the service keeps, lies in files now.
        assert any("node" in path.parts for path in files_with(outward.data_dir, before[0]))
        assert files_with(outward.data_dir, CANARY) == []
        sandbox.restore()
        after = identity(sandbox)
        assert after[0] != before[0]
        assert after[1] == before[1]
        site.arrived.clear()
        old, new = fetch(sandbox, f"{url}#{before[0]}", f"{url}#{after[0]}")
        assert old.startswith("403")
        assert new.startswith("200")
        assert len(site.arrived) == 1

        (branch,) = sandbox.fork()
        with branch:
            own = identity(branch)
            assert own[0] not in (before[0], after[0])
            assert own[1] != after[1]
            sources, new = fetch(branch, f"{url}#{after[0]}", f"{url}#{own[0]}")
            assert sources.startswith("403")
            assert new.startswith("200")


@pytest.mark.parametrize("roles", [("egress",), ("node", "launcher", "broker", "audit", "control")], ids=" ".join)
def test_g01_killed_roles_open_nothing_and_are_back(
    outward: Service, site: Site, steady: Sandbox, roles: tuple[str, ...]
) -> None:
    """Whichever process ends: what was denied is denied, and what was allowed is served again, without anybody's help."""
    url = f"https://{NAME}:{site.port}"
    killed = {pid for name, pid in _roles(outward).items() if name.partition("-")[0] in roles}
    assert len(killed) >= len(roles)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    site.arrived.clear()
    until(lambda: not killed & set(_roles(outward).values()), "they were not started again")
    served: list[str] = []

    def is_served() -> bool:
        denied, *allowed = fetch(steady, f"{url}/other", f"{url}/ok/again")
        served.extend(allowed)
        assert not denied.startswith("200")
        return bool(allowed) and allowed[0].startswith("200")

    until(is_served, f"it was not served again: {served}")
    assert set(site.paths()) == {"/ok/again"}


@pytest.fixture(scope="module")
def steady(outward: Service, site: Site) -> Iterator[Sandbox]:
    with outward.client() as hatchway, hatchway.sandboxes.create(policy=site.policy()) as sandbox:
        yield sandbox


def _roles(service: Service) -> dict[str, int]:
    found: dict[str, int] = json.loads((service.data_dir / "run" / "roles.json").read_text())
    return found
