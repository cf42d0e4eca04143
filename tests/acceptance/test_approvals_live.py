"""Verbs that wait for consent, on a real machine: until somebody allows it the sandbox is what it was, and then the verb does what it says."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import WITHIN_S, Service

from hatchway.client import Hatchway
from hatchway.client.errors import OperationFailed

pytestmark = pytest.mark.vm

PROJECT = "consenting"


@pytest.fixture
def hatchway(service: Service) -> Iterator[Hatchway]:
    """A client in a project of its own, in which a deletion, a rollback and an export wait."""
    with service.client() as operator:
        operator.projects.create(PROJECT, approvals=["delete", "rollback", "export"])
        key = operator.keys.create("all", project=PROJECT, scopes=["read", "write", "admin"])
        try:
            with Hatchway(service.url, key.key) as client:
                yield client
        finally:
            operator.projects.delete(PROJECT, force=True)  # what ends a project needs nobody's consent


def asked(hatchway: Hatchway, verb: str) -> Any:
    """What waits now, as soon as it does."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        for one in hatchway.approvals.list(states=["pending"]):
            assert one.request["verb"] == verb
            return one
        time.sleep(0.05)
    raise AssertionError(f"nobody is asked for a {verb}")


def test_a_rollback_an_export_and_a_deletion_wait_and_then_do_what_they_say(hatchway: Hatchway) -> None:
    sandbox = hatchway.sandboxes.create(timeout=300.0)
    sandbox.files.write("/home/user/note", b"before")
    snapshot = sandbox.snapshot("disk")
    sandbox.files.write("/home/user/note", b"after")

    with ThreadPoolExecutor(1) as elsewhere:
        going_back = elsewhere.submit(sandbox.rollback, snapshot)
        question = asked(hatchway, "rollback")
        assert sandbox.run(["cat", "/home/user/note"]).stdout == "after", "it runs on as if nothing had been asked"
        hatchway.approvals.deny(question.id, note="not now")
        with pytest.raises(OperationFailed, match="approval_denied"):
            going_back.result(WITHIN_S)
        assert sandbox.run(["cat", "/home/user/note"]).stdout == "after"

        going_back = elsewhere.submit(sandbox.rollback, snapshot)
        hatchway.approvals.allow(asked(hatchway, "rollback").id)
        going_back.result(WITHIN_S)
        assert sandbox.refresh().state == "stopped"

        exporting = elsewhere.submit(hatchway.archives.export, sandbox)
        question = asked(hatchway, "export")
        assert [one.state for one in hatchway.archives.list()] == ["pending"]
        hatchway.approvals.allow(question.id)
        archive = b"".join(hatchway.archives.fetch(exporting.result(WITHIN_S)))
        assert len(archive) > 1_000

        sandbox.start_vm(timeout=300.0)
        deleting = elsewhere.submit(sandbox.delete, timeout=WITHIN_S)
        question = asked(hatchway, "delete")
        assert sandbox.run(["cat", "/home/user/note"]).stdout == "before", "what was rolled back is what is there"
        hatchway.approvals.allow(question.id)
        deleting.result(WITHIN_S)
    assert sandbox.refresh().state == "deleted"
