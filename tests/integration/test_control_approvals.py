"""What waits for consent: questions of gateways and operations, from being asked to their end, whatever dies in between."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import postgres
from tests.support.control_fixtures import folder, node
from tests.support.control_service import WITHIN, Service, in_process
from tests.support.node_double import NodeDouble

from hatchway.control.main import ControlConfig
from hatchway.control.webhooks import Webhook
from hatchway.domain.errors import Unavailable, Unprocessable
from hatchway.storage import approvals
from hatchway.wire.egress import AskEnded
from hatchway.wire.node import Event

__all__ = ["folder", "node"]

WAIT = {"prefer": "wait=30"}
SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    if request.param == "sqlite":
        yield None
    else:
        with postgres.database_url() as url:
            yield url


def config_of(folder: Path, node: NodeDouble, **more: Any) -> ControlConfig:
    return ControlConfig(folder=folder / "control", node_socket=node.path, **more)


@pytest.fixture
async def service(folder: Path, node: NodeDouble, database_url: str | None) -> AsyncIterator[Service]:
    async with in_process(config_of(folder, node, database_url=database_url)) as running:
        await running.ready()
        await node.followed()
        yield running


@pytest.fixture
async def plain(folder: Path, node: NodeDouble) -> AsyncIterator[Service]:
    """On a file alone: where the database makes no difference."""
    async with in_process(config_of(folder, node)) as running:
        await running.ready()
        await node.followed()
        yield running


async def approval(service: Service, approval_id: str, **members: Any) -> dict[str, Any]:
    """The approval, as soon as it shows these members."""
    async with asyncio.timeout(WITHIN):
        while True:
            answer = await service.http.get(f"/v1/approvals/{approval_id}")
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()["approval"]
                if all(found[name] == value for name, value in members.items()):
                    return found
            await asyncio.sleep(0.01)


async def decide(service: Service, approval_id: str, decision: str, **more: Any) -> Any:
    return await service.http.post(f"/v1/approvals/{approval_id}/answer", json={"decision": decision, **more})


async def until(true: Any) -> None:
    async with asyncio.timeout(WITHIN):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_question_of_a_gateway_is_listed_answered_and_the_node_hears_it(
    service: Service, node: NodeDouble
) -> None:
    sandbox = (await service.create())["id"]
    node.ask(sandbox, "ask-one", path="/upload?\x1b[2J")
    asked = await approval(service, "ask-one", state="pending")
    assert asked["request"]["host"] == "index.example"
    assert asked["request"]["method"] == "POST"
    listed = (await service.http.get("/v1/approvals", params={"state": "pending", "sandbox": sandbox})).json()
    assert [one["id"] for one in listed["approvals"]] == ["ask-one"]
    answer = await decide(service, "ask-one", "allow", scope="ttl", ttl_s=60, note="this release only")
    assert answer.status_code == 200, answer.text
    assert answer.json()["approval"]["delivered"]
    (heard,) = node.answers
    assert (heard.ask_id, heard.sandbox_id, heard.allow, heard.scope, heard.ttl_s) == (
        "ask-one", sandbox, True, "ttl", 60.0,
    )  # fmt: skip
    again = await decide(service, "ask-one", "allow", scope="ttl", ttl_s=60)
    assert again.status_code == 200
    other = await decide(service, "ask-one", "deny")
    assert (other.status_code, other.json()["code"]) == (409, "already_answered")
    key = next(one for one in (await service.http.get("/v1/keys")).json()["keys"] if one["name"] == "development")
    assert answer.json()["approval"]["approver"] == key["id"]


async def test_a_question_that_is_over_cannot_be_answered(plain: Service, node: NodeDouble) -> None:
    sandbox = (await plain.create())["id"]
    node.ask(sandbox, "ask-one")
    await approval(plain, "ask-one", state="pending")
    node.tell(Event(ask_ended=AskEnded(ask_id="ask-one", sandbox_id="another", why="client_gone")))
    node.tell(Event(ask_ended=AskEnded(ask_id="ask-one", sandbox_id=sandbox, why="client_gone")))
    over = await approval(plain, "ask-one", state="ended")
    assert over["why"] == "client_gone"
    answer = await decide(plain, "ask-one", "allow")
    assert (answer.status_code, answer.json()["code"]) == (409, "approval_over")
    node.ask(sandbox, "ask-two", expires_at=time.time() - 10)  # its gateway died before it could say so
    over = await approval(plain, "ask-two", state="ended")
    assert over["why"] == "timeout"
    assert node.answers == []


async def test_questions_and_answers_survive_the_control_plane(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = config_of(folder, node, database_url=database_url)
    async with in_process(config) as service:
        await service.ready()
        await node.followed()
        sandbox = (await service.create())["id"]
        node.ask(sandbox, "ask-one")
        await approval(service, "ask-one", state="pending")

        async def lost(_: Any) -> None:
            raise Unavailable("peer_lost", "The gateway is being started again.", "")

        node.hooks["egress.answer"] = lost
        answer = await decide(service, "ask-one", "deny", note="no")
        assert answer.status_code == 200
        assert answer.json()["approval"]["delivered"] is False
        assert node.answers == []
        node.ask(sandbox, "ask-two")
        await approval(service, "ask-two", state="pending")
    del node.hooks["egress.answer"]
    async with in_process(config) as service:
        await until(lambda: node.answers)
        assert [(one.ask_id, one.allow) for one in node.answers][:1] == [("ask-one", False)]
        await approval(service, "ask-one", delivered=True)
        await approval(service, "ask-two", state="pending")
        assert (await decide(service, "ask-two", "allow")).status_code == 200
        await until(lambda: any(one.ask_id == "ask-two" and one.allow for one in node.answers))


async def test_bounds_deny_at_once(plain: Service, node: NodeDouble) -> None:
    sandbox = (await plain.create())["id"]
    for number in range(33):
        node.ask(sandbox, f"ask-{number:02}")
        await approval(plain, f"ask-{number:02}")
    await until(lambda: node.answers)
    (refused,) = node.answers
    assert not refused.allow
    assert (await approval(plain, refused.ask_id, state="denied"))["why"] == "too_many"
    pending = (await plain.http.get("/v1/approvals", params={"state": "pending"})).json()["approvals"]
    assert len(pending) == 32


@pytest.mark.parametrize("bound", ["MAX_ASKED_OF_SANDBOX", "MAX_ASKED_OF_PROJECT"])
async def test_asking_too_often_is_denied_shown_once_and_not_kept(
    plain: Service, node: NodeDouble, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Also where each question is over at once, so that none waits."""
    monkeypatch.setattr(approvals, bound, 5)
    sandbox = (await plain.create())["id"]
    for number in range(5):
        node.ask(sandbox, f"ask-{number}")
        await approval(plain, f"ask-{number}", state="pending")
        assert (await decide(plain, f"ask-{number}", "allow")).status_code == 200
    for number in range(5, 12):
        node.ask(sandbox, f"ask-{number}")
    await until(lambda: len(node.answers) == 12)
    denied = [one.ask_id for one in node.answers if not one.allow]
    assert sorted(denied) == sorted(f"ask-{number}" for number in range(5, 12))
    shown = (await plain.http.get("/v1/approvals", params={"state": "denied"})).json()["approvals"]
    assert [(one["id"], one["why"]) for one in shown] == [(denied[0], "too_many")]


async def test_who_may_answer_and_who_sees(plain: Service, node: NodeDouble) -> None:
    sandbox = (await plain.create())["id"]
    node.ask(sandbox, "ask-one")
    await approval(plain, "ask-one", state="pending")
    made = await plain.http.post("/v1/keys", json={"name": "w", "scopes": ["read", "write"]})
    async with plain.client(made.json()["key"]["key"]) as writing:
        assert (await writing.get("/v1/approvals/ask-one")).status_code == 200
        answer = await writing.post("/v1/approvals/ask-one/answer", json={"decision": "allow"})
        assert (answer.status_code, answer.json()["code"]) == (403, "scope_missing")
    await plain.http.post("/v1/projects", json={"name": "theirs"})
    made = await plain.http.post("/v1/keys", json={"name": "a", "scopes": ["read", "admin"], "project": "theirs"})
    async with plain.client(made.json()["key"]["key"]) as theirs:
        assert (await theirs.get("/v1/approvals/ask-one")).status_code == 404
        assert (await theirs.get("/v1/approvals")).json()["approvals"] == []
        answer = await theirs.post("/v1/approvals/ask-one/answer", json={"decision": "allow"})
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_approval")
    for body, code in (
        ({"decision": "allow", "scope": "ttl"}, "invalid_field"),
        ({"decision": "allow", "ttl_s": 5}, "invalid_field"),
        ({"decision": "perhaps"}, "invalid_field"),
        ({"decision": "allow", "scope": "ever"}, "invalid_field"),
    ):
        answer = await plain.http.post("/v1/approvals/ask-one/answer", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert node.answers == []


async def test_a_node_asks_for_its_own_sandboxes_alone(plain: Service, node: NodeDouble) -> None:
    sandbox = (await plain.create())["id"]
    asked = node.ask(sandbox, "ask-one", project="another")
    node.asks.clear()
    node.tell(Event(asked=type(asked)(ask_id="ask-two", sandbox_id="a" * 20, project="default", generation=1, rule="r", host="h", port=1, protocol="tcp", expires_at=time.time() + 60)))  # fmt: skip
    await approval(plain, "ask-one", state="pending")  # of the sandbox's project, whatever the node says
    assert (await plain.http.get("/v1/approvals/ask-two")).status_code == 404


async def gated(service: Service, *verbs: str) -> None:
    answer = await service.http.patch("/v1/projects/default", json={"approvals": list(verbs)})
    assert answer.status_code == 200, answer.text
    assert answer.json()["project"]["approvals"] == list(verbs)


async def waiting(service: Service, operation: str) -> str:
    """The approval that an operation waits for."""
    shown = await service.operation(operation, wait=0)
    assert (shown["status"], shown["phase"]) == ("pending", "approval")
    listed = (await service.http.get("/v1/approvals", params={"state": "pending"})).json()["approvals"]
    return str(next(one["id"] for one in listed if one["operation"] == operation))


async def test_a_deletion_waits_for_consent_and_is_done_when_it_is_given(service: Service, node: NodeDouble) -> None:
    await gated(service, "delete")
    sandbox = (await service.create())["id"]
    accepted = await service.http.delete(f"/v1/sandboxes/{sandbox}")
    assert accepted.status_code == 202, accepted.text
    operation = accepted.json()["operation"]["id"]
    asked = await waiting(service, operation)
    assert "sandbox.delete" not in node.calls
    assert (await service.get(sandbox))["state"] == "running"
    other = await service.http.post(f"/v1/sandboxes/{sandbox}/pause")
    assert (other.status_code, other.json()["code"]) == (409, "operation_in_flight")
    assert (await decide(service, asked, "allow", scope="session")).status_code == 422
    assert (await decide(service, asked, "allow", note="yes")).status_code == 200
    assert (await service.operation(operation))["status"] == "succeeded"
    assert (await service.get(sandbox))["state"] == "deleted"


@pytest.mark.parametrize("decision", ["deny", "timeout", "cancel"])
async def test_a_deletion_that_is_not_allowed_changes_nothing(
    plain: Service, node: NodeDouble, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gated(plain, "delete")
    sandbox = (await plain.create())["id"]
    if decision == "timeout":
        monkeypatch.setattr("hatchway.storage.approvals.OPERATION_WITHIN_S", 0.2)
        monkeypatch.setattr("hatchway.control.approving.LOOK_EVERY_S", 0.1)
    operation = (await plain.http.delete(f"/v1/sandboxes/{sandbox}")).json()["operation"]["id"]
    if decision == "deny":
        asked = await waiting(plain, operation)
        await decide(plain, asked, "deny", note="it is in use")
    elif decision == "cancel":
        asked = await waiting(plain, operation)
        assert (await plain.http.post(f"/v1/operations/{operation}/cancel")).status_code == 200
    ended = await plain.operation(operation)
    if decision == "cancel":
        assert ended["status"] == "cancelled"
        assert (await approval(plain, asked, state="ended"))["why"] == "cancelled"
    else:
        assert (ended["status"], ended["error"]["code"]) == ("failed", "approval_denied")
        assert decision == "timeout" or "it is in use" in ended["error"]["cause"]
    shown = await plain.get(sandbox)
    assert (shown["state"], shown["desired"], shown["operation"]) == ("running", "running", None)
    assert "sandbox.delete" not in node.calls
    paused = await plain.http.post(f"/v1/sandboxes/{sandbox}/pause", headers=WAIT)
    assert paused.status_code == 200


async def test_a_deletion_that_may_be_refused_ends_no_operation(plain: Service, node: NodeDouble) -> None:
    await gated(plain, "delete")
    sandbox = (await plain.create())["id"]
    entered, opened = asyncio.Event(), asyncio.Event()

    async def hold(_: Any) -> None:
        entered.set()
        await opened.wait()

    node.hooks["sandbox.pause"] = hold
    pausing = (await plain.http.post(f"/v1/sandboxes/{sandbox}/pause")).json()["operation"]["id"]
    await asyncio.wait_for(entered.wait(), WITHIN)
    refused = await plain.http.delete(f"/v1/sandboxes/{sandbox}")
    assert (refused.status_code, refused.json()["code"]) == (409, "operation_in_flight")
    opened.set()
    assert (await plain.operation(pausing))["status"] == "succeeded"


async def test_rollback_and_export_wait_too_and_what_was_refused_is_failed(plain: Service, node: NodeDouble) -> None:
    await gated(plain, "rollback", "export")
    sandbox = (await plain.create())["id"]
    snapped = await plain.http.post(f"/v1/sandboxes/{sandbox}/snapshots", json={"kind": "disk"}, headers=WAIT)
    snapshot = snapped.json()["operation"]["result"]["snapshot"]
    back = await plain.http.post(f"/v1/sandboxes/{sandbox}/rollback", json={"snapshot": snapshot})
    operation = back.json()["operation"]["id"]
    asked = await waiting(plain, operation)
    assert (await approval(plain, asked))["request"] == {"verb": "rollback", "snapshot": snapshot}
    await decide(plain, asked, "allow")
    assert (await plain.operation(operation))["status"] == "succeeded"
    exported = await plain.http.post(f"/v1/sandboxes/{sandbox}/export", json={})
    operation = exported.json()["operation"]["id"]
    await decide(plain, await waiting(plain, operation), "deny")
    assert (await plain.operation(operation))["error"]["code"] == "approval_denied"
    listed = (await plain.http.get("/v1/exports")).json()["exports"]
    assert {one["state"] for one in listed} == {"failed"}
    of_snapshot = await plain.http.post(f"/v1/snapshots/{snapshot}/export", json={})
    assert (of_snapshot.status_code, of_snapshot.json()["code"]) == (403, "approval_needed")
    assert "export.make" not in node.calls
    # What is not named waits for nobody.
    assert (await plain.http.delete(f"/v1/sandboxes/{sandbox}", headers=WAIT)).status_code == 200


async def test_an_operation_waits_on_in_the_next_process(
    folder: Path, node: NodeDouble, database_url: str | None
) -> None:
    config = config_of(folder, node, database_url=database_url, lease_s=1.0)
    async with in_process(config) as service:
        await service.ready()
        await gated(service, "delete")
        sandbox = (await service.create())["id"]
        operation = (await service.http.delete(f"/v1/sandboxes/{sandbox}")).json()["operation"]["id"]
        asked = await waiting(service, operation)
    async with in_process(config) as service:
        await service.ready()
        assert await waiting(service, operation) == asked
        await decide(service, asked, "allow")
        assert (await service.operation(operation))["status"] == "succeeded"


async def test_one_process_answers_what_waits_in_another(folder: Path, node: NodeDouble) -> None:
    with postgres.database_url() as url:
        async with contextlib.AsyncExitStack() as stack:
            one, two = [
                await stack.enter_async_context(
                    in_process(
                        ControlConfig(folder=folder / name, node_socket=node.path, database_url=url, lease_s=2.0)
                    )
                )
                for name in ("one", "two")
            ]
            await one.ready()
            await gated(one, "delete")
            sandbox = (await one.create())["id"]
            operation = (await one.http.delete(f"/v1/sandboxes/{sandbox}")).json()["operation"]["id"]
            asked = await waiting(two, operation)
            await decide(two, asked, "allow")
            assert (await one.operation(operation))["status"] == "succeeded"


async def test_a_project_is_deleted_with_what_waits_in_it(plain: Service) -> None:
    await plain.http.post("/v1/projects", json={"name": "theirs", "approvals": ["delete"]})
    made = await plain.http.post(
        "/v1/keys", json={"name": "a", "scopes": ["read", "write", "admin"], "project": "theirs"}
    )
    async with plain.client(made.json()["key"]["key"]) as theirs:
        created = await theirs.post("/v1/sandboxes", json={"template": "seed:latest"}, headers=WAIT)
        sandbox = created.json()["sandbox"]["id"]
        assert (await theirs.delete(f"/v1/sandboxes/{sandbox}")).status_code == 202
        lifted = await theirs.patch("/v1/projects/theirs", json={"approvals": []})
        assert lifted.status_code == 403  # a project does not take its own gate away
    await plain.http.delete("/v1/projects/theirs", params={"force": "true"})
    async with asyncio.timeout(WITHIN):
        while (await plain.http.get("/v1/projects/theirs")).status_code != 404:
            await asyncio.sleep(0.02)


async def test_events_tell_of_every_step(plain: Service, node: NodeDouble) -> None:
    sandbox = (await plain.create())["id"]
    seen: list[tuple[str, Any]] = []

    async def follow() -> None:
        async with plain.http.stream("GET", "/v1/events", params={"after": 0}) as stream:
            kind = ""
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind.startswith("approval."):
                    seen.append((kind, json.loads(line.removeprefix("data: "))))
                    if len(seen) == 4:
                        return

    following = asyncio.create_task(follow())
    node.ask(sandbox, "ask-one")
    await approval(plain, "ask-one", state="pending")
    await decide(plain, "ask-one", "allow")
    node.ask(sandbox, "ask-two")
    await approval(plain, "ask-two", state="pending")
    node.tell(Event(ask_ended=AskEnded(ask_id="ask-two", sandbox_id=sandbox, why="policy_changed")))
    await asyncio.wait_for(following, WITHIN)
    assert [kind for kind, _ in seen] == ["approval.asked", "approval.answered", "approval.asked", "approval.ended"]
    assert seen[1][1]["data"]["decision"] == "allowed"
    assert seen[3][1]["data"]["why"] == "policy_changed"


class Receiver:
    """An HTTP server that takes what the webhook sends, after it has failed a few times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.tries = 0
        self.url = ""

    async def __aenter__(self) -> "Receiver":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}
        body = await reader.readexactly(int(headers["content-length"]))
        self.tries += 1
        status = b"302 Found\r\nlocation: http://127.0.0.1:1/" if self.tries <= self.failures else b"204 No Content"
        if self.tries > self.failures:
            self.taken.append((headers, body))
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


async def test_a_webhook_is_told_signed_and_again_until_it_takes_it(
    folder: Path, node: NodeDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.control.webhooks.TRIES_S", (0.05, 0.05, 0.05))
    monkeypatch.setattr(Webhook.__init__, "__kwdefaults__", {"tries_s": (0.05, 0.05, 0.05)})
    async with Receiver(failures=2) as receiver:
        config = config_of(folder, node, webhook_url=receiver.url, webhook_secret=SECRET)
        async with in_process(config) as service:
            await service.ready()
            await node.followed()
            sandbox = (await service.create())["id"]
            node.ask(sandbox, "ask-one")
            await until(lambda: receiver.taken)
            headers, body = receiver.taken[0]
            at, _, digest = headers["hatchway-signature"].partition(",")
            signed = at.removeprefix("t=").encode() + b"." + body
            assert hmac.new(SECRET, signed, hashlib.sha256).hexdigest() == digest.removeprefix("v1=")
            assert abs(int(at.removeprefix("t=")) - time.time()) < 60
            told = json.loads(body)
            assert (told["event"], told["approval"]["id"]) == ("approval.asked", "ask-one")
            assert told["delivery"] == headers["hatchway-delivery"]
            await decide(service, "ask-one", "deny")
            await until(lambda: len(receiver.taken) == 2)
            assert json.loads(receiver.taken[1][1])["event"] == "approval.answered"
            node.ask(sandbox, "ask-two")
            await approval(service, "ask-two", state="pending")
        async with in_process(config):  # what waits is told again by the next process
            await until(lambda: sum(json.loads(body)["approval"]["id"] == "ask-two" for _, body in receiver.taken) >= 1)


async def test_a_webhook_goes_nowhere_unencrypted() -> None:
    for url in ("http://hooks.example/x", "ftp://hooks.example", "https://", "nothing"):
        with pytest.raises(Unprocessable):
            Webhook(url, SECRET)
    with pytest.raises(Unprocessable):
        Webhook("https://hooks.example/x", b"short")
