"""Exports and imports through the API, with a node double: what is stored, who may, and what is left of what fails."""

import asyncio
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tests.support.control_fixtures import database_url, folder, node, service
from tests.support.control_service import Service
from tests.support.node_double import DIGEST, NodeDouble

from hatchway.control import archive_keys
from hatchway.domain.errors import HatchwayError, HostExhausted, Unprocessable
from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.wire import archives
from hatchway.wire.node import UploadDescription

__all__ = ["database_url", "folder", "node", "service"]
WAIT = {"prefer": "wait=20"}


def described(**more: Any) -> UploadDescription:
    members: dict[str, Any] = {
        "kind": "full",
        "source": new_id(),
        "template": "seed:latest",
        "template_digest": DIGEST,
        "shape": Shape(memory_mib=256, disk_mib=512),
        "hostname": "box",
        "env": {"A": "b"},
        "name": "told",
        "metadata": {"k": "v"},
    }
    return UploadDescription(**{**members, **more})


async def stopped(service: Service) -> str:
    sandbox = await service.create(metadata={"k": "v"}, name="one")
    assert (await service.http.post(f"/v1/sandboxes/{sandbox['id']}/stop", headers=WAIT)).status_code == 200
    return str(sandbox["id"])


async def take_in(service: Service, node: NodeDouble, told: UploadDescription, **body: Any) -> Any:
    upload = (await service.http.post("/v1/uploads")).json()["id"]
    node.uploads[upload] = told
    return await service.http.post("/v1/imports", json={"upload": upload, **body}, headers=WAIT)


async def test_an_export_is_signed_here_and_fetched_from_the_node(service: Service, node: NodeDouble) -> None:
    sandbox = await stopped(service)
    answer = await service.http.post(f"/v1/sandboxes/{sandbox}/export", json={"include_template": True}, headers=WAIT)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["operation"]["status"], answer.json()["sandbox"]["state"]) == ("succeeded", "stopped")
    export = answer.json()["operation"]["result"]["export"]
    asked = node.exports[export]
    assert asked.include_template
    assert asked.labels == {"name": "one", "metadata": {"k": "v"}, "processes": "0"}
    shown = (await service.http.get(f"/v1/exports/{export}")).json()["export"]
    assert (shown["state"], shown["size_bytes"], shown["sandbox"]) == ("ready", 4711, sandbox)
    key = archive_keys.parse(shown["signed_by"])
    assert key.key_id == asked.key_id
    assert node.configured is not None
    assert key in node.configured.archive_keys
    archives.verify(
        Ed25519PublicKey.from_public_bytes(key.public), node.signatures[export], b"head of " + export.encode()
    )
    token = (await service.http.post(f"/v1/exports/{export}/token")).json()
    assert token["url"] == f"{node.attach_url}/v1/exports/{export}/content"
    assert [one["id"] for one in (await service.http.get("/v1/exports")).json()["exports"]] == [export]
    assert (await service.http.delete(f"/v1/exports/{export}")).status_code == 204
    assert export not in node.exports
    for gone in (f"/v1/exports/{export}", f"/v1/exports/{new_id()}"):
        assert (await service.http.get(gone)).json()["code"] == "unknown_export"


async def test_an_export_that_fails_says_why(service: Service, node: NodeDouble) -> None:
    async def full(_: Any) -> None:
        raise HostExhausted("host_disk_full", "The host's disk is full.", "Free space.")

    node.hooks["export.make"] = full
    sandbox = await stopped(service)
    ended = (await service.http.post(f"/v1/sandboxes/{sandbox}/export", json={}, headers=WAIT)).json()
    assert (ended["operation"]["status"], ended["sandbox"]["state"]) == ("failed", "stopped")
    (export,) = (await service.http.get("/v1/exports")).json()["exports"]
    assert (export["state"], export["error"]["code"]) == ("failed", "host_disk_full")
    refused = await service.http.post(f"/v1/exports/{export['id']}/token")
    assert (refused.status_code, refused.json()["code"]) == (409, "export_not_ready")


async def test_what_runs_is_not_exported(service: Service) -> None:
    sandbox = await service.create()
    refused = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/export", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "wrong_state")


async def test_a_snapshot_is_exported_also_after_its_sandbox(service: Service, node: NodeDouble) -> None:
    sandbox = await service.create()
    made = await service.http.post(f"/v1/sandboxes/{sandbox['id']}/snapshots", json={"kind": "full"}, headers=WAIT)
    kept = made.json()["operation"]["result"]["snapshot"]
    await service.http.delete(f"/v1/sandboxes/{sandbox['id']}", headers=WAIT)
    answer = await service.http.post(f"/v1/snapshots/{kept}/export", json={}, headers=WAIT)
    assert answer.status_code == 200, answer.text
    shown = answer.json()["export"]
    assert (shown["state"], shown["snapshot"]) == ("ready", kept)
    assert node.exports[shown["id"]].snapshot_id == kept


@pytest.mark.parametrize(("memory", "state"), [(True, "suspended"), (False, "stopped")])
async def test_an_import_is_a_sandbox_as_the_archive_says(
    service: Service, node: NodeDouble, memory: bool, state: str
) -> None:
    answer = await take_in(service, node, described(), memory=memory)
    assert answer.status_code == 200, answer.text
    sandbox = answer.json()["sandbox"]
    assert (sandbox["state"], sandbox["desired"], sandbox["name"], sandbox["metadata"]) == (
        state,
        state,
        "told",
        {"k": "v"},
    )
    assert (sandbox["memory_mib"], sandbox["disk_mib"], sandbox["template"]) == (256, 512, "seed:latest")
    assert node.specs[sandbox["id"]].env == {"A": "b"}


async def test_what_the_request_says_goes_before(service: Service, node: NodeDouble) -> None:
    answer = await take_in(service, node, described(), name="mine", metadata={}, env={"C": "d"})
    sandbox = answer.json()["sandbox"]
    assert (sandbox["name"], sandbox["metadata"]) == ("mine", {})
    assert node.specs[sandbox["id"]].env == {"C": "d"}


async def test_an_import_that_fails_leaves_nothing(service: Service, node: NodeDouble) -> None:
    async def altered(_: Any) -> None:
        raise Unprocessable("archive_altered", "The archive is not what was exported.", "Fetch it again.")

    node.hooks["sandbox.import"] = altered
    answer = await take_in(service, node, described())
    assert answer.json()["operation"]["error"]["code"] == "archive_altered"
    assert answer.json()["sandbox"]["state"] == "deleted"
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []


async def test_what_is_wrong_with_an_upload_is_told_at_once(service: Service, node: NodeDouble) -> None:
    missing = await service.http.post("/v1/imports", json={"upload": new_id()})
    assert (missing.status_code, missing.json()["code"]) == (404, "unknown_upload")
    lost = await take_in(service, node, described(memory_problem="It was made for another CPU."))
    assert (lost.status_code, lost.json()["code"]) == (409, "memory_lost")
    for told in (described(env={"a=b": ""}), described(metadata={'"': ""})):
        assert (await take_in(service, node, told)).json()["code"] == "invalid_field"
    odd = await take_in(service, node, described(name="no name at all"))
    assert odd.json()["sandbox"]["name"] is None

    async def untrusted(_: Any) -> None:
        raise Unprocessable("archive_untrusted", "It is signed with another key.", "Add it.")

    node.hooks["upload.describe"] = untrusted
    assert (await take_in(service, node, described())).json()["code"] == "archive_untrusted"


async def test_an_import_that_is_repeated_makes_one_sandbox(service: Service, node: NodeDouble) -> None:
    upload = (await service.http.post("/v1/uploads")).json()["id"]
    node.uploads[upload] = described()
    key = {**WAIT, "idempotency-key": "once"}
    first = await service.http.post("/v1/imports", json={"upload": upload}, headers=key)
    again = await service.http.post("/v1/imports", json={"upload": upload}, headers=key)
    assert first.json()["sandbox"]["id"] == again.json()["sandbox"]["id"]
    assert again.headers["idempotency-replayed"] == "true"


async def test_deleting_ends_an_import(service: Service, node: NodeDouble) -> None:
    held = asyncio.Event()

    async def hold(_: Any) -> None:
        await held.wait()

    node.hooks["sandbox.import"] = hold
    upload = (await service.http.post("/v1/uploads")).json()["id"]
    node.uploads[upload] = described()
    made = (await service.http.post("/v1/imports", json={"upload": upload})).json()
    assert made["sandbox"]["state"] == "pending"
    gone = await service.http.delete(f"/v1/sandboxes/{made['sandbox']['id']}", headers=WAIT)
    assert gone.json()["sandbox"]["state"] == "deleted"
    held.set()
    ended = await service.operation(made["operation"]["id"])
    assert ended["status"] == "cancelled"


def of_snapshot(**more: Any) -> UploadDescription:
    return described(**{"env": {}, "metadata": {}, "of_snapshot": True, "snapshot": new_id(), "key_id": "k1", **more})


@pytest.mark.parametrize(("memory", "kind"), [(True, "full"), (False, "disk")])
async def test_the_archive_of_a_snapshot_is_a_snapshot_again(
    service: Service, node: NodeDouble, memory: bool, kind: str
) -> None:
    told = of_snapshot(processes=7)
    answer = await take_in(service, node, told, memory=memory)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["made"], body["operation"]["status"], "sandbox" in body) == ("snapshot", "succeeded", False)
    kept = body["snapshot"]
    assert (kept["state"], kept["kind"], kept["name"], kept["disk_bytes"]) == ("ready", kind, "told", 10)
    assert kept["origin"] == {"sandbox": told.source, "snapshot": told.snapshot, "key": "k1"}
    assert (body["operation"]["target"], body["operation"]["result"]["snapshot"]) == (kept["id"], kept["id"])
    listed = (await service.http.get("/v1/snapshots")).json()["snapshots"]
    assert [one["id"] for one in listed] == [kept["id"]]
    assert (await service.http.get("/v1/sandboxes")).json()["sandboxes"] == []

    # It is as good as any: made into sandboxes, exported, deleted.
    made = await service.http.post("/v1/sandboxes", json={"snapshot": kept["id"]}, headers=WAIT)
    assert (made.status_code, made.json()["sandbox"]["state"]) == (200, "running"), made.text
    sandbox = made.json()["sandbox"]["id"]
    assert node.specs[sandbox].snapshot_id == kept["id"]
    # The agent in it knows the numbers that were used: what begins here has others.
    session = await service.http.post(f"/v1/sandboxes/{sandbox}/sessions", json={"argv": ["true"]})
    assert session.json()["session"]["process_id"] == 8
    out = (await service.http.post(f"/v1/snapshots/{kept['id']}/export", json={}, headers=WAIT)).json()["export"]
    assert (out["state"], out["sandbox"], node.exports[out["id"]].labels["processes"]) == ("ready", told.source, "7")
    gone = await service.http.delete(f"/v1/snapshots/{kept['id']}")
    assert (gone.status_code, gone.json()["snapshot"]["state"]) == (200, "deleted")
    assert node.snapshots == {}


async def test_a_snapshot_that_cannot_be_imported_leaves_nothing(service: Service, node: NodeDouble) -> None:
    async def altered(_: Any) -> None:
        raise Unprocessable("archive_altered", "The archive is not what was exported.", "Fetch it again.")

    node.hooks["snapshot.import"] = altered
    body = (await take_in(service, node, of_snapshot())).json()
    assert (body["made"], body["operation"]["error"]["code"]) == ("snapshot", "archive_altered")
    shown = body["snapshot"]
    assert (shown["state"], shown["error"]["code"]) == ("deleted", "archive_altered")
    assert (await service.http.get("/v1/snapshots")).json()["snapshots"] == []
    for field in ("env", "metadata"):
        refused = await take_in(service, node, of_snapshot(), **{field: {"a": "b"}})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_field")
    lost = await take_in(service, node, of_snapshot(memory_problem="It was made for another CPU."))
    assert (lost.status_code, lost.json()["code"]) == (409, "memory_lost")


@pytest.mark.parametrize("text", ["", "x", "x:y", "x:00", ":" + "0" * 64, "../x:" + "0" * 64])
def test_a_trusted_key_that_is_none_is_told(text: str) -> None:
    with pytest.raises(HatchwayError) as caught:
        archive_keys.parse(text)
    assert caught.value.code == "config_invalid"


async def test_a_node_is_asked_to_fetch_and_to_go_on(service: Service, node: NodeDouble) -> None:
    url = "s3://bucket/archives/default/one"
    begun = await service.http.post("/v1/uploads", json={"url": url})
    assert begun.status_code == 201, begun.text
    upload = begun.json()["id"]
    assert (node.fetched[upload].url, node.fetched[upload].project) == (url, "default")
    again = await service.http.post("/v1/uploads", json={"url": url, "upload": upload})
    assert again.json()["id"] == upload
    unknown = await service.http.post("/v1/uploads", json={"url": url, "upload": new_id()})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_upload")
    alone = await service.http.post("/v1/uploads", json={"upload": upload})
    assert (alone.status_code, alone.json()["code"]) == (422, "invalid_field")

    async def refuse(_: Any) -> None:
        raise Unprocessable("url_not_allowed", "Not from there.", "From elsewhere.", field="url")

    node.hooks["upload.fetch"] = refuse
    refused = await service.http.post("/v1/uploads", json={"url": "http://169.254.169.254/latest"})
    assert (refused.status_code, refused.json()["code"]) == (422, "url_not_allowed")
