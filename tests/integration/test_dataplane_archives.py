"""Archives on the data plane: who may fetch and bring which, in what pieces, and under which passphrase."""

import asyncio
import base64
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hatchway.domain.ids import new_id
from hatchway.node.artifacts import sealed
from hatchway.node.artifacts.spool import MAX_UPLOADS, Entry, Spool
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.archives import Archives
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.wire.node import Configure, TokenKey
from hatchway.wire.tokens import Signer

LIMITS = PlaneLimits(client_grace_s=2.0)


class Stand:
    """A data plane with an export in it."""

    def __init__(self, folder: Path) -> None:
        key = Ed25519PrivateKey.generate()
        self.signer, self.tokens = Signer(key, "k"), TokenChecker()
        self.key = TokenKey(key_id="k", public=key.public_key().public_bytes_raw())
        self.tokens.configure(Configure(token_keys=(self.key,)))
        self.archives = Archives(Spool(folder / "exports"), Spool(folder / "uploads"))
        for spool in (self.archives.exports, self.archives.uploads):
            spool.load()
        self.app = make_app(cast(Any, None), self.tokens, cast(Any, None), archives=self.archives, limits=LIMITS)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://node.test")
        self.octets = os.urandom(300_000)
        self.export = new_id()
        self.archives.exports.path(self.export, ".new").write_bytes(self.octets)
        entry = Entry(project="default", expires_at=time.time() + 100, salt=b"s" * 16, digest="sha256:x")
        self.archives.exports.finish(self.export, entry)

    def right(self, archive_id: str, **more: Any) -> dict[str, str]:
        """The headers of a token."""
        claims = {"project": "default", "scopes": frozenset({"archives"}), **more}
        token, _ = self.signer.issue(sandbox_id=archive_id, generation=1, ttl_s=60, **claims)
        return {"authorization": f"Bearer {token}"}

    async def get(self, headers: dict[str, str], export: str | None = None) -> httpx.Response:
        """Fetches an export."""
        return await self.http.get(f"/v1/exports/{export or self.export}/content", headers=headers)

    async def put(
        self, upload: str, offset: int, octets: bytes, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Brings a piece of an upload."""
        headers = self.right(upload) if headers is None else headers
        return await self.http.put(f"/v1/uploads/{upload}/content?offset={offset}", content=octets, headers=headers)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    made = Stand(tmp_path)
    yield made
    await made.http.aclose()


def word(text: str) -> dict[str, str]:
    return {"hatchway-passphrase": base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")}


async def test_only_its_own_token_leads_to_an_export(stand: Stand) -> None:
    good = await stand.get(stand.right(stand.export))
    assert (good.status_code, good.content) == (200, stand.octets)
    for headers, code in (
        ({}, "token_missing"),
        ({"authorization": "Bearer x"}, "token_invalid"),
        (stand.right(new_id()), "wrong_sandbox"),
        (stand.right(stand.export, project="other"), "wrong_sandbox"),
        (stand.right(stand.export, scopes=frozenset({"files", "ports", "sessions"})), "wrong_scope"),
        (stand.right(stand.export, session_id=new_id()), "wrong_scope"),
    ):
        answer = await stand.get(headers)
        assert answer.json()["code"] == code
    gone = new_id()
    assert (await stand.get(stand.right(gone), gone)).json()["code"] == "unknown_export"
    for odd in ("..", "%2e%2e%2fidentity", "a" * 300):
        assert (await stand.get(stand.right(odd), odd)).status_code in (403, 404)


async def test_revoked_tokens_are_no_good(stand: Stand) -> None:
    headers = stand.right(stand.export, key_id="api-key")
    stand.tokens.configure(Configure(token_keys=(stand.key,), revoked_keys=("api-key",)))
    assert (await stand.get(headers)).json()["code"] == "token_revoked"


async def test_any_range_of_either_form(stand: Stand) -> None:
    right = stand.right(stand.export)
    whole = (await stand.get({**right, **word("word")})).content
    assert len(whole) == sealed.Sealer.size(len(stand.octets))
    opener = sealed.Opener(b"word")
    assert b"".join([*opener.feed(whole), opener.finish()]) == stand.octets
    for octets, more in ((stand.octets, {}), (whole, word("word"))):
        for first, last in ((0, 0), (30, 100), (59, 61), (65_000, 200_000), (len(octets) - 1, len(octets) + 9)):
            part = await stand.get({**right, **more, "range": f"bytes={first}-{last}"})
            assert (part.status_code, part.content) == (206, octets[first : last + 1]), (first, last)
        beyond = await stand.get({**right, **more, "range": f"bytes={len(octets)}-"})
        assert (beyond.status_code, beyond.json()["code"]) == (416, "range_unsatisfiable")
    for bad in ("", "?", "A" * 5000):
        assert (await stand.get({**right, "hatchway-passphrase": bad})).status_code in (400, 422)


async def test_an_upload_goes_on_where_it_was_and_belongs_to_one_project(stand: Stand) -> None:
    upload = new_id()
    assert (await stand.put(upload, 0, b"one")).json() == {"offset": 3}
    wrong = await stand.put(upload, 1, b"two")
    assert (wrong.status_code, wrong.json()["offset"]) == (409, 3)
    other = await stand.put(upload, 3, b"two", stand.right(upload, project="other"))
    assert other.json()["code"] == "wrong_sandbox"
    assert (await stand.put(upload, 3, b"two")).json() == {"offset": 6}
    path, entry = stand.archives.uploads.get(upload, "upload")
    assert (path.read_bytes(), entry.project) == (b"onetwo", "default")
    assert path.stat().st_mode & 0o777 == 0o600


async def test_uploads_of_a_project_are_bounded_and_end(stand: Stand) -> None:
    for _ in range(MAX_UPLOADS):
        assert (await stand.put(new_id(), 0, b"x")).status_code == 200
    full = await stand.put(new_id(), 0, b"x")
    assert (full.status_code, full.json()["code"]) == (429, "too_many_uploads")
    other = new_id()
    assert (await stand.put(other, 0, b"x", stand.right(other, project="other"))).status_code == 200
    later = Spool(stand.archives.uploads._folder, now=lambda: time.time() + 7200)
    await asyncio.to_thread(later.sweep)
    assert list(stand.archives.uploads._folder.iterdir()) == []


async def test_a_sealed_upload_is_opened_once_with_its_passphrase(stand: Stand) -> None:
    upload = new_id()
    octets = b"".join(sealed.seal_all(b"word", os.urandom(16), [stand.octets]))
    await stand.put(upload, 0, octets)
    path, _ = stand.archives.uploads.get(upload, "upload")
    for headers, code in (({}, "passphrase_needed"), (word("Word"), "passphrase_wrong")):
        refused = await stand.http.post(f"/v1/uploads/{upload}/open", headers={**stand.right(upload), **headers})
        assert (refused.status_code, refused.json()["code"]) == (422, code)
        assert path.read_bytes() == octets
    for encrypted in (True, False):
        opened = await stand.http.post(f"/v1/uploads/{upload}/open", headers={**stand.right(upload), **word("word")})
        assert opened.json() == {"encrypted": encrypted, "size_bytes": len(stand.octets)}
    assert path.read_bytes() == stand.octets


def test_what_was_not_finished_is_gone_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.load()
    half, whole = new_id(), new_id()
    spool.path(half, ".new").write_bytes(b"x")
    spool.path(whole, ".new").write_bytes(b"x")
    spool.finish(whole, Entry(project="p", expires_at=time.time() + 100))
    (tmp_path / "stray").write_bytes(b"")
    Spool(tmp_path).load()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{whole}.archive", f"{whole}.json"]


async def test_an_export_is_not_kept_open_by_who_takes_nothing(stand: Stand) -> None:
    path = f"/v1/exports/{stand.export}/content"
    headers = [(name.encode(), value.encode()) for name, value in stand.right(stand.export).items()]
    aborted, taken = asyncio.Event(), []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()
        taken.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "extensions": {"hatchway.abort": aborted.set},
    }
    await asyncio.wait_for(stand.app(scope, receive, send), 20)
    assert (taken, aborted.is_set()) == ([200], True)
