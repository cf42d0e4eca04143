"""Links to files that name no sandbox are found by their signatures."""

import hashlib
from typing import Any
from urllib.parse import urlencode

import pytest

from hatchway.e2b import links, signatures
from hatchway.e2b.identity import Identity
from hatchway.e2b.links import Links
from hatchway.e2b.signatures import sign

IDENTITY = Identity(b"a secret of these tests")


def query(sandbox_id: str, operation: str = "read", expiration: int | None = None, **more: str) -> bytes:
    path, user = "a b/\u00fc.txt", "user"
    signature = sign(path, operation, user, IDENTITY.envd_token(sandbox_id), expiration)
    fields = {"path": path, "username": user, "signature": signature, **more}
    if expiration is not None:
        fields["signature_expiration"] = str(expiration)
    return urlencode(fields).encode()


def known(*names: str) -> Links:
    made = Links()
    for name in names:
        made.note(name, IDENTITY)
    return made


def test_the_sandbox_is_the_one_whose_token_signed() -> None:
    here = known("a", "b", "c")
    for name in "abc":
        assert here.find("GET", "/files", query(name)) == name
        assert here.find("POST", "/files", query(name, "write", 2_000_000_000)) == name
    assert here.find("GET", "/files", query("other")) is None
    assert here.find("POST", "/files", query("a")) is None, "signed for reading"


def test_what_is_no_link_is_none() -> None:
    here = known("a")
    assert here.find("GET", "/other", query("a")) is None
    assert here.find("DELETE", "/files", query("a")) is None
    assert here.find("GET", "/files", b"path=x") is None
    assert here.find("GET", "/files", query("a", signature_expiration="soon")) is None
    assert here.find("GET", "/files", b"&".join([b"signature=x"] * 100)) is None


def test_a_long_path_is_not_hashed_for_every_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to show anything to have all sandboxes tried, so that it has to cost little."""
    hashed = 0

    class Counting:
        def __init__(self, data: bytes = b"", begun: Any = None) -> None:
            nonlocal hashed
            hashed += len(data)
            self._real = real(data) if begun is None else begun.copy()

        def copy(self) -> "Counting":
            return Counting(begun=self._real)

        def update(self, data: bytes) -> None:
            nonlocal hashed
            hashed += len(data)
            self._real.update(data)

        def digest(self) -> bytes:
            return bytes(self._real.digest())

    real = hashlib.sha256
    here = known(*map(str, range(100)))
    monkeypatch.setattr(signatures.hashlib, "sha256", Counting)
    wanted = urlencode({"path": "x" * 60_000, "signature": "v1_" + "A" * 43}).encode()
    assert here.find("GET", "/files", wanted) is None
    assert 60_000 < hashed < 80_000
    assert here.find("GET", "/files", urlencode({"path": "x" * 60_000, "signature": "v1_x"}).encode()) is None
    assert hashed < 80_000, "what cannot be a signature is not looked for"


def test_those_that_were_seen_last_are_remembered(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(links, "MAX_KNOWN", 2)
    here = known("a", "b")
    here.note("a", IDENTITY)
    here.note("c", IDENTITY)
    assert [here.find("GET", "/files", query(name)) for name in "abc"] == ["a", None, "c"]
