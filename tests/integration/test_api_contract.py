"""The API keeps to its own description: requests made from /openapi.json, good and bad, get only answers that it declares.

The requests are the same in every run. A node double stands in for the node, so that the states that answers depend on are cheap.
"""

import asyncio
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks
from tests.support.audit_writer import AuditWriter
from tests.support.broker_world import world
from tests.support.control_service import ControlProcess
from tests.support.node_double import NodeDouble

from hatchway.control import openapi
from hatchway.control.app import ENDPOINTS
from hatchway.control.endpoints import Endpoint
from hatchway.storage import keys

load_all_checks()
# Whether data that fits the schema is accepted depends on what there is (a template, a sandbox and its state). That every path asks
# for a key has a test of its own, which does not send one.
LEFT_OUT = ("positive_data_acceptance", "max_response_time", "ignored_auth")
CHECKED = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]
SETTINGS = settings(
    max_examples=20,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Served:
    """A control plane in a process of its own, over a node double and a broker in a thread of this one."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._node = NodeDouble(folder / "node.sock")
        self._writer = AuditWriter(folder, folder / "audit")
        self._writer.start()
        self._world = world(folder / "world")
        broker = self._do(self._world.__aenter__())
        self._process = ControlProcess(
            folder / "control", folder / "node.sock", audit=self._writer.path, broker=broker.rpc_path
        )
        self._do(self._node.start())
        service = self._do(self._process.start())
        self._do(service.ready())
        self.url, self.key = service.url, service.key
        self._do(service.http.aclose())

    def _do(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(60)

    def close(self) -> None:
        """Ends both."""
        self._process.kill()
        self._writer.close()
        self._do(self._node.die())
        self._do(self._world.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        service = Served(Path(name))
        try:
            yield service
        finally:
            service.close()


@pytest.fixture(scope="module")
def things(served: Served) -> dict[str, str]:
    """One of each, so that some requests meet what they name."""
    with httpx.Client(
        base_url=served.url, headers={"authorization": f"Bearer {served.key}", "prefer": "wait=20"}
    ) as http:
        made = http.post("/v1/sandboxes", json={"template": "seed:latest"}).json()
        session = http.post(f"/v1/sandboxes/{made['sandbox']['id']}/sessions", json={"argv": ["true"]}).json()[
            "session"
        ]
        key = http.post("/v1/keys", json={"name": "one"}).json()["key"]
        credential = {"source": {"kind": "store", "value": "a value of some length"}, "hosts": ["api.example"]}
        http.put("/v1/credentials/one", json=credential).raise_for_status()
    return {
        "/v1/sandboxes": made["sandbox"]["id"],
        "/v1/operations": made["operation"]["id"],
        "/v1/sessions": session["id"],
        "/v1/keys": key["id"],
    }


document = msgspec.to_builtins(openapi.document(ENDPOINTS))
schema = schemathesis.openapi.from_dict(document)


def named(case: Any, things: dict[str, str]) -> None:
    """Lets half of the requests for one thing name one that is there."""
    if case.path.startswith("/v1/projects/{name}"):
        case.path_parameters["name"] = "default"
    if case.path.startswith("/v1/credentials/") and len(str(case.path_parameters["credential"])) % 2:
        case.path_parameters["credential"] = "one"
    name = next((name for name in things if case.path.startswith(name + "/{id}")), None)
    if name is not None and case.path_parameters and len(str(case.path_parameters.get("id", ""))) % 2:
        case.path_parameters["id"] = things[name]


@schema.exclude(path="/v1/events").parametrize()
@SETTINGS
def test_what_is_answered_is_what_is_described(case: Any, served: Served, things: dict[str, str]) -> None:
    named(case, things)
    case.call_and_validate(
        headers={"authorization": f"Bearer {served.key}"}, base_url=served.url, checks=CHECKED, timeout=30
    )


@schema.include(path="/v1/events").parametrize()
@SETTINGS
def test_an_event_stream_begins_as_described(case: Any, served: Served) -> None:
    """It has no end, so that only its head is looked at."""
    sent = case.as_transport_kwargs(base_url=served.url, headers={"authorization": f"Bearer {served.key}"})
    with requests.request(**sent, stream=True, timeout=30) as answer:
        if case.method != "GET":
            assert answer.status_code == 405
            return
        assert str(answer.status_code) in document["paths"]["/v1/events"]["get"]["responses"]
        assert answer.status_code < 500
        kind = "text/event-stream" if answer.status_code == 200 else "application/problem+json"
        assert answer.headers["content-type"].startswith(kind)


def test_every_path_is_asked() -> None:
    asked = {operation.ok().label for operation in schema.get_all_operations()}
    assert asked == {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS}


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if one.scope], ids=lambda one: f"{one.method} {one.path}"
)
def test_every_path_asks_for_a_key_with_its_scope(endpoint: Endpoint, served: Served) -> None:
    path = re.sub(r"\{\w+\}", "a" * 20, endpoint.path)
    with httpx.Client(base_url=served.url) as http:
        assert http.request(endpoint.method, path).status_code == 401
        scopes = [one for one in keys.SCOPES if not keys.may([one], str(endpoint.scope))]
        body = {"name": "other scopes", "scopes": scopes}
        admin = {"authorization": f"Bearer {served.key}"}
        key = http.post("/v1/keys", json=body, headers=admin).json()["key"]["key"]
        answer = http.request(endpoint.method, path, headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
