"""What a sandbox uses, over the API; what the control plane counts; and the ids that requests carry to the node."""

from pathlib import Path

import httpx
import pytest
from tests.support.control_fixtures import folder, node, service
from tests.support.control_fixtures import only_sqlite as database_url
from tests.support.control_service import Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.domain.errors import NotFound
from hatchway.wire import supervision, tracing
from hatchway.wire.metrics import MetricsAccess, hash_token

__all__ = ["database_url", "folder", "node", "service"]


async def test_what_a_sandbox_uses_is_told_by_its_node(service: Service) -> None:
    sandbox = await service.create()
    at = f"/v1/sandboxes/{sandbox['id']}/metrics"
    told = (await service.http.get(at)).json()
    assert told["sandbox_id"] == sandbox["id"]
    assert told["guest"]["processes"] == 7
    assert told["guest"]["disk_total_bytes"] == 2**63, "a guest says what it likes"
    assert told["host"] == {
        "cpu_s": 1.5,
        "memory_bytes": 0,
        "memory_private_bytes": 0,
        "memory_peak_bytes": 0,
        "memory_limit_bytes": 0,
        "processes": 0,
        "oom_kills": 0,
        "disk_bytes": 4096,
    }
    await service.http.post(f"/v1/sandboxes/{sandbox['id']}/pause", headers={"prefer": "wait=20"})
    told = (await service.http.get(at)).json()
    assert (told["state"], told["guest"], told["guest_error"]) == ("paused", None, "The sandbox is paused.")
    assert told["host"]["disk_bytes"] == 4096


async def test_a_sandbox_that_is_not_there_uses_nothing(service: Service, node: NodeDouble) -> None:
    assert (await service.http.get("/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa/metrics")).status_code == 404
    sandbox = await service.create()

    async def forgotten(_: object) -> None:
        raise NotFound("unknown_sandbox", "This node has no such sandbox.", "")

    node.hooks["sandbox.metrics"] = forgotten
    told = await service.http.get(f"/v1/sandboxes/{sandbox['id']}/metrics")
    assert told.status_code == 200
    assert told.json()["guest"] is None

    await service.http.delete(f"/v1/sandboxes/{sandbox['id']}", headers={"prefer": "wait=20"})
    assert (await service.http.get(f"/v1/sandboxes/{sandbox['id']}/metrics")).status_code == 410


async def test_a_node_that_is_away_is_said(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    await node.die()
    answer = await service.http.get(f"/v1/sandboxes/{sandbox['id']}/metrics")
    assert (answer.status_code, answer.json()["code"]) == (503, "node_unreachable")


# -- /metrics


def values(text: str) -> dict[str, float]:
    """Every sample by its name with its labels."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def test_metrics_tell_what_happened_and_what_is(service: Service) -> None:
    before = values((await service.http.get("/metrics")).text)
    sandbox = await service.create()
    await service.http.get(f"/v1/sandboxes/{sandbox['id']}")
    async with service.client("hw_" + "x" * 30) as stranger:
        assert (await stranger.get("/v1/sandboxes")).status_code == 401
    async with service.client(None) as anyone:
        answer = await anyone.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    now = values(answer.text)

    def grown(name: str) -> float:
        return now[name] - before.get(name, 0.0)

    assert grown('hatchway_api_requests_total{method="GET",route="/v1/sandboxes/{id}",status="200"}') == 1
    assert grown('hatchway_api_request_seconds_count{method="POST",route="/v1/sandboxes"}') == 1
    assert grown('hatchway_api_refused_total{code="key_unknown"}') == 1
    assert grown('hatchway_operations_total{kind="create",status="succeeded"}') == 1
    assert grown('hatchway_node_call_seconds_count{method="sandbox.create",result="ok"}') == 1
    assert grown('hatchway_database_seconds_count{kind="write",result="ok"}') > 0
    assert now['hatchway_sandboxes{state="running"}'] == 1
    assert now['hatchway_sandboxes{state="failed"}'] == 0
    assert now['hatchway_node_connected{node="node-one"}'] == 1
    assert now["hatchway_database_up"] == 1
    assert sandbox["id"] not in answer.text
    assert "default" not in answer.text, "a tenant's name is no label"


async def test_methods_that_nobody_has_make_no_series(service: Service) -> None:
    assert (await service.http.request("PROPFIND", "/v1/sandboxes")).status_code == 405
    text = (await service.http.get("/metrics")).text
    assert "PROPFIND" not in text
    assert 'method="other",route="/v1/sandboxes",status="405"' in text
    assert (await service.http.post("/metrics")).status_code == 405


@pytest.mark.parametrize(
    ("access", "headers", "expected"),
    [
        (MetricsAccess(), {}, 200),
        (MetricsAccess(), {"host": "rebound.example"}, 403),
        (MetricsAccess(), {"host": "rebound.example:7070"}, 403),
        (MetricsAccess(local=False), {}, 403),
        (MetricsAccess(hash_token("t" * 20)), {}, 401),
        (MetricsAccess(hash_token("t" * 20)), {"authorization": "Bearer " + "u" * 20}, 401),
        (MetricsAccess(hash_token("t" * 20)), {"authorization": "Basic " + "t" * 20}, 401),
        (MetricsAccess(hash_token("t" * 20), local=False), {"authorization": "Bearer " + "t" * 20}, 200),
    ],
)
async def test_who_may_read_the_metrics(
    folder: Path, access: MetricsAccess, headers: dict[str, str], expected: int
) -> None:
    async with (
        in_process(ControlConfig(folder=folder / "control", metrics=access)) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        answer = await http.get("/metrics", headers=headers)
        assert answer.status_code == expected, answer.text
        assert ("hatchway_" in answer.text) == (expected == 200)
        # No key of a project, not even one that may do everything in it, opens them.
        if expected != 200:
            assert (await running.http.get("/metrics", headers=headers)).status_code == expected


async def test_what_the_supervisor_tells_is_in_the_metrics(folder: Path) -> None:
    config = ControlConfig(folder=folder / "control", run_dir=folder)
    async with in_process(config) as running:
        assert "hatchway_role_restarts" not in (await running.http.get("/metrics")).text
        supervision.publish(folder, supervision.Supervision(restarts={"node": 3}, hung={"node": 1}))
        now = values((await running.http.get("/metrics")).text)
        assert now['hatchway_role_restarts_total{role="node"}'] == 3
        assert now['hatchway_role_hung_total{role="node"}'] == 1
        (folder / supervision.NAME).write_text("{")
        assert (await running.http.get("/metrics")).status_code == 200


# -- ids of requests


async def test_a_request_is_known_by_its_id_on_the_node_too(service: Service, node: NodeDouble) -> None:
    seen: dict[str, dict[str, str]] = {}

    async def look(_: object) -> None:
        seen["create"] = tracing.current()

    node.hooks["sandbox.create"] = look
    answer = await service.http.post(
        "/v1/sandboxes",
        json={"template": "seed:latest"},
        headers={"prefer": "wait=20", "x-request-id": "job-17.retry_2"},
    )
    assert answer.headers["x-request-id"] == "job-17.retry_2"
    listed = (await service.http.get("/v1/keys")).json()["keys"]
    assert seen["create"] == {
        "request_id": "job-17.retry_2",
        "key_id": next(key["id"] for key in listed if key["name"] == "development"),
        "operation_id": answer.json()["operation"]["id"],
        "sandbox_id": answer.json()["sandbox"]["id"],
        "project": "default",
    }


@pytest.mark.parametrize("given", ["", "a b", "a" * 65, "-x", 'x"y', "ä", "x\ty"])
async def test_an_id_that_may_not_stand_in_a_log_is_replaced(service: Service, given: str) -> None:
    answer = await service.http.get("/v1/sandboxes", headers={"x-request-id": given.encode()})
    assert answer.headers.get_list("x-request-id") != [given]
    assert len(answer.headers["x-request-id"]) == 20
    twice = [("x-request-id", "one"), ("x-request-id", "two")]
    assert (await service.http.get("/healthz", headers=twice)).headers["x-request-id"] not in ("one", "two")
    assert "x-request-id" in (await service.http.get("/nowhere")).headers
