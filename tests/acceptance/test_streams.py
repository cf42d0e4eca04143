"""Much output, clients that go away and clients that stall: complete, byte for byte, and nobody waits for another."""

import hashlib
import subprocess

import httpx
import pytest
from conftest import Service

from hatchway.client import Exit, Output

pytestmark = pytest.mark.vm

LINES = 23_000_000
"""`seq 1 LINES` is 198 MB."""


def host_digest(lines: int) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with subprocess.Popen(["seq", "1", str(lines)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def test_two_hundred_megabytes_with_the_client_gone_in_the_middle(service: Service) -> None:
    expected, size = host_digest(LINES)
    digest, got = hashlib.sha256(), 0
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        with sandbox.start(["seq", "1", str(LINES)], stdin=False) as session:
            for event in session:
                if isinstance(event, Output):
                    digest.update(event.data)
                    got += len(event.data)
                if got > 5_000_000:
                    break
        assert got < size
        again = hatchway.sessions.get(session.id)
        for chunk in again.output("stdout", got):
            digest.update(chunk)
            got += len(chunk)
        assert (got, digest.hexdigest()) == (size, expected)
        assert again.wait().code == 0


def test_a_stalled_client_slows_nobody(service: Service) -> None:
    lines = 4_000_000
    expected, _ = host_digest(lines)
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        made = httpx.post(
            f"{service.url}/v1/sandboxes/{sandbox.id}/sessions",
            json={"argv": ["seq", "1", str(lines)], "stdin": False},
            headers={"Authorization": f"Bearer {service.key}"},
        ).json()["session"]
        authorised = {"Authorization": f"Bearer {made['token']}"}
        with httpx.stream("POST", made["attach_url"], headers=authorised) as stalled:
            next(stalled.iter_raw(1))  # it attached, and reads no more
            digest = hashlib.sha256()
            other = hatchway.sessions.get(made["id"])
            events = list(other)
            for event in events:
                if isinstance(event, Output):
                    digest.update(event.data)
            assert digest.hexdigest() == expected
            assert [event.code for event in events if isinstance(event, Exit)] == [0]
