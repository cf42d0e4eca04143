"""Problem documents become errors, and the client finds its service."""

import json
from pathlib import Path

import pytest

from hatchway.client import errors
from hatchway.client.config import DEFAULT_URL, find
from hatchway.client.errors import BadAnswer, ConnectionFailed, HatchwayError, InvalidRequest, from_problem
from hatchway.domain import errors as domain


@pytest.mark.parametrize("kind", domain.HatchwayError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_service_has_its_class(kind: type[domain.HatchwayError]) -> None:
    sent = kind("a_code", "The cause.", "The remedy.", operation="abc")
    body = json.dumps({"type": "about:blank", "title": "x", "status": kind.status, **sent.as_dict()}).encode()
    error = from_problem(kind.status, body)
    assert type(error) is getattr(errors, kind.__name__)
    assert (error.code, error.cause, error.remedy, error.status) == ("a_code", "The cause.", "The remedy.", kind.status)
    assert error.extra == {"operation": "abc"}
    assert isinstance(error, HatchwayError)


@pytest.mark.parametrize(
    ("status", "kind"), [(418, errors.InvalidRequest), (405, errors.InvalidRequest), (599, errors.Internal)]
)
def test_an_unknown_status_goes_by_its_hundreds(status: int, kind: type[HatchwayError]) -> None:
    error = from_problem(status, b'{"code": "odd", "detail": "Why."}')
    assert type(error) is kind
    assert (error.status, error.cause) == (status, "Why.")
    assert kind.status != status  # the class is not changed


@pytest.mark.parametrize("body", [b"", b"<html>502</html>", b"[]", b'"x"', b'{"code": 3}', b"\xff\xfe", b"x" * 100_000])
def test_an_answer_of_something_else_is_quoted_in_part(body: bytes) -> None:
    error = from_problem(502, body)
    assert type(error) is BadAnswer
    assert len(error.cause) < 400
    assert error.extra["http_status"] == 502


def test_what_is_given_comes_first(tmp_path: Path) -> None:
    environ = {"HATCHWAY_URL": "http://env.example:1", "HATCHWAY_API_KEY": "hw_env", "HATCHWAY_DATA_DIR": str(tmp_path)}
    found = find("https://given.example/", "hw_given", environ)
    assert (found.url, found.key) == ("https://given.example", "hw_given")
    found = find(None, None, environ)
    assert (found.url, found.key) == ("http://env.example:1", "hw_env")


def test_the_files_of_the_service(tmp_path: Path) -> None:
    environ = {"HATCHWAY_DATA_DIR": str(tmp_path)}
    assert find(None, None, environ) == find(DEFAULT_URL, None, environ)
    assert find(None, None, environ).key is None
    (tmp_path / "endpoint.json").write_text('{"api": "http://127.0.0.1:4711", "data": "http://127.0.0.1:4712"}')
    (tmp_path / "dev.key").write_text("hw_file\n")
    found = find(None, None, environ)
    assert (found.url, found.key) == ("http://127.0.0.1:4711", "hw_file")


def test_the_development_key_is_never_sent_to_another_machine(tmp_path: Path) -> None:
    (tmp_path / "dev.key").write_text("hw_file\n")
    environ = {"HATCHWAY_DATA_DIR": str(tmp_path)}
    assert find("http://other.example:7070", None, environ).key is None
    assert find("http://127.0.0.1.other.example", None, environ).key is None
    assert find("http://localhost:7070", None, environ).key == "hw_file"
    assert find("http://[::1]:7070", None, environ).key == "hw_file"


@pytest.mark.parametrize(
    "url", ["ftp://x.example", "x.example", "http://", "http://x.example:port", "http://x.example:0"]
)
def test_a_url_that_is_none(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="bad_url"):
        find(url, None, {"HATCHWAY_DATA_DIR": str(tmp_path)})


def test_a_damaged_endpoint_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text("{")
    with pytest.raises(ConnectionFailed, match=r"endpoint\.json is damaged"):
        find(None, None, {"HATCHWAY_DATA_DIR": str(tmp_path)})
