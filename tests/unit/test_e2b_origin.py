"""What a request is for; tokens; and that no answer is anything but E2B's form of an error."""

import json
from pathlib import Path

import pytest

from hatchway.client import errors as ours
from hatchway.domain.errors import Forbidden
from hatchway.e2b import errors, identity, origin
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import Identity
from hatchway.e2b.origin import Target

ID = "abcdefghij0123456789"
IDENTITY = Identity(b"s" * 32)
TOKEN = IDENTITY.envd_token(ID)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "127.0.0.1:7080"}, None),
        ({"host": "api.sandboxes.example"}, None),
        ({}, None),
        ({"host": "localhost", "e2b-sandbox-id": ID, "e2b-sandbox-port": "49983"}, Target(ID, 49983, False)),
        ({"e2b-sandbox-id": f"{ID}-6532622b", "e2b-sandbox-port": "8000"}, Target(ID, 8000, False)),
        ({"host": f"8000-{ID}.sandboxes.example:8443"}, Target(ID, 8000, True)),
        ({"host": f"49983-{ID.upper()}.LOCALHOST"}, Target(ID, 49983, True)),
        ({"host": f"3000-{ID}-6532622b.sandboxes.example"}, Target(ID, 3000, True)),
        # The host name is what cannot be made by a page of another origin: it goes before headers.
        (
            {"host": f"80-{ID}.sandboxes.example", "e2b-sandbox-id": "other", "e2b-sandbox-port": "1"},
            Target(ID, 80, True),
        ),
        # The token alone, where nothing else says it.
        ({"x-access-token": TOKEN}, Target(ID, 49983, False)),
        ({"x-access-token": TOKEN, "host": "sandbox.ours.example"}, Target(ID, 49983, False)),
        ({"x-access-token": TOKEN, "x-api-key": "e2b_00"}, None),
        ({"x-access-token": TOKEN, "host": "api.ours.example"}, None),
        ({"x-access-token": TOKEN, "e2b-sandbox-id": "other", "e2b-sandbox-port": "80"}, Target("other", 80, False)),
        ({"x-access-token": TOKEN[::-1]}, None),
        ({"x-access-token": ID}, None),
        ({"x-access-token": "é"}, None),
    ],
)
def test_what_a_request_is_for(headers: dict[str, str], expected: Target | None) -> None:
    assert origin.target(headers, ("ours.example",), IDENTITY.sandbox_of) == expected


@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ({"x-api-key": "e2b_00"}, f"/sandboxes/{ID}/connect", True),
        ({"x-api-key": "e2b_00"}, "/filesystem.Filesystem/WatchDir", False),
        ({}, f"/sandboxes/{ID}/connect", False),
        ({"x-api-key": "e2b_00", "host": f"49983-{ID}.sandboxes.example"}, f"/sandboxes/{ID}/connect", False),
        ({"x-api-key": "e2b_00", "e2b-sandbox-port": "8000"}, f"/sandboxes/{ID}/connect", False),
    ],
)
def test_an_sdk_names_the_sandbox_that_it_connects_to_over_the_api(
    headers: dict[str, str], path: str, expected: bool
) -> None:
    sent = {"e2b-sandbox-id": ID, "e2b-sandbox-port": "49983", **headers}
    found = origin.target(sent)
    assert found is not None
    assert origin.is_for_api(found, path, sent) == expected


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"e2b-sandbox-id": ID}, "missing header: E2b-Sandbox-Port"),
        ({"e2b-sandbox-port": "80"}, "missing header: E2b-Sandbox-Id"),
        ({"e2b-sandbox-id": "../etc", "e2b-sandbox-port": "80"}, "Invalid sandbox ID"),
        ({"e2b-sandbox-id": "", "e2b-sandbox-port": "80"}, "Invalid sandbox ID"),
        ({"e2b-sandbox-id": ID, "e2b-sandbox-port": "0"}, "Invalid sandbox port"),
        ({"e2b-sandbox-id": ID, "e2b-sandbox-port": "65536"}, "Invalid sandbox port"),
        ({"e2b-sandbox-id": ID, "e2b-sandbox-port": "٨٠"}, "Invalid sandbox port"),
        ({"host": f"99999-{ID}.sandboxes.example"}, "Invalid sandbox port"),
    ],
)
def test_what_is_for_nothing(headers: dict[str, str], message: str) -> None:
    with pytest.raises(E2bError) as refused:
        origin.target(headers)
    assert (refused.value.status, refused.value.message) == (400, message)


def test_tokens_follow_from_the_secret_and_the_sandbox() -> None:
    one, again, other = Identity(b"s" * 32), Identity(b"s" * 32), Identity(b"t" * 32)
    assert one.envd_token(ID) == again.envd_token(ID)
    tokens = {of.envd_token(sandbox) for of in (one, other) for sandbox in (ID, ID[::-1])} | {one.traffic_token(ID)}
    assert len(tokens) == 5
    assert identity.same(one.envd_token(ID), again.envd_token(ID))
    assert not identity.same(one.traffic_token(ID), one.envd_token(ID))
    assert not identity.same(None, one.envd_token(ID))
    assert not identity.same("é", one.envd_token(ID))
    assert one.sandbox_of(one.envd_token(ID)) == ID
    for none in (other.envd_token(ID), one.traffic_token(ID), ID + one.traffic_token(ID), ID, ""):
        assert one.sandbox_of(none) is None
    with pytest.raises(Forbidden, match="secret_too_short"):
        Identity(b"short")


def test_the_secret_is_made_once_and_is_nobody_elses(tmp_path: Path) -> None:
    made = identity.load(tmp_path)
    assert len(made) == 32
    assert identity.load(tmp_path) == made
    assert (tmp_path / identity.NAME).stat().st_mode & 0o777 == 0o600
    (tmp_path / identity.NAME).unlink()
    (tmp_path / identity.NAME).symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        identity.load(tmp_path)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (ours.Unauthenticated("key_unknown", "No.", ""), 401, None),
        (ours.Forbidden("scope_missing", "No.", ""), 403, None),
        (ours.NotFound("unknown_sandbox", "No.", ""), 404, None),
        (ours.Gone("sandbox_deleted", "No.", ""), 404, None),
        (ours.Conflict("wrong_state", "No.", ""), 409, None),
        (ours.Unprocessable("invalid_field", "No.", ""), 400, None),
        (ours.Exhausted("create_rate_exceeded", "No.", ""), 429, "true"),
        (ours.Unavailable("node_unreachable", "No.", ""), 503, "true"),
        (ours.ConnectionFailed("No."), 503, "true"),
        (ours.HostExhausted("disk_full", "No.", ""), 503, "false"),
        (ours.OperationFailed("oom", "No.", operation_id="o", sandbox_id=None), 500, "false"),
        (ours.WaitTimeout("o", 1.0), 504, "false"),
        (ours.Internal("internal", "No.", ""), 500, None),
        (ours.BadAnswer("bad_answer", "No.", ""), 502, "false"),
        (ours.HatchwayError("odd", "No.", ""), 500, None),
    ],
)
def test_errors_of_ours_become_theirs(error: ours.HatchwayError, status: int, retry: str | None) -> None:
    shown = errors.answer(errors.of_client(error))
    body = json.loads(bytes(shown.body))
    assert (shown.status_code, body["code"], shown.headers.get("should-retry")) == (status, status, retry)
    assert "No." in body["message"] or status == 504
    assert ("retry-after" in shown.headers) == (retry == "true")
