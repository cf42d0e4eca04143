"""The parts of the E2B wrapper's commands and files that do no I/O: events, entries, signatures, forms, paths."""

import asyncio
import base64
import gzip
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hatchway.client import End, Exit, FileChange, FileEntry, Gap, Output, SessionEvent, Started
from hatchway.client.aio import AsyncSandbox
from hatchway.client.atransport import AsyncDriver
from hatchway.client.config import Config
from hatchway.client.models import LeadsTo, SandboxInfo
from hatchway.e2b import signatures
from hatchway.e2b.envd import entries, multipart, paths, running, uploads, users
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.downloads import _date, coding
from hatchway.e2b.envd.endings import Endings
from hatchway.e2b.envd.fileaccess import let_in
from hatchway.e2b.envd.requests import Cut, Request
from hatchway.e2b.envd.watching import Names, Wish
from hatchway.e2b.errors import E2bError
from hatchway.e2b.identity import Identity
from hatchway.e2b.main import is_news
from hatchway.e2b.version import ENVD_VERSION

# -- events of processes


def told(*events: SessionEvent, pty: bool = False, own: bool = True, stopped: bool = False) -> list[dict[str, Any]]:
    async def session() -> AsyncIterator[SessionEvent]:
        for event in events:
            yield event

    async def gather() -> list[dict[str, Any]]:
        telling = running.Telling(pty=pty, own=own)
        telling.stopped = stopped
        return [dict(event) async for event in telling.events(session())]

    return asyncio.run(gather())


def exited(code: int | None = None, signal: int | None = None, reason: str = "exited") -> Exit:
    return Exit(reason=reason, code=code, signal=signal)


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        (exited(0), {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        (exited(7), {"exitCode": 7, "exited": True, "status": "exit status 7", "error": "exit status 7"}),
        (exited(signal=9, reason="signaled"), {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
        (exited(signal=15, reason="signaled"), {"exitCode": -1, "exited": False, "status": "signal: terminated", "error": "signal: terminated"}),
        (exited(signal=40, reason="signaled"), {"exitCode": -1, "exited": False, "status": "signal: signal 40", "error": "signal: signal 40"}),
        (exited(signal=9, reason="oom"), {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
    ],
)  # fmt: skip
def test_how_a_process_ended(end: Exit, wanted: dict[str, Any]) -> None:
    events = told(Started(pid=5), end, End())
    assert events == [{"event": {"start": {"pid": 5}}}, {"event": {"end": wanted}}]


def test_output_comes_in_pieces_of_a_bounded_size() -> None:
    out = Output("stderr", 0, b"x" * (running.PIECE + 1))
    pieces = [event["event"]["data"]["stderr"] for event in told(Started(pid=1), out, exited(0), End())[1:-1]]
    assert [len(base64.b64decode(piece)) for piece in pieces] == [running.PIECE, 1]
    terminal = told(Started(pid=1), Output("stdout", 0, b"x" * running.PIECE), exited(0), End(), pty=True)
    assert [len(base64.b64decode(event["event"]["data"]["pty"])) for event in terminal[1:-1]] == [
        running.PIECE // 2
    ] * 2


def test_output_of_what_was_left_behind_comes_before_the_end() -> None:
    late = Output("stdout", 0, b"late")
    names = [next(iter(event["event"])) for event in told(Started(pid=1), exited(0), late, End())]
    assert names == ["start", "data", "end"]


def test_a_signal_and_a_command_to_stop_end_it_at_once() -> None:
    late = Output("stdout", 0, b"late")
    for events in (
        told(Started(pid=1), exited(signal=9, reason="signaled"), late, End()),
        told(Started(pid=1), exited(0), late, End(), stopped=True),
    ):
        assert [next(iter(event["event"])) for event in events] == ["start", "end"]


def test_a_deadline_is_an_error_for_who_set_it_and_a_signal_for_others() -> None:
    end = exited(signal=9, reason="timeout")
    with pytest.raises(ConnectError) as caught:
        told(Started(pid=1), end, End())
    assert caught.value.code == "deadline_exceeded"
    assert told(Started(pid=1), end, End(), own=False)[-1]["event"]["end"]["status"] == "signal: killed"


@pytest.mark.parametrize("reason", ["sandbox_lost", "rolled_back"])
def test_a_lost_sandbox_cuts_the_stream_off(reason: str) -> None:
    with pytest.raises(Cut):
        told(Started(pid=1), exited(reason=reason), End())


def test_lost_output_is_said() -> None:
    with pytest.raises(ConnectError) as caught:
        told(Started(pid=1), Gap(stream="stdout", from_=0, to=10))
    assert caught.value.code == "data_loss"


# -- entries


def entry(**given: Any) -> FileEntry:
    return FileEntry(
        **{"path": "/home/user/f", "name": "f", "type": "file", "mode": 0o644, "user": "user", "group": "user", **given}
    )


@pytest.mark.parametrize(
    ("kind", "mode", "shown"),
    [
        ("file", 0o644, "-rw-r--r--"),
        ("dir", 0o755, "drwxr-xr-x"),
        ("dir", 0o1777, "dtrwxrwxrwx"),
        ("symlink", 0o777, "Lrwxrwxrwx"),
        ("file", 0o4755, "urwxr-xr-x"),
        ("fifo", 0o600, "prw-------"),
        ("char", 0o620, "Dcrw--w----"),
    ],
)
def test_permissions_as_the_agent_writes_them(kind: str, mode: int, shown: str) -> None:
    assert entries.permissions(entry(type=kind, mode=mode)) == shown


def test_an_entry() -> None:
    found = entries.info(entry(size=5, mtime_ns=1_700_000_000_123_456_789, attributes={"k": "v"}))
    assert found == {
        "name": "f", "type": "FILE_TYPE_FILE", "path": "/home/user/f", "size": "5", "mode": 0o644, "permissions": "-rw-r--r--",
        "owner": "user", "group": "user", "modifiedTime": "2023-11-14T22:13:20.123456789Z", "metadata": {"k": "v"},
    }  # fmt: skip


def test_a_link_has_type_and_mode_of_what_it_leads_to() -> None:
    led = LeadsTo(path="/etc/target", type="dir", mode=0o750)
    found = entries.info(entry(type="symlink", mode=0o777, target="x", leads_to=led))
    assert (found["type"], found["mode"]) == ("FILE_TYPE_DIRECTORY", 0o750)
    assert (found["permissions"], found["symlinkTarget"]) == ("Lrwxrwxrwx", "/etc/target")
    broken = entries.info(entry(type="symlink", mode=0o777, target="x"))
    assert (broken["type"], broken["symlinkTarget"]) == ("FILE_TYPE_UNSPECIFIED", "/home/user/f")
    assert "isSymlink" not in found


def test_names_that_are_no_text_and_times_beyond_all_can_be_said() -> None:
    found = entries.info(entry(name="\udcff", mtime_ns=2**63 - 1))
    assert found["name"] == "\ufffd"
    assert str(found["modifiedTime"]).startswith("2262-")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("/a/../b//c/.", "/b/c"), ("//a", "/a"), ("", "."), ("~", "."), ("~/x", "x"), ("x/./y", "x/y"), ("../x", "../x"), ("/", "/"),
        ("/..", "/"), ("~/", "."),
    ],
)  # fmt: skip
def test_paths(given: str, wanted: str) -> None:
    assert paths.local(given) == wanted


@pytest.mark.parametrize("given", ["a\0b", "~root/x", "x" * 4096])
def test_paths_that_are_none(given: str) -> None:
    with pytest.raises(ConnectError) as caught:
        paths.local(given)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("name", ["a b", "Ä", "-x", "../x", "x" * 40, "A"])
def test_users_that_cannot_be(name: str) -> None:
    with pytest.raises(ConnectError, match="invalid username: '"):
        users.checked(name)


# -- events of watches


def names(*changes: FileChange, **wish: Any) -> list[tuple[str, str]]:
    reader = Names(Wish(**wish))
    reader.ready(FileChange(event="ready", entry=entry(path="/w", name="w", type="dir")), "/w")
    events = [event for change in changes for event in reader.events(change)]
    return [(str(event["type"]).removeprefix("EVENT_TYPE_"), str(event["name"])) for event in events]


def test_changes_are_told_with_names_below_what_is_watched() -> None:
    assert names(
        FileChange(event="create", path="/w/f"),
        FileChange(event="chmod", path="/w/f"),
        FileChange(event="modify", path="/w/d/f"),
        FileChange(event="remove", path="/w/f"),
        FileChange(event="remove", path="/w/g", moved=True),
        FileChange(event="rename", path="/w/b", from_="/w/a"),
        FileChange(event="chmod", path="/w"),
    ) == [
        ("CREATE", "f"), ("CHMOD", "f"), ("WRITE", "d/f"), ("REMOVE", "f"), ("RENAME", "g"), ("RENAME", "a"), ("CREATE", "b"),
    ]  # fmt: skip


def test_only_folders_are_watched() -> None:
    with pytest.raises(ConnectError) as caught:
        Names(Wish()).ready(FileChange(event="ready", entry=entry()), "f")
    assert caught.value.code == "invalid_argument"


# -- signatures


def test_a_signature_is_what_sdks_make() -> None:
    digest = hashlib.sha256(b"/a b:read:user:token:17").digest()
    wanted = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    assert signatures.sign("/a b", "read", "user", "token", 17) == wanted
    assert signatures.refusal(wanted, "/a b", "read", "user", "token", 17, now=16) is None


@pytest.mark.parametrize(
    "change", [{"path": "/b"}, {"operation": "write"}, {"user": ""}, {"token": "other"}, {"expiration": 18}, {"expiration": None}]
)  # fmt: skip
def test_a_signature_is_good_for_what_was_signed_alone(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"path": "/a", "operation": "read", "user": "user", "token": "token", "expiration": 17}
    given = signatures.sign(**good)
    assert signatures.refusal(given, **{**good, **change}, now=0) == "invalid signature"


def test_what_is_said_of_signatures_that_are_missing_or_too_old() -> None:
    given = signatures.sign("/a", "read", "", "token", 17)
    assert signatures.refusal(given, "/a", "read", "", "token", 17, now=18) == "signature is already expired"
    assert signatures.refusal(None, "/a", "read", "", "token", None) == "missing signature query parameter"


# -- forms


def form(*parts: tuple[str, bytes], boundary: str = "xyz") -> bytes:
    body = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), data) for head, data in parts)
    return body + f"--{boundary}--\r\n".encode()


def read(octets: bytes, pieces: int = 1) -> list[tuple[str, str | None, bytes]]:
    reader = multipart.Form("multipart/form-data; boundary=xyz")
    found: list[tuple[str, str | None, bytes]] = []
    size = max(1, len(octets) // pieces)
    for at in range(0, len(octets), size):
        for event in reader.feed(octets[at : at + size]):
            if isinstance(event, multipart.Begin):
                found.append((event.name, event.filename, b""))
            elif isinstance(event, bytes):
                name, filename, data = found.pop()
                found.append((name, filename, data + event))
    reader.finish()
    return found


@given(data=st.binary(max_size=300), pieces=st.integers(1, 300))
def test_a_form_is_read_however_it_was_cut(data: bytes, pieces: int) -> None:
    octets = form(
        ('Content-Disposition: form-data; name="file"; filename="/tmp/ä b/c.txt"\r\nContent-Type: text/plain', data),
        ('Content-Disposition: form-data; name="other"', b"x"),
    )
    if b"--xyz" not in data:
        assert read(octets, pieces) == [("file", "/tmp/ä b/c.txt", data), ("other", None, b"x")]


@pytest.mark.parametrize(
    ("raw", "name"),
    [(r'"/a/b\"c"', '/a/b"c'), (r'"a\\b"', r"a\b"), (r'"C:\x\y"', r"C:\x\y"), ('"a%22b"', "a%22b"), ("plain", "plain"), ('"a;b"', "a;b")],
)  # fmt: skip
def test_names_of_files_are_whole_paths(raw: str, name: str) -> None:
    (found,) = read(form((f'Content-Disposition: form-data; name="file"; filename={raw}', b"")))
    assert found[1] == name


@given(octets=st.binary(max_size=200))
def test_any_octets_are_a_form_or_refused(octets: bytes) -> None:
    refused: int | None = None
    try:
        read(b"--xyz\r\n" + octets)
    except E2bError as error:
        refused = error.status
    assert refused in (None, 400)


def test_a_form_that_is_cut_off_or_has_no_boundary_is_refused() -> None:
    whole = form(('Content-Disposition: form-data; name="file"; filename="f"', b"data"))
    with pytest.raises(E2bError):
        read(whole[:-8])
    with pytest.raises(E2bError):
        multipart.Form("multipart/form-data")
    with pytest.raises(E2bError):
        multipart.Form("multipart/form-data; boundary=" + "x" * 5000)


def test_metadata_of_an_upload() -> None:
    assert uploads.metadata_of({"x-metadata-author": "me", "x-other": "1"}) == {"author": "me"}
    for wrong in (
        {"x-metadata-": "v"},
        {"x-metadata-" + "k" * 247: "v"},
        {"x-metadata-k": "\x7f"},
        {"x-metadata-k": "ä"},
        {"x-metadata-k": "v" * 4096},
    ):
        with pytest.raises(E2bError) as caught:
            uploads.metadata_of(wrong)
        assert caught.value.status == 400
    assert uploads.metadata_of({"x-metadata-" + "k" * 246: "v" * (4096 - 246)})


async def _pieces(octets: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(octets), size):
        yield octets[at : at + size]


@pytest.mark.parametrize("size", [1, 100, 10**6])
def test_gzip_is_unpacked_in_bounded_pieces(size: int) -> None:
    async def unpack(octets: bytes) -> list[bytes]:
        return [piece async for piece in uploads.unpacked(_pieces(octets, size))]

    data = bytes(3 * 1024 * 1024)
    found = asyncio.run(unpack(gzip.compress(data) + gzip.compress(b"more")))
    assert b"".join(found) == data + b"more"
    assert max(map(len, found)) <= uploads.PIECE
    for wrong in (gzip.compress(b"data")[:-3], b"none at all"):
        with pytest.raises(E2bError):
            asyncio.run(unpack(wrong))
    assert asyncio.run(unpack(b"")) == []


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        (None, "identity"), ("gzip, deflate", "identity"), ("identity;q=0, gzip", "gzip"), ("gzip;q=0.5, *;q=0", "gzip"), ("*;q=0, identity", "identity"),
        ("", "identity"), ("br", "identity"), ("identity;q=oops", "identity"),
    ],
)  # fmt: skip
def test_the_coding_of_a_download(accepted: str | None, wanted: str) -> None:
    assert coding(accepted) == wanted


@pytest.mark.parametrize("accepted", ["identity;q=0", "*;q=0", "identity;q=0, br", "gzip;q=0, identity;q=0"])
def test_a_coding_that_is_not_had(accepted: str) -> None:
    with pytest.raises(E2bError) as caught:
        coding(accepted)
    assert caught.value.status == 406


@pytest.mark.parametrize("date", ["Mon, 01 Jan 10000 00:00:00 GMT", "Mon, 01 Jan 99999 00:00:00 GMT", "soon", ""])
def test_a_date_that_is_none_is_no_condition(date: str) -> None:
    assert _date(date) is None


def asked(query: dict[str, str], **headers: str) -> Request:
    """A request for a file."""

    class Known:
        async def reach(self, sandbox_id: str) -> AsyncSandbox:
            driver = AsyncDriver(Config("http://control.example", None), 1.0)
            return AsyncSandbox(driver, msgspec.convert({"id": sandbox_id, "state": "running"}, SandboxInfo))

        look = reach

    async def nothing() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    known = Known()
    scope = {"type": "http", "query_string": urlencode(query).encode()}
    return Request(scope, nothing, headers, "x" * 20, known, Identity(b"s" * 32), Endings(known))


def test_a_link_is_for_the_user_that_it_names() -> None:
    """A header is not signed: with it, a link to `notes` in one user's home would lead into another's."""
    root = "Basic " + base64.b64encode(b"root:").decode()
    token = Identity(b"s" * 32).envd_token("x" * 20)
    link = {"path": "notes", "signature": signatures.sign("notes", "read", "", token, None)}
    access = asyncio.run(let_in(asked(link, authorization=root), "read", token))
    assert (access.user, access.path) == (None, "notes")
    for headers in ({"x-access-token": token}, {}):
        whole = token if headers else None
        access = asyncio.run(let_in(asked({"path": "notes"}, authorization=root, **headers), "read", whole))
        assert access.user == "root"


def test_an_answer_that_is_cut_off_is_no_news_and_every_other_error_is() -> None:
    def record(error: Exception) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "failed", (), (type(error), error, None))

    assert not is_news(record(E2bError(502, "The sandbox was not found")))
    assert is_news(record(ValueError("a fault of ours")))
    assert is_news(logging.LogRecord("uvicorn.error", logging.INFO, "", 0, "started", (), None))


def test_the_version_is_one_to_all_who_read_it() -> None:
    assert [int(part) for part in ENVD_VERSION.split(".")] == [0, 6, 4]
