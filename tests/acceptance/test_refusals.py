"""Whatever a user gets wrong, and whatever the host lacks, is said with code, cause and remedy, and nothing hangs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import HATCHWAY, Service

from hatchway.client import End, Exit, Hatchway, Sandbox

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def hatchway(service: Service) -> Iterator[Hatchway]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(hatchway: Hatchway) -> Iterator[Sandbox]:
    with hatchway.sandboxes.create() as made:
        yield made


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60) as client:
        yield client


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer is a problem document with all that it must have."""
    assert response.headers["content-type"].startswith("application/problem+json"), response.text
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["status"], body["code"]) == (status, status, code)
    assert body["cause"]
    assert body["remedy"]
    return body


def create(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/sandboxes", json={"template": "seed:latest", **body})


def test_an_unknown_template(http: httpx.Client) -> None:
    body = problem(create(http, template="nothing:here"), 422, "unknown_template")
    assert "GET /v1/templates" in body["remedy"]  # which names those that the project may use, and no others


@pytest.mark.parametrize("key", [None, "hw_wrong", "nonsense"])
def test_a_missing_or_wrong_key(service: Service, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.get(f"{service.url}/v1/sandboxes", headers=headers)
    assert response.status_code == 401
    assert response.json()["remedy"]


@pytest.mark.parametrize(
    "size", [{"vcpus": 0}, {"vcpus": 33}, {"memory_mib": 1}, {"disk_mib": 10**9}, {"memory_mib": 262_144}]
)
def test_a_size_out_of_range(http: httpx.Client, size: dict[str, int]) -> None:
    response = create(http, **size)
    assert response.status_code == 422, response.text
    assert response.json()["remedy"]


def test_an_unknown_field(http: httpx.Client) -> None:
    response = create(http, colour="blue")
    assert response.status_code in (400, 422)
    assert "colour" in response.text


def test_invalid_json(http: httpx.Client) -> None:
    response = http.post("/v1/sandboxes", content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["remedy"]


def test_an_oversized_body(http: httpx.Client) -> None:
    response = create(http, metadata={"k": "v" * 2_000_000})
    assert response.status_code == 413
    assert response.json()["remedy"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"argv": ["no-such-command"]}, "no-such-command"),
        ({"argv": ["true"], "cwd": "/no/such/folder"}, "/no/such/folder"),
        ({"argv": ["true"], "user": "nobody-of-that-name"}, "nobody-of-that-name"),
    ],
)
def test_a_command_folder_or_user_that_does_not_exist(sandbox: Sandbox, what: dict[str, Any], words: str) -> None:
    events = list(sandbox.start(what.pop("argv"), **what))
    exits = [event for event in events if isinstance(event, Exit)]
    assert [event.reason for event in exits] == ["spawn_failed"]
    assert words in exits[0].message
    assert isinstance(events[-1], End)


def sessions(http: httpx.Client, sandbox: Sandbox, count: int) -> list[dict[str, Any]]:
    made = [http.post(f"/v1/sandboxes/{sandbox.id}/sessions", json={"argv": ["true"]}) for _ in range(count)]
    return [response.json()["session"] for response in made]


def test_another_sessions_token(http: httpx.Client, sandbox: Sandbox) -> None:
    one, other = sessions(http, sandbox, 2)
    response = httpx.post(one["attach_url"], headers={"Authorization": f"Bearer {other['token']}"})
    assert response.status_code == 403
    assert response.json()["remedy"]
    response = httpx.post(one["attach_url"], headers={"Authorization": "Bearer no.such.token"})
    assert response.status_code == 401
    assert httpx.post(one["attach_url"]).status_code == 401


def test_an_ended_session_is_told_again(hatchway: Hatchway, sandbox: Sandbox) -> None:
    session = sandbox.start(["echo", "once"])
    first = list(session)
    again = list(hatchway.sessions.get(session.id))
    assert [type(event) for event in again] == [type(event) for event in first]


def test_exec_on_a_deleted_sandbox(service: Service, http: httpx.Client, hatchway: Hatchway) -> None:
    gone = hatchway.sandboxes.create()
    gone.delete()
    response = http.post(f"/v1/sandboxes/{gone.id}/sessions", json={"argv": ["true"]})
    assert response.status_code in (404, 409, 410)
    assert response.json()["remedy"]
    done = service.run("exec", gone.id, "--", "true")
    assert done.returncode == 125
    assert b"remedy" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--template", "nothing", "--", "true"),
        ("get", "a" * 20),
        ("create", "--memory", "1"),
        ("logs", "b" * 20),
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_command_line_says_it_and_fails(service: Service, arguments: tuple[str, ...]) -> None:
    done = service.run(*arguments)
    assert done.returncode != 0
    assert b"error" in done.stderr.lower()


# -- the service itself


def up(folder: Path, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [*HATCHWAY, "up", "--data-dir", str(folder), "--api-port", "0", "--data-port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_two_services_on_one_folder(service: Service) -> None:
    done = up(service.data_dir)
    assert done.returncode == 1
    assert "already_running" in done.stderr
    assert "hatchway down" in done.stderr


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = up(tmp_path)
    assert done.returncode == 1
    assert "unsafe_folder" in done.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = up(tmp_path, "--api-port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "port_taken" in done.stderr


def test_no_vmm(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    done = up(tmp_path / "data", env={**os.environ, "PATH": str(programs)})
    assert done.returncode == 1
    assert "vmm_missing" in done.stderr
    assert "qemu-system-x86" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(service: Service, tmp_path: Path) -> None:
    """The node's folder lies on a file system of 520 MiB, in a mount namespace of the service's own."""
    node = tmp_path / "data" / "node"
    node.mkdir(parents=True)
    base = 1_900_000_000 + 2**17  # chosen, so that the file system can be made for the node's user
    mount = f"mount -t tmpfs -o size=520m,mode=0700,uid={base - 1} tmpfs {node}"
    start = " ".join(
        [*HATCHWAY, "up", "--no-bake", "--data-dir", str(node.parent), "--api-port", "0", "--data-port", "0"]
    )
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{mount} && exec {start}"],
        env={**service.environ, "HATCHWAY_UID_BASE": str(base)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        endpoint = node.parent / "endpoint.json"
        deadline = time.monotonic() + 120
        while not endpoint.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url, key = json.loads(endpoint.read_text())["api"], (node.parent / "dev.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}", "Prefer": "wait=60"}
        response = httpx.post(
            f"{url}/v1/sandboxes", json={"template": "seed:latest", "disk_mib": 512}, headers=headers, timeout=90
        )
        operation = response.json()["operation"]
        assert operation["status"] == "failed"
        assert operation["error"]["code"] == "host_disk_full"
        assert operation["error"]["remedy"]
        deleted = httpx.delete(f"{url}/v1/sandboxes/{operation['target']}", headers=headers, timeout=90)
        assert deleted.json()["sandbox"]["state"] == "deleted"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
