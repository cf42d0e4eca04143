"""E2B's sandboxes and who has no right to them, over the wire, in real virtual machines: tokens, links and watchers of others, and after the end."""

import json
from collections.abc import Iterator
from urllib.parse import urlencode

import httpx
import pytest
from tests.acceptance.conftest import Service
from tests.support.e2b_agent import WITHIN, Agent, Cloud, key_of

from hatchway.e2b import signatures

CALLS = (
    "process.Process/List",
    "process.Process/SendInput",
    "process.Process/SendSignal",
    "filesystem.Filesystem/Stat",
    "filesystem.Filesystem/Remove",
    "filesystem.Filesystem/GetWatcherEvents",
)
GET = ("/files?path=/etc/passwd", "/envs", "/metrics")


@pytest.fixture(scope="module")
def cloud(service: Service) -> Cloud:
    endpoint = json.loads((service.data_dir / "endpoint.json").read_text())
    with service.client() as client:
        client.sandboxes.create(timeout=WITHIN).delete()  # the first one waits for more than an SDK would
        return Cloud(endpoint["e2b"], key_of(client))


@pytest.fixture(scope="module")
def two(cloud: Cloud) -> Iterator[tuple[Agent, Agent]]:
    made = cloud.create(), cloud.create()
    yield made
    for one in made:
        cloud.kill(one)


def link(agent: Agent, path: str, operation: str = "read") -> str:
    assert agent.token is not None
    signature = signatures.sign(path, operation, "", agent.token, None)
    return "/files?" + urlencode({"path": path, "signature": signature})


def test_a_token_is_for_its_own_sandbox_alone(two: tuple[Agent, Agent]) -> None:
    mine, other = two
    watcher = other.ok("filesystem.Filesystem/CreateWatcher", {"path": "/tmp"})["watcherId"]
    status, code = mine.code("filesystem.Filesystem/GetWatcherEvents", {"watcherId": watcher})
    assert (status, code) == (404, "not_found"), "a watcher of another"
    label = f"49983-{other.sandbox_id}.sbx.test"
    ways = [
        {"E2b-Sandbox-Id": other.sandbox_id},
        {"E2b-Sandbox-Id": f"{other.sandbox_id}-{mine.sandbox_id}"},
        {"E2b-Sandbox-Id": other.sandbox_id.upper()},
        {"Host": label},
        {"Host": label.upper() + "."},
        {"Host": f"49983-{other.sandbox_id}-{mine.sandbox_id}.sbx.test"},
    ]
    for way in ways:
        for token in (mine.token, "", other.token[:-1] if other.token else ""):
            headers = {**way, "X-Access-Token": str(token)}
            for call in CALLS:
                answer = mine.http.post(f"/{call}", json={}, headers=headers)
                assert answer.status_code == 401, (way, call, answer.text)
            for path in (*GET, link(mine, "/etc/passwd")):
                assert mine.http.get(path, headers=headers).status_code == 401, (way, path)
            assert mine.http.post("/files?path=/tmp/x", content=b"x", headers=headers).status_code == 401
    bare = {"E2b-Sandbox-Id": other.sandbox_id, "E2b-Sandbox-Port": "49983"}
    with httpx.Client(base_url=mine.url, headers=bare, trust_env=False) as nobody:
        assert nobody.get(link(mine, "/etc/passwd")).status_code == 401
        assert nobody.get(link(other, "/etc/passwd")).status_code == 200
        assert nobody.get(link(other, "/etc/passwd", "write")).status_code == 401
        assert nobody.get(link(other, "/etc/passwd").replace("passwd", "shadow")).status_code == 401
        assert nobody.get(link(other, "/etc/passwd") + "&path=/etc/shadow").status_code == 200, "the first counts"
        assert b"root:x" in nobody.get(link(other, "/etc/passwd") + "&path=/etc/shadow").content


def test_what_was_killed_has_no_links(cloud: Cloud) -> None:
    made = cloud.create()
    path = link(made, "/etc/passwd")
    with httpx.Client(base_url=made.url, trust_env=False) as nobody:
        assert nobody.get(path).status_code == 200, "one URL: the signature says which"
        cloud.kill(made)
        gone = nobody.get(path)
        assert (gone.status_code, gone.json()["message"]) == (502, "The sandbox was not found")
    assert made.call("process.Process/List", {}).status_code == 502
