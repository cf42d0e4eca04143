"""Links to files that name no sandbox are found by their signatures."""

from urllib.parse import urlencode

from hatchway.e2b import links
from hatchway.e2b.envd.signatures import sign
from hatchway.e2b.identity import Identity
from hatchway.e2b.links import Links

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


def test_those_that_were_seen_last_are_remembered(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(links, "MAX_KNOWN", 2)
    here = known("a", "b")
    here.note("a", IDENTITY)
    here.note("c", IDENTITY)
    assert [here.find("GET", "/files", query(name)) for name in "abc"] == ["a", None, "c"]
