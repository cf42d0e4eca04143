"""The wrapper's control surface, row by row of E2B's contract, before a real control plane with a played node."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
import pytest_asyncio
from tests.support.control_service import WITHIN
from tests.support.e2b_world import World, world

from hatchway.domain.errors import Conflict, Internal
from hatchway.e2b.control import routes
from hatchway.e2b.control.routes import ROUTES
from hatchway.wire.node import Event, Progress

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = "0" * 20
HOUR = 3600


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def e2b() -> AsyncIterator[World]:
    async with world() as here:
        yield here


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def tidy(e2b: World) -> AsyncIterator[None]:
    """Every test finds none of another's sandboxes."""
    yield
    e2b.node.hooks.clear()
    for one in (await e2b.http.get("/v2/sandboxes")).json():
        await e2b.http.delete(f"/sandboxes/{one['sandboxID']}")
    for one in (await e2b.http.get("/snapshots")).json():
        await e2b.http.delete(f"/templates/{one['snapshotID']}")


def at(text: str) -> datetime:
    assert text.endswith("Z"), text
    return datetime.fromisoformat(text)


def failed(answer: httpx.Response, status: int) -> str:
    """The message of an error, which is nothing but E2B's form of one."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) <= {"code", "message", "error_code"}
    assert body["code"] == status
    assert body["message"]
    return str(body["message"])


# -- create


@pytest.mark.parametrize(("path", "timeout_s", "secure"), [("/v2/sandboxes", 300, True), ("/sandboxes", 15, False)])
async def test_create(e2b: World, path: str, timeout_s: int, secure: bool) -> None:
    made = await e2b.http.post(path, json={"templateID": "base"})
    assert made.status_code == 201, made.text
    shown = made.json()
    assert re.fullmatch(r"[a-z0-9]{20}", shown["sandboxID"])
    assert (shown["templateID"], shown["alias"], shown["domain"]) == ("base", "base", None)
    assert isinstance(shown["clientID"], str)
    assert re.fullmatch(r"\d+\.\d+\.\d+", shown["envdVersion"])
    assert shown["trafficAccessToken"] is None
    tokens = e2b.wrapper.identity
    assert shown.get("envdAccessToken") == (tokens.envd_token(shown["sandboxID"]) if secure else None)
    kept = await e2b.ours(shown["sandboxID"])
    assert (kept["template"], kept["timeout_s"], kept["on_timeout"]) == ("seed:latest", timeout_s, "delete")
    assert (kept["auto_wake"], kept["state"]) == (False, "running")


async def test_create_with_everything(e2b: World) -> None:
    network = {"allowPublicTraffic": False, "denyOut": ["8.8.8.8/32"], "maskRequestHost": "x.example:${PORT}"}
    shown = await e2b.create(
        templateID="base:latest",
        timeout=HOUR,
        metadata={"k y": "v&1", "user": "1"},
        envVars={"A": "1"},
        autoPause=True,
        autoResume={"enabled": True},
        allow_internet_access=True,
        network=network,
        somethingNewer={"of": "E2B"},
    )
    sandbox_id = shown["sandboxID"]
    assert shown["trafficAccessToken"] == e2b.wrapper.identity.traffic_token(sandbox_id)
    info = await e2b.info(sandbox_id)
    assert info["metadata"] == {"k y": "v&1", "user": "1"}
    assert info["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    assert (info["allowInternetAccess"], info["network"]) == (True, network)
    kept = await e2b.ours(sandbox_id)
    assert (kept["timeout_s"], kept["on_timeout"], kept["auto_wake"]) == (HOUR, "suspend", False)
    assert kept["policy"]["own"]
    assert e2b.node.specs[sandbox_id].env == {"A": "1"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"timeout": 0}, "Timeout"),
        ({"timeout": -1}, "Timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": 1e12}, "timeout_s"),
        ({"autoPauseMemory": False}, "autoPause"),
        ({"autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}}, "autoResume"),
        ({"network": {"denyOut": ["example.com"]}}, "denyOut"),
        ({"network": {"allowOut": ["example.com"]}}, "0.0.0.0/0"),
        ({"metadata": {'a"b': "1"}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"envVars": {"a b": "1"}}, "env"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"mcp": {"x": {}}}, "mcp"),
        ({"templateID": 7}, "templateID"),
    ],
)
async def test_create_refuses(e2b: World, body: dict[str, Any], says: str) -> None:
    for path in ("/v2/sandboxes", "/sandboxes"):
        refused = await e2b.http.post(path, json={"templateID": "base", **body})
        assert says in failed(refused, 400), refused.text
    assert (await e2b.http.get("/v2/sandboxes")).json() == []


async def test_private_ports_need_a_secured_sandbox(e2b: World) -> None:
    body = {"templateID": "base", "network": {"allowPublicTraffic": False}}
    assert "secure" in failed(await e2b.http.post("/sandboxes", json=body), 400)
    assert (await e2b.http.post("/sandboxes", json={**body, "secure": True})).status_code == 201


@pytest.mark.parametrize("template", ["nothing", "base:v7", "ns/name:tag", NOWHERE, f"{NOWHERE}:default", "Über", ""])
async def test_create_from_no_template(e2b: World, template: str) -> None:
    assert "not found" in failed(await e2b.http.post("/v2/sandboxes", json={"templateID": template}), 404)


async def test_bodies_are_json_however_they_come(e2b: World) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"templateID":'
        yield b'"base"}'

    made = await e2b.http.post("/v2/sandboxes", content=chunks(), headers={"content-type": "application/json"})
    assert made.status_code == 201, made.text
    for broken in (b"{", b"[]", b'"x"', b"\xff", b"null"):
        failed(await e2b.http.post("/v2/sandboxes", content=broken), 400)
    failed(await e2b.http.post("/v2/sandboxes", content=b" " * (1024 * 1024 + 1)), 413)


async def test_a_repeated_creation_makes_nothing(e2b: World) -> None:
    again = {"idempotency-key": "one-and-the-same"}
    first = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=again)
    second = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=again)
    assert (first.status_code, second.status_code) == (201, 201), second.text
    assert first.json() == second.json()
    other = await e2b.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 7}, headers=again)
    failed(other, 400)
    assert len((await e2b.http.get("/v2/sandboxes")).json()) == 1


async def test_what_could_not_be_made_leaves_nothing(e2b: World) -> None:
    async def fail(_: Any) -> None:
        raise Internal("broken", "The machine did not start.", "")

    e2b.node.hooks["sandbox.create"] = fail
    refused = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"})
    assert "did not start" in failed(refused, 500)
    assert refused.headers["should-retry"] == "false"
    async with asyncio.timeout(WITHIN):
        while (await e2b.service.http.get("/v1/sandboxes", params={"annotated": "e2b"})).json()["sandboxes"]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("again", [False, True])
async def test_a_creation_that_waits_for_its_template_says_so(
    e2b: World, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """And leaves nothing, but for who can ask for the same sandbox again."""
    go_on = asyncio.Event()

    async def bake(spec: Any) -> None:
        e2b.node.tell(Event(progress=Progress(sandbox_id=spec.sandbox_id, phase="boot")))
        await go_on.wait()

    e2b.node.hooks["sandbox.create"] = bake
    headers = {"idempotency-key": "while-it-is-baked"} if again else {}
    with monkeypatch.context() as patched:
        patched.setattr(routes, "WITHIN_S", 1.5)
        late = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers)
    assert "is still being prepared for its first sandbox (boot)" in failed(late, 503)
    assert "create the sandbox again" in late.json()["message"]
    assert (late.headers["should-retry"], late.headers["retry-after"]) == ("true", "1")
    go_on.set()
    if again:
        made = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers)
        assert made.status_code == 201, made.text
        assert [one["sandboxID"] for one in (await e2b.http.get("/v2/sandboxes")).json()] == [made.json()["sandboxID"]]
    else:
        async with asyncio.timeout(WITHIN):
            while (await e2b.service.http.get("/v1/sandboxes", params={"annotated": "e2b"})).json()["sandboxes"]:
                await asyncio.sleep(0.01)


async def test_a_creation_that_is_late_for_no_reason_known(e2b: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()

    async def hang(_: Any) -> None:
        await go_on.wait()

    e2b.node.hooks["sandbox.create"] = hang
    with monkeypatch.context() as patched:
        patched.setattr(routes, "WITHIN_S", 1.0)
        late = await e2b.http.post("/v2/sandboxes", json={"templateID": "base"})
    assert "did not run within" in failed(late, 504)
    assert late.headers["should-retry"] == "false"
    go_on.set()


# -- keys


async def test_without_a_key_that_is_good_nothing_is_done(e2b: World) -> None:
    sandbox = await e2b.create()
    for key, status in ((None, 401), ("e2b_" + "0" * 40, 401), ("hw_nonsense", 401), ("é", 401)):
        headers = {} if key is None else {"x-api-key": key}
        async with e2b.client(None) as client:
            raw = {name: value.encode() for name, value in headers.items()}
            failed(await client.get(f"/sandboxes/{sandbox['sandboxID']}", headers=raw), status)
    read = (await e2b.service.http.post("/v1/keys", json={"name": "read", "scopes": ["read"], "e2b": True})).json()
    async with e2b.client(read["key"]["key"]) as client:
        assert (await client.get("/v2/sandboxes")).status_code == 200
        failed(await client.post("/v2/sandboxes", json={"templateID": "base"}), 403)
        failed(await client.delete(f"/sandboxes/{sandbox['sandboxID']}"), 403)
    bearer = {"authorization": f"Bearer {e2b.key}"}
    async with e2b.client(None) as client:
        assert (await client.get("/v2/sandboxes", headers=bearer)).status_code == 200
    assert (await e2b.info(sandbox["sandboxID"]))["state"] == "running"


async def test_another_projects_sandboxes_are_not_there(e2b: World) -> None:
    sandbox = await e2b.create()
    await e2b.service.http.post("/v1/projects", json={"name": "other"})
    made = await e2b.service.http.post("/v1/keys", json={"name": "o", "project": "other", "e2b": True})
    async with e2b.client(made.json()["key"]["key"]) as client:
        assert (await client.get("/v2/sandboxes")).json() == []
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/connect")):
            body = {"timeout": 1} if method == "POST" else None
            failed(await client.request(method, f"/sandboxes/{sandbox['sandboxID']}{path}", json=body), 404)


async def test_a_key_that_reads_alone_gets_no_token_of_a_sandbox(e2b: World) -> None:
    """By the token its commands are run and its files written: whoever may do that over API v1 gets it, and nobody else."""
    sandbox = await e2b.create()
    for scopes, may in ((["read"], False), (["read", "exec"], True), (["read", "write"], True)):
        made = await e2b.service.http.post("/v1/keys", json={"name": "x", "e2b": True, "scopes": scopes})
        async with e2b.client(made.json()["key"]["key"]) as client:
            shown = await client.get(f"/sandboxes/{sandbox['sandboxID']}")
            assert shown.status_code == 200
            assert shown.json().get("envdAccessToken") == (sandbox["envdAccessToken"] if may else None)
            for path in ("/v2/sandboxes", "/sandboxes"):
                connected = await client.post(f"{path}/{sandbox['sandboxID']}/connect", json={"timeout": 0})
                if "write" in scopes:
                    assert connected.json()["envdAccessToken"] == sandbox["envdAccessToken"]
                else:
                    assert sandbox["envdAccessToken"] not in connected.text
                    failed(connected, 403)


@pytest.mark.parametrize("key", [b"\xe9", b"", b"a b", b"x" * 256])
async def test_a_key_of_repetition_that_is_none(e2b: World, key: bytes) -> None:
    failed(await e2b.http.post("/v2/sandboxes", json={}, headers=[(b"idempotency-key", key)]), 400)


async def test_the_wrapper_knows_whose_place_a_request_takes(e2b: World) -> None:
    sandbox, plain = await e2b.create(), await e2b.service.create()
    assert (await e2b.wrapper.reaching.look(sandbox["sandboxID"])).info.project == plain["project"] != ""
    await e2b.service.http.delete(f"/v1/sandboxes/{plain['id']}", headers={"prefer": "wait=20"})


async def test_a_sandbox_of_the_other_api_is_not_there(e2b: World) -> None:
    plain = await e2b.service.create()
    assert (await e2b.http.get("/v2/sandboxes")).json() == []
    failed(await e2b.http.get(f"/sandboxes/{plain['id']}"), 404)
    failed(await e2b.http.delete(f"/sandboxes/{plain['id']}"), 404)
    assert (await e2b.service.get(plain["id"]))["state"] == "running"
    await e2b.service.http.delete(f"/v1/sandboxes/{plain['id']}", headers={"prefer": "wait=20"})


# -- get and list


async def test_get_shows_all_that_an_sdk_needs(e2b: World) -> None:
    sandbox = await e2b.create(timeout=HOUR)
    info = await e2b.info(sandbox["sandboxID"])
    for member in ("templateID", "sandboxID", "clientID", "cpuCount", "memoryMB", "diskSizeMB", "envdVersion"):
        assert info[member], member
    assert info["state"] == "running"
    assert "pauseMode" not in info
    assert info["envdAccessToken"] == sandbox["envdAccessToken"]
    assert info["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert (info["allowInternetAccess"], info["domain"]) == (None, None)
    assert timedelta(seconds=HOUR - 60) < at(info["endAt"]) - at(info["startedAt"]) < timedelta(seconds=HOUR + 60)
    with_client = await e2b.http.get(f"/sandboxes/{sandbox['sandboxID']}-6532622b")
    assert with_client.json() == info
    failed(await e2b.http.get(f"/sandboxes/{NOWHERE}"), 404)
    failed(await e2b.http.get("/sandboxes/..%2Fkeys"), 400)


async def listed(e2b: World, **query: object) -> list[str]:
    answer = await e2b.http.get("/v2/sandboxes", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return [one["sandboxID"] for one in answer.json()]


async def test_list_pages_in_either_order(e2b: World) -> None:
    made = [(await e2b.create())["sandboxID"] for _ in range(5)]
    await e2b.http.post(f"/sandboxes/{made[0]}/pause")
    assert await listed(e2b) == made[::-1]
    assert await listed(e2b, order="asc") == made
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        read: list[str] = []
        query = {"limit": "2", "order": order}
        while True:
            page = await e2b.http.get("/v2/sandboxes", params=query)
            assert page.headers["x-total-running"] == "4"
            read += [one["sandboxID"] for one in page.json()]
            if "x-next-token" not in page.headers:
                break
            query["nextToken"] = page.headers["x-next-token"]
            other = {**query, "order": "asc" if order == "desc" else "desc"}
            failed(await e2b.http.get("/v2/sandboxes", params=other), 400)
        assert read == expected
    assert "x-next-token" not in (await e2b.http.get("/v2/sandboxes", params={"limit": "5"})).headers


async def test_list_filters(e2b: World) -> None:
    first = await e2b.create(metadata={"k y": "v&1", "a": "b"})
    second = await e2b.create(metadata={"a": "b"})
    kept = await e2b.http.post(f"/sandboxes/{first['sandboxID']}/snapshots", json={})
    third = await e2b.create(templateID=kept.json()["snapshotID"])
    one, two, three = (shown["sandboxID"] for shown in (first, second, third))
    await e2b.http.post(f"/sandboxes/{two}/pause", json={})
    assert await listed(e2b, state="running") == [three, one]
    assert await listed(e2b, state="paused") == [two]
    assert await listed(e2b, state="running,paused") == [three, two, one]
    # As an SDK does it: each part quoted, put together, and twice encoded more.
    quoted = {quote(key): quote(value) for key, value in {"k y": "v&1", "a": "b"}.items()}
    raw = await e2b.http.get(f"/v2/sandboxes?{urlencode({'metadata': urlencode(quoted)})}")
    assert [shown["sandboxID"] for shown in raw.json()] == [one]
    exact = await e2b.http.get("/v2/sandboxes?metadata=k%252520y%3Dv%2525261")
    assert [shown["sandboxID"] for shown in exact.json()] == [one]
    assert await listed(e2b, metadata="a=b") == [two, one]
    assert await listed(e2b, metadata="a=b&x=y") == []
    assert await listed(e2b, template="base") == [two, one]
    assert await listed(e2b, template="seed") == [two, one]
    assert await listed(e2b, template=kept.json()["snapshotID"]) == [three]
    assert await listed(e2b, template="nothing") == []
    started = (await e2b.info(two))["startedAt"]
    assert await listed(e2b, startedAfter=started) == [three, two]
    later = (at(started) + timedelta(microseconds=1)).isoformat()
    assert await listed(e2b, startedAfter=later) == [three]
    assert await listed(e2b, startedAfter=started.replace("Z", "")) == [three, two]
    unencoded = await e2b.http.get(f"/v2/sandboxes?startedAfter={started.replace('Z', '+00:00')}")
    assert len(unencoded.json()) == 2, unencoded.text
    for query in (
        {"state": "asleep"},
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "many"},
        {"order": "up"},
        {"nextToken": "nonsense"},
        {"startedAfter": "yesterday"},
        {"template": "base:v1"},
        {"metadata": "alone"},
    ):
        failed(await e2b.http.get("/v2/sandboxes", params=query), 400)
    old = await e2b.http.get("/sandboxes", params={"metadata": "a=b"})
    assert [shown["sandboxID"] for shown in old.json()] == [one]


# -- lifecycle


@pytest.mark.parametrize("body", [None, {}, {"memory": True}, {"memory": True, "requireHealthyGuest": True}])
async def test_pause_keeps_memory_and_stops_time(e2b: World, body: dict[str, Any] | None) -> None:
    sandbox = await e2b.create(timeout=HOUR, metadata={"a": "b"})
    path = f"/sandboxes/{sandbox['sandboxID']}"
    before = await e2b.info(sandbox["sandboxID"])
    began = datetime.now(UTC)
    paused = await e2b.http.post(f"{path}/pause") if body is None else await e2b.http.post(f"{path}/pause", json=body)
    assert (paused.status_code, paused.content) == (204, b"")
    info = await e2b.info(sandbox["sandboxID"])
    assert (info["state"], info["pauseMode"], info["templateID"]) == ("paused", "full", "base")
    assert (info["startedAt"], info["metadata"]) == (before["startedAt"], {"a": "b"})
    assert began - timedelta(seconds=1) <= at(info["endAt"]) <= datetime.now(UTC)
    assert info["envdAccessToken"] == sandbox["envdAccessToken"]
    failed(await e2b.http.post(f"{path}/pause", json={}), 409)
    failed(await e2b.http.post(f"{path}/timeout", json={"timeout": 10}), 409)
    failed(await e2b.http.post(f"{path}/fork", json={}), 409)
    failed(await e2b.http.post(f"{path}/snapshots", json={}), 409)


@pytest.mark.parametrize("generation", ["/v2/sandboxes", "/sandboxes"])
async def test_connect(e2b: World, generation: str) -> None:
    sandbox = await e2b.create(timeout=HOUR, autoPause=True)
    path = f"{generation}/{sandbox['sandboxID']}/connect"
    before = await e2b.info(sandbox["sandboxID"])
    # What runs is only ever extended.
    there = await e2b.http.post(path, json={"timeout": 60})
    assert (there.status_code, there.json()) == (200, sandbox)
    assert (await e2b.info(sandbox["sandboxID"]))["endAt"] == before["endAt"]
    await e2b.http.post(path, json={"timeout": 2 * HOUR})
    assert at((await e2b.info(sandbox["sandboxID"]))["endAt"]) > at(before["endAt"]) + timedelta(minutes=50)
    for timeout_s in (60, 90, 0):
        assert (await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause")).status_code == 204
        began = datetime.now(UTC)
        resumed = await e2b.http.post(path, json={"timeout": timeout_s})
        assert (resumed.status_code, resumed.json()) == (201, sandbox), resumed.text
        info = await e2b.info(sandbox["sandboxID"])
        if timeout_s == 0:
            continue  # its time is over by now, or almost
        # Its time is what was asked for now, and what it was told to do at its end stays.
        left = at(info["endAt"]) - began
        assert timedelta(seconds=timeout_s - 1) < left < timedelta(seconds=timeout_s + 30)
        assert (info["state"], info["lifecycle"]["onTimeout"]) == ("running", "pause")
    failed(await e2b.http.post(f"{generation}/{NOWHERE}/connect", json={"timeout": 60}), 404)
    failed(await e2b.http.post(path, json={"timeout": -1}), 400)
    failed(await e2b.http.post(path, json={"timeout": "x"}), 400)


async def test_connect_without_a_time(e2b: World) -> None:
    sandbox = await e2b.create(timeout=20)
    for answer in (
        await e2b.http.post(f"/v2/sandboxes/{sandbox['sandboxID']}/connect"),
        await e2b.http.post(f"/v2/sandboxes/{sandbox['sandboxID']}/connect", json={}),
    ):
        assert answer.status_code == 200, answer.text
    left = at((await e2b.info(sandbox["sandboxID"]))["endAt"]) - datetime.now(UTC)
    assert left > timedelta(seconds=270)
    failed(await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/connect", json={}), 400)


async def test_who_connects_gets_the_token_of_a_sandbox_that_asks_for_none(e2b: World) -> None:
    """With one URL, SDK 2.20 sends nothing else that says which sandbox it connected to."""
    made = (await e2b.http.post("/sandboxes", json={"templateID": "base", "timeout": 60})).json()
    assert "envdAccessToken" not in made
    for path in ("/sandboxes", "/v2/sandboxes"):
        connected = await e2b.http.post(f"{path}/{made['sandboxID']}/connect", json={"timeout": 60})
        assert connected.json()["envdAccessToken"] == e2b.wrapper.identity.envd_token(made["sandboxID"])


async def test_connect_waits_for_a_transition_and_resumes_then(e2b: World) -> None:
    sandbox = await e2b.create()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_: Any) -> None:
        held.set()
        await go_on.wait()

    e2b.node.hooks["sandbox.suspend"] = hold
    pausing = asyncio.create_task(e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause"))
    await asyncio.wait_for(held.wait(), WITHIN)
    connecting = asyncio.create_task(
        e2b.http.post(f"/v2/sandboxes/{sandbox['sandboxID']}/connect", json={"timeout": 60})
    )
    await asyncio.wait({connecting}, timeout=0.2)
    assert not connecting.done()
    go_on.set()
    assert (await pausing).status_code == 204
    assert (await connecting).status_code == 201, connecting.result().text
    assert (await e2b.info(sandbox["sandboxID"]))["state"] == "running"


async def test_connects_at_once_are_one_resume(e2b: World) -> None:
    sandbox = await e2b.create()
    await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    path = f"/v2/sandboxes/{sandbox['sandboxID']}/connect"
    before = e2b.node.calls.count("sandbox.restore")
    answers = await asyncio.gather(*(e2b.http.post(path, json={"timeout": 100 + n}) for n in range(6)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert e2b.node.calls.count("sandbox.restore") == before + 1
    assert e2b.node.boxes[sandbox["sandboxID"]].state == "running"
    # Whoever came later has not shortened what one before him got.
    left = at((await e2b.info(sandbox["sandboxID"]))["endAt"]) - datetime.now(UTC)
    assert left > timedelta(seconds=90)


async def test_connect_to_what_is_being_killed(e2b: World) -> None:
    sandbox = await e2b.create()
    held, go_on = asyncio.Event(), asyncio.Event()

    async def hold(_: Any) -> None:
        held.set()
        await go_on.wait()

    e2b.node.hooks["sandbox.delete"] = hold
    killing = asyncio.create_task(e2b.http.delete(f"/sandboxes/{sandbox['sandboxID']}"))
    await asyncio.wait_for(held.wait(), WITHIN)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    failed(await e2b.http.post(f"/v2{path}/connect", json={}), 409)
    failed(await e2b.http.get(path), 404)
    failed(await e2b.http.delete(path), 404)
    assert (await e2b.http.get("/v2/sandboxes")).json() == []
    go_on.set()
    assert (await killing).status_code == 204
    failed(await e2b.http.post(f"/v2{path}/connect", json={}), 404)


async def test_a_pause_of_the_disk_alone(e2b: World) -> None:
    sandbox = await e2b.create(timeout=HOUR)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    assert (await e2b.http.post(f"{path}/pause", json={"memory": False})).status_code == 204
    info = await e2b.info(sandbox["sandboxID"])
    assert (info["state"], info["pauseMode"]) == ("paused", "filesystem")
    booted = (await e2b.ours(sandbox["sandboxID"]))["boot_id"]
    assert (await e2b.http.post(f"/v2{path}/connect", json={})).status_code == 201
    assert (await e2b.ours(sandbox["sandboxID"]))["boot_id"] != booted
    # And a connect that leaves the memory that was kept.
    await e2b.http.post(f"{path}/pause")
    booted = (await e2b.ours(sandbox["sandboxID"]))["boot_id"]
    assert (await e2b.http.post(f"/v2{path}/connect", json={"memory": False})).status_code == 201
    assert (await e2b.ours(sandbox["sandboxID"]))["boot_id"] != booted


async def test_memory_that_is_lost_can_be_left(e2b: World) -> None:
    sandbox = await e2b.create()
    path = f"/v2/sandboxes/{sandbox['sandboxID']}/connect"
    await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause")

    async def lost(_: Any) -> None:
        raise Conflict("memory_lost", "Its memory was made on another processor.", "")

    e2b.node.hooks["sandbox.restore"] = lost
    refused = await e2b.http.post(path, json={})
    failed(refused, 409)
    assert refused.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"
    assert (await e2b.http.post(path, json={"memory": False})).status_code == 201


async def test_a_pause_that_fails_leaves_it_running(e2b: World) -> None:
    sandbox = await e2b.create()

    async def fail(_: Any) -> None:
        raise Internal("broken", "The disk did not take it.", "")

    e2b.node.hooks["sandbox.suspend"] = fail
    refused = await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    assert "did not take it" in failed(refused, 503)
    assert refused.headers["should-retry"] == "false"
    assert (await e2b.info(sandbox["sandboxID"]))["state"] == "running"


async def test_resume_of_the_first_generation(e2b: World) -> None:
    sandbox = await e2b.create(timeout=HOUR)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    failed(await e2b.http.post(f"{path}/resume", json={"timeout": 60}), 409)
    await e2b.http.post(f"{path}/pause")
    resumed = await e2b.http.post(f"{path}/resume", json={"timeout": 60, "autoPause": True})
    assert (resumed.status_code, resumed.json()["sandboxID"]) == (201, sandbox["sandboxID"])
    info = await e2b.info(sandbox["sandboxID"])
    assert info["lifecycle"]["onTimeout"] == "pause"
    assert at(info["endAt"]) - datetime.now(UTC) < timedelta(seconds=61)
    await e2b.http.post(f"{path}/pause")
    await e2b.http.post(f"{path}/resume")
    assert (await e2b.info(sandbox["sandboxID"]))["lifecycle"]["onTimeout"] == "pause"
    failed(await e2b.http.post(f"/sandboxes/{NOWHERE}/resume", json={}), 404)


async def test_timeout_is_from_now_on_sooner_or_later(e2b: World) -> None:
    sandbox = await e2b.create(timeout=HOUR)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    for seconds in (60, 2 * HOUR, 30):
        done = await e2b.http.post(f"{path}/timeout", json={"timeout": seconds})
        assert (done.status_code, done.content) == (204, b"")
        left = at((await e2b.info(sandbox["sandboxID"]))["endAt"]) - datetime.now(UTC)
        assert timedelta(seconds=seconds - 20) < left <= timedelta(seconds=seconds)
    failed(await e2b.http.post(f"{path}/timeout", json={}), 400)
    failed(await e2b.http.post(f"/sandboxes/{NOWHERE}/timeout", json={"timeout": 1}), 404)


@pytest.mark.parametrize("seconds", [0, -5])
@pytest.mark.parametrize(
    ("pauses", "memory", "after"), [(False, True, None), (True, True, "full"), (True, False, "filesystem")]
)
async def test_no_time_left_is_now(e2b: World, seconds: int, pauses: bool, memory: bool, after: str | None) -> None:
    sandbox = await e2b.create(autoPause=pauses, **({} if memory else {"autoPauseMemory": False}))
    path = f"/sandboxes/{sandbox['sandboxID']}"
    assert (await e2b.http.post(f"{path}/timeout", json={"timeout": seconds})).status_code == 204
    async with asyncio.timeout(WITHIN):
        while (answer := await e2b.http.get(path)).status_code == 200 and answer.json()["state"] == "running":
            await asyncio.sleep(0.01)
    assert answer.json().get("pauseMode") == after, answer.text


async def test_refreshes_extend(e2b: World) -> None:
    sandbox = await e2b.create(timeout=60)
    path = f"/sandboxes/{sandbox['sandboxID']}/refreshes"
    assert (await e2b.http.post(path, json={"duration": 600})).status_code == 204
    assert at((await e2b.info(sandbox["sandboxID"]))["endAt"]) - datetime.now(UTC) > timedelta(seconds=500)
    assert (await e2b.http.post(path)).status_code == 204
    failed(await e2b.http.post(path, json={"duration": 3601}), 400)
    failed(await e2b.http.post(f"/sandboxes/{NOWHERE}/refreshes", json={}), 404)


async def test_kill(e2b: World) -> None:
    running, paused = await e2b.create(), await e2b.create()
    await e2b.http.post(f"/sandboxes/{paused['sandboxID']}/pause")
    for sandbox in (running, paused):
        path = f"/sandboxes/{sandbox['sandboxID']}"
        killed = await e2b.http.delete(path)
        assert (killed.status_code, killed.content) == (204, b"")
        failed(await e2b.http.delete(path), 404)
        failed(await e2b.http.get(path), 404)
        failed(await e2b.http.post(f"{path}/pause"), 404)
        failed(await e2b.http.post(f"{path}/timeout", json={"timeout": 5}), 404)
    assert (await e2b.http.get("/v2/sandboxes")).json() == []


async def test_a_failed_one_is_gone_but_can_be_killed(e2b: World) -> None:
    from hatchway.domain.lifecycle import State

    sandbox = await e2b.create()
    e2b.node.happen(sandbox["sandboxID"], State.FAILED, "vmm_died", "The monitor ended.")
    await e2b.service.until(sandbox["sandboxID"], state="failed")
    assert "The monitor ended" in failed(await e2b.http.get(f"/sandboxes/{sandbox['sandboxID']}"), 404)
    assert (await e2b.http.get("/v2/sandboxes")).json() == []
    failed(await e2b.http.post(f"/v2/sandboxes/{sandbox['sandboxID']}/connect", json={}), 404)
    assert (await e2b.http.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204


# -- forks, snapshots, templates


async def test_fork(e2b: World) -> None:
    source = await e2b.create(timeout=HOUR, autoPause=True, metadata={"a": "b"})
    path = f"/sandboxes/{source['sandboxID']}/fork"
    forked = await e2b.http.post(path, json={"count": 3, "timeout": 60})
    assert forked.status_code == 201, forked.text
    children = [one["sandbox"] for one in forked.json()]
    assert len({child["sandboxID"] for child in [source, *children]}) == 4
    assert len({child["envdAccessToken"] for child in [source, *children]}) == 4
    for child in children:
        info = await e2b.info(child["sandboxID"])
        assert (info["templateID"], info["metadata"], info["lifecycle"]["onTimeout"]) == ("base", {"a": "b"}, "pause")
        assert at(info["endAt"]) - datetime.now(UTC) < timedelta(seconds=61)
    assert (await e2b.info(source["sandboxID"]))["state"] == "running"
    assert len((await e2b.http.post(path)).json()) == 1
    for body in ({"count": 0}, {"count": 101}, {"timeout": 0}):
        failed(await e2b.http.post(path, json=body), 400)
    failed(await e2b.http.post(f"/sandboxes/{NOWHERE}/fork", json={}), 404)


async def test_a_fork_that_succeeds_in_part(e2b: World) -> None:
    source = await e2b.create()
    real = e2b.node._fork

    def half(request: Any) -> Any:
        answer = real(request)
        first = answer.branches[0]
        e2b.node.boxes.pop(first.sandbox_id)
        error = {"code": "host_memory_full", "cause": "There is no room.", "remedy": ""}
        import msgspec

        broken = msgspec.structs.replace(first, observed=None, error=error)
        return msgspec.structs.replace(answer, branches=(broken, *answer.branches[1:]))

    e2b.node._fork = half  # type: ignore[method-assign]  # the double has no hook for an answer
    try:
        forked = await e2b.http.post(f"/sandboxes/{source['sandboxID']}/fork", json={"count": 2})
    finally:
        e2b.node._fork = real  # type: ignore[method-assign]
    assert forked.status_code == 201, forked.text
    bad, good = forked.json()
    assert (bad["error"]["code"], "no room" in bad["error"]["message"]) == (500, True)
    assert good["sandbox"]["sandboxID"]


async def test_snapshots(e2b: World) -> None:
    source, other = await e2b.create(), await e2b.create()
    path = f"/sandboxes/{source['sandboxID']}/snapshots"
    plain = await e2b.http.post(path, json={})
    assert plain.status_code == 201, plain.text
    assert plain.json()["names"] == []
    named = (await e2b.http.post(path, json={"name": "mine"})).json()
    assert named["names"] == ["mine:default"]
    again = (await e2b.http.post(path, json={"name": "mine:default", "memory": False})).json()
    theirs = (await e2b.http.post(f"/sandboxes/{other['sandboxID']}/snapshots")).json()

    async def found(**query: str) -> list[str]:
        answer = await e2b.http.get("/snapshots", params=query)
        assert answer.status_code == 200, answer.text
        return [one["snapshotID"] for one in answer.json()]

    order = [theirs, again, named, plain.json()]
    ids = [one["snapshotID"] for one in order]
    assert await found() == ids
    assert await found(sandboxID=source["sandboxID"]) == ids[1:]
    assert await found(name="mine") == await found(name="mine:default") == ids[1:3]
    assert await found(name="mine:v2") == []
    assert await found(name=ids[3]) == ids[3:]
    read: list[str] = []
    query = {"limit": "3"}
    while True:
        page = await e2b.http.get("/snapshots", params=query)
        read += [one["snapshotID"] for one in page.json()]
        if "x-next-token" not in page.headers:
            break
        query["nextToken"] = page.headers["x-next-token"]
    assert read == ids
    # What is made from one is shown as of it; by its name the newest is meant.
    for template, shown in (
        (ids[3], ids[3]),
        (ids[3].partition(":")[0], ids[3]),
        ("mine", ids[1]),
        ("mine:default", ids[1]),
    ):
        made = await e2b.create(templateID=template)
        assert made["templateID"] == shown
        assert made.get("alias") == ("mine" if template.startswith("mine") else None)
        await e2b.http.delete(f"/sandboxes/{made['sandboxID']}")
    alias = await e2b.http.get("/templates/aliases/mine")
    assert (alias.status_code, alias.json()["public"]) == (200, False)
    for name in ("a b", "x/y", "n:v2", "", "-x"):
        answer = await e2b.http.post(path, json={"name": name})
        assert answer.status_code == (201 if not name else 400), answer.text
    for template in (ids[0], quote("mine:default", safe="")):
        gone = await e2b.http.delete(f"/templates/{template}")
        assert (gone.status_code, gone.content) == (204, b""), gone.text
        failed(await e2b.http.delete(f"/templates/{template}"), 404)
    assert len(await found()) == 2
    failed(await e2b.http.post("/v2/sandboxes", json={"templateID": "mine"}), 404)
    failed(await e2b.http.post(f"/sandboxes/{NOWHERE}/snapshots", json={}), 404)


async def test_a_snapshot_outlives_its_sandbox(e2b: World) -> None:
    source = await e2b.create(metadata={"a": "b"})
    kept = (await e2b.http.post(f"/sandboxes/{source['sandboxID']}/snapshots", json={})).json()["snapshotID"]
    await e2b.http.delete(f"/sandboxes/{source['sandboxID']}")
    made = await e2b.create(templateID=kept)
    info = await e2b.info(made["sandboxID"])
    assert (info["templateID"], info["metadata"]) == (kept, {})


async def test_templates(e2b: World) -> None:
    for path in ("/templates", "/v2/templates"):
        (base,) = (await e2b.http.get(path)).json()
        assert (base["templateID"], base["aliases"], base["names"]) == ("base", ["base", "seed"], ["base", "seed"])
        for member in ("buildID", "cpuCount", "memoryMB", "diskSizeMB", "createdAt", "updatedAt", "envdVersion"):
            assert base[member], member
        assert base["buildStatus"] == "ready"
    shown = (await e2b.http.get("/templates/seed")).json()
    assert [build["buildID"] for build in shown["builds"]] == [base["buildID"]]
    tags = (await e2b.http.get("/templates/base/tags")).json()
    assert [(tag["tag"], tag["buildID"]) for tag in tags] == [("latest", base["buildID"])]
    assert (await e2b.http.get("/templates/aliases/base")).json() == {"templateID": "base", "public": True}
    for path in ("/templates/nothing", "/templates/aliases/nothing", "/templates/nothing/tags"):
        failed(await e2b.http.get(path), 404)
    failed(await e2b.http.delete("/templates/base"), 403)
    failed(await e2b.http.delete("/templates/nothing"), 404)
    failed(await e2b.http.delete("/templates/ns%2Fname%3Atag"), 404)


# -- the rest


async def test_metrics(e2b: World) -> None:
    one, two = await e2b.create(), await e2b.create()
    await e2b.http.post(f"/sandboxes/{two['sandboxID']}/pause")
    (sample,) = (await e2b.http.get(f"/sandboxes/{one['sandboxID']}/metrics")).json()
    assert (sample["cpuCount"], sample["memTotal"], sample["memUsed"]) == (1, 1 << 28, 1 << 27)
    assert sample["cpuUsedPct"] == 37.5
    assert set(sample) == {
        *("timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache"),
        *("diskUsed", "diskTotal"),
    }
    assert (await e2b.http.get(f"/sandboxes/{two['sandboxID']}/metrics")).json() == []
    past = {"start": "0", "end": "1000"}
    assert (await e2b.http.get(f"/sandboxes/{one['sandboxID']}/metrics", params=past)).json() == []
    failed(await e2b.http.get(f"/sandboxes/{one['sandboxID']}/metrics", params={"start": "x"}), 400)
    failed(await e2b.http.get(f"/sandboxes/{NOWHERE}/metrics"), 404)
    many = await e2b.http.get(
        "/sandboxes/metrics", params={"sandbox_ids": f"{one['sandboxID']},{two['sandboxID']},{NOWHERE}"}
    )
    assert list(many.json()["sandboxes"]) == [one["sandboxID"]]
    failed(await e2b.http.get("/sandboxes/metrics"), 400)
    (team,) = (await e2b.http.get("/teams/mine/metrics")).json()
    assert team["concurrentSandboxes"] == 1
    assert team["sandboxStartRate"] > 0


async def test_network_is_replaced(e2b: World) -> None:
    sandbox = await e2b.create(network={"denyOut": ["8.8.8.8/32"], "allowPublicTraffic": False})
    path = f"/sandboxes/{sandbox['sandboxID']}/network"
    before = (await e2b.ours(sandbox["sandboxID"]))["policy"]["revision"]
    done = await e2b.http.put(path, json={"denyOut": ["0.0.0.0/0"], "allowOut": ["pypi.example"]})
    assert (done.status_code, done.content) == (204, b""), done.text
    info = await e2b.info(sandbox["sandboxID"])
    expected = {"denyOut": ["0.0.0.0/0"], "allowOut": ["pypi.example"], "allowPublicTraffic": False}
    assert info["network"] == expected
    assert (await e2b.ours(sandbox["sandboxID"]))["policy"]["revision"] > before
    assert (await e2b.http.put(path, json={"allow_internet_access": False})).status_code == 204
    info = await e2b.info(sandbox["sandboxID"])
    assert (info["network"], info["allowInternetAccess"]) == ({"allowPublicTraffic": False}, False)
    failed(await e2b.http.put(path, json={"denyOut": ["example.com"]}), 400)
    failed(await e2b.http.put(f"/sandboxes/{NOWHERE}/network", json={}), 404)
    await e2b.http.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    failed(await e2b.http.put(path, json={}), 409)


async def test_every_path_answers_in_one_form(e2b: World) -> None:
    """Whatever is asked of any path, by any method, the answer is JSON: SDKs read it before they look at the status."""
    async with e2b.client(None) as anybody:
        for _, path, _ in ROUTES:
            asked = re.sub(r"\{\w+\}", NOWHERE, path)
            allowed = {
                method for method, other, _ in ROUTES if re.sub(r"\{\w+\}", "*", other) == re.sub(r"\{\w+\}", "*", path)
            }
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                answer = await anybody.request(method, asked)
                if method in allowed:
                    failed(answer, 401)
                else:
                    failed(answer, 405)
                    assert set(answer.headers["allow"].split(", ")) == allowed
    for path in ("/", "/nothing", "/sandboxes/", f"/sandboxes/{NOWHERE}/nothing", "/v3/sandboxes", "/sandboxes//pause"):
        failed(await e2b.http.get(path), 404)
    refusing = {routes._BUILDS, routes._TAGS, routes._VOLUMES, routes._SECRETS, routes._LOGS, routes._ADMIN}
    for method, path, handler in ROUTES:
        if handler in refusing:
            refused = await e2b.http.request(method, re.sub(r"\{\w+\}", NOWHERE, path), json={})
            assert "not supported here" in failed(refused, 501)
            assert refused.headers["should-retry"] == "false"
    assert (await e2b.http.get("/health")).status_code == 204
    answered = await e2b.http.get("/nothing", headers={"x-request-id": "mine"})
    assert answered.headers["x-request-id"] == "mine"
    assert json.loads(answered.content)["code"] == 404


async def test_a_control_plane_that_is_not_there_is_503(e2b: World) -> None:
    from hatchway.e2b.config import E2bConfig
    from hatchway.e2b.reaching import Reaching
    from hatchway.e2b.wrapper import Wrapper

    nowhere = e2b.wrapper.config.folder / "nowhere.sock"
    alone = Wrapper(
        config=E2bConfig(folder=nowhere.parent, control=nowhere),
        identity=e2b.wrapper.identity,
        reaching=Reaching(nowhere),
    )
    world = World(alone, e2b.service, e2b.node, e2b.key, e2b.http)
    async with world.client(e2b.key) as client:
        for method, path in (("GET", "/v2/sandboxes"), ("POST", "/v2/sandboxes"), ("DELETE", f"/sandboxes/{NOWHERE}")):
            refused = await client.request(method, path, json={} if method == "POST" else None)
            failed(refused, 503)
            assert refused.headers["should-retry"] == "true"
            assert refused.headers["retry-after"]
    await alone.reaching.close()


async def test_the_answer_says_where_a_ceiling_bars_the_internet(e2b: World) -> None:
    given = await e2b.create(allow_internet_access=True)
    silent = await e2b.create()
    ceiling = {"version": 1, "ceiling": True, "rules": [{"id": "ours", "to": {"hosts": ["**.corp.example"]}}]}
    put = await e2b.service.http.put("/v1/policies/floor", json={"tier": "project", "document": ceiling})
    assert put.status_code < 300, put.text
    try:
        for one in (given, silent, await e2b.create()):
            assert (await e2b.info(one["sandboxID"]))["allowInternetAccess"] is False
    finally:
        await e2b.service.http.delete("/v1/policies/floor", params={"tier": "project"})
    assert (await e2b.info(given["sandboxID"]))["allowInternetAccess"] is True
    assert (await e2b.info(silent["sandboxID"]))["allowInternetAccess"] is None
