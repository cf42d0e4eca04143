"""What a sandbox uses, over the API."""

from tests.support.control_fixtures import folder, node, service
from tests.support.control_service import Service
from tests.support.node_double import NodeDouble

from hatchway.domain.errors import NotFound

__all__ = ["folder", "node", "service"]


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
