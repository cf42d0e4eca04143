"""The end of a key, on a real sandbox: what was opened by the right of it ends, and what others opened goes on."""

import contextlib
import threading
from collections.abc import Iterator

import httpx
import pytest
from conftest import WITHIN_S, Service

from hatchway.client import Exit, Hatchway, Output, Started, Unauthenticated

pytestmark = pytest.mark.vm


@contextlib.contextmanager
def reading(url: str, token: str) -> Iterator[tuple[threading.Event, list[str]]]:
    """Attaches as a program without the SDK would, which takes up what breaks: tells when it is attached, and what came until the end."""
    attached, lines = threading.Event(), []

    def read() -> None:
        with httpx.stream("POST", url, headers={"Authorization": f"Bearer {token}"}, timeout=WITHIN_S) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if "ready" in line:
                    attached.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield attached, lines
    finally:
        thread.join(WITHIN_S)
        assert not thread.is_alive()


def test_a_revoked_key_takes_its_streams_and_tokens_with_it(service: Service) -> None:
    with service.client() as admin, admin.sandboxes.create() as sandbox:
        key = admin.keys.create("leaked", scopes=["read", "exec"])
        with sandbox.start("echo ready; read line; echo $line") as kept, Hatchway(service.url, key.key) as leaked:
            assert any(isinstance(event, Started | Output) for event in kept)
            made = httpx.post(
                f"{service.url}/v1/sandboxes/{sandbox.id}/sessions",
                json={"command": "echo ready; sleep 3600"},
                headers={"Authorization": f"Bearer {key.key}"},
            ).json()["session"]
            token = leaked.sandboxes.get(sandbox.id).token(["files"])
            path = f"{token.data_plane_url}/v1/sandboxes/{sandbox.id}/files/stat?path=/"
            headers = {"Authorization": f"Bearer {token.token}"}
            assert httpx.get(path, headers=headers).status_code == 200
            with reading(made["attach_url"], made["token"]) as (attached, lines):
                assert attached.wait(WITHIN_S)
                admin.keys.delete(key.id)
                # The stream ends by itself, though its process runs on.
            assert not any(line.startswith("event: exit") for line in lines)
            for answer in (
                httpx.get(path, headers=headers),
                httpx.post(made["attach_url"], headers={"Authorization": f"Bearer {made['token']}"}),
            ):
                assert (answer.status_code, answer.json()["code"]) == (401, "token_revoked")
            with pytest.raises(Unauthenticated, match="key_revoked"):
                leaked.sandboxes.get(sandbox.id)
            # Of another key's session nothing ended.
            kept.write_stdin(b"still here\n")
            rest = list(kept)
            assert b"still here" in b"".join(event.data for event in rest if isinstance(event, Output))
            assert [event.code for event in rest if isinstance(event, Exit)] == [0]
