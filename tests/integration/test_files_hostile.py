"""Files over HTTP of a sandbox whose agent lies, floods, stalls or says nothing: played by hand, against a real node process."""

import asyncio
import contextlib
import errno
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dataplane_harness import WITHIN, Plane, events
from guest_script import GuestEnd, ScriptedGuest

from hatchway.wire.channel import FrameType
from hatchway.wire.channel_fields import Fields, Tag

LIMITS = {"answer_s": 1.5, "work_s": 2.0}
"""Seconds that the node waits; a patient one would make these tests slow."""
ENTRY = {
    "path": "/x", "name": "x", "type": "file", "size": 10, "mode": 0o644, "uid": 1, "gid": 1, "user": "u", "group": "g", "mtime_ns": 5,
}  # fmt: skip
HEAD = {"head": {"entry": ENTRY, "offset": 0, "length": 10}}
OK = {"ok": {"bytes": 10}}


class Run:
    """One run of the files program, as the guest plays it."""

    def __init__(self, end: GuestEnd, number: int, key: str, arguments: list[bytes]) -> None:
        self.end = end
        self.number = number
        self.key = key
        self.arguments = arguments
        self.sent = [0, 0]
        self.credit = asyncio.Event()
        self.taken = 0

    def write(self, data: bytes, fd: int = 1) -> None:
        for start in range(0, len(data), 60_000):
            piece = data[start : start + 60_000]
            self.end.output(self.number, self.sent[fd - 1], piece, fd)
            self.sent[fd - 1] += len(piece)

    def say(self, *lines: Any) -> None:
        for line in lines:
            self.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n", 2)

    def exit(self) -> None:
        for state in (2, 3):
            self.end.proc(self.number, self.key, state=state, out=self.sent[0], err=self.sent[1], stdin=self.taken)


Behaviour = Callable[[Run], Awaitable[None] | None]


class Guest:
    """The agent; `behaviour` plays each run, after its SPAWN was answered."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.behaviour: Behaviour = lambda run: None
        self.takes_input = True
        self.spawn_answer: Callable[[Fields], dict[Tag, Any]] = lambda fields: {Tag.PID: 7}
        self.runs: list[Run] = []
        self.closed: set[int] = set()
        self.terminated: list[int] = []
        self.minds_signals = True
        self.token = plane.token(None, scopes=frozenset({"files"}))

    async def serve(self, end: GuestEnd) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                kind, stream, payload, _ = await end.read()
                if kind == FrameType.SPAWN:
                    fields = Fields(payload)
                    answer = dict(self.spawn_answer(fields))
                    status = int(answer.pop(Tag.STATUS, 0))
                    message = answer.pop(Tag.MESSAGE, None)
                    number, key = fields.number(Tag.SIZE), fields.text(Tag.KEY, 64)
                    end.answer(stream, *answer.items(), status=status)
                    if status:
                        continue
                    if message is not None:
                        for state in (2, 3):
                            end.send(
                                FrameType.PROC,
                                number,
                                (Tag.KEY, key),
                                (Tag.STATE, state),
                                (Tag.REASON, 5),
                                (Tag.MESSAGE, message),
                            )
                        continue
                    run = Run(end, number, key, [bytes(value) for value in fields.all(Tag.ARG)])  # type: ignore[arg-type] # ARG is octets
                    self.runs.append(run)
                    if self.takes_input:
                        end.send(FrameType.INPUT_ACK, number, (Tag.STDIN_OFFSET, 0), (Tag.LIMIT, 65536))
                    playing = self.behaviour(run)
                    if playing is not None:
                        await playing
                elif kind == FrameType.INPUT:
                    (run,) = [run for run in self.runs if run.number == stream]
                    run.taken = max(run.taken, int.from_bytes(payload[8:16], "little") + len(payload) - 16)
                    end.send(FrameType.INPUT_ACK, stream, (Tag.STDIN_OFFSET, run.taken), (Tag.LIMIT, 65536))
                elif kind == FrameType.CLOSE:
                    self.closed.add(Fields(payload).number(Tag.SIZE))
                    end.answer(stream)
                elif kind == FrameType.SIGNAL:
                    fields = Fields(payload)
                    assert fields.number(Tag.SIGNAL) == signal.SIGTERM
                    self.terminated.append(fields.number(Tag.SIZE))
                    assert self.terminated[-1] not in self.closed
                    if self.minds_signals:
                        end.answer(stream)
                        next(run for run in self.runs if run.number == self.terminated[-1]).exit()
                elif kind == FrameType.PING:
                    end.answer(stream, (Tag.TIME_NS, 1), (Tag.UPTIME_NS, 1))

    async def ask(
        self, method: str, verb: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        url = f"{self.plane.url}/v1/sandboxes/{self.plane.sandbox_id}/files/{verb}"
        more.setdefault("params", {"path": "/x"} if method != "POST" else None)
        return await self.plane.client.request(
            method, url, headers={"authorization": f"Bearer {self.token}"} | (headers or {}), **more
        )

    async def until_closed(self) -> None:
        """Every run that began was closed: the node keeps nothing in the guest."""
        async with asyncio.timeout(WITHIN):
            while {run.number for run in self.runs} != self.closed:
                await asyncio.sleep(0.005)


@pytest.fixture
async def guest(tmp_path: Path) -> AsyncIterator[Guest]:
    plane = Plane(tmp_path, tmp_path / "no-agent", files=LIMITS)
    async with ScriptedGuest(plane.agent_socket) as script:
        await plane.start_node(connect=False)
        guest = Guest(plane)
        serving: list[asyncio.Task[None]] = []

        async def accept() -> None:
            while True:
                end = await script._ends.get()
                await end.greet()
                serving.append(asyncio.create_task(guest.serve(end)))

        accepting = asyncio.create_task(accept())
        try:
            await plane.tell("connect", str(plane.agent_socket))
            yield guest
        finally:
            for task in (accepting, *serving):
                task.cancel()
            await plane.stop()


def playing(*lines: Any, data: bytes = b"", exits: bool = True) -> Behaviour:
    def play(run: Run) -> None:
        run.say(*lines)
        run.write(data)
        if exits:
            run.exit()

    return play


def nested(depth: int) -> bytes:
    return b'{"head":' + b"[" * depth + b"]" * depth + b"}\n"


def with_entry(**changes: Any) -> dict[str, Any]:
    return {"head": {"entry": ENTRY | changes, "offset": 0, "length": 10}}


BAD_BEGINNINGS: dict[str, tuple[Any, ...]] = {
    "nothing, and ends": (),
    "no JSON": (b"hello\n",),
    "half a line": (b'{"head":',),
    "a line without end": (b"x" * 40_000,),
    "a long line": (b'{"head":"' + b"x" * 40_000 + b'"}\n',),
    "no UTF-8": (b'{"head":"\xff"}\n',),
    "half a character": (b'{"head":{"entry":"\\ud800"}}\n',),
    "nested too deeply": (nested(10_000),),
    "an end without a head": (OK,),
    "an empty object": ({},),
    "a list": ([],),
    "an error that is none": ({"errno": 0, "code": "", "message": ""},),
    "an error without a message": ({"errno": 2, "code": "ENOENT"},),
    "a negative size": (with_entry(size=-1),),
    "a size beyond all": (with_entry(size=2**64),),
    "half a size": (with_entry(size=1.5),),
    "a mode that is none": (with_entry(mode=0o10000),),
    "a type that is none": (with_entry(type="door"),),
    "a user without end": (with_entry(user="u" * 300),),
    "a name that is a number": (with_entry(name=5),),
    "another place": ({"head": {"entry": ENTRY, "offset": 3, "length": 10}},),
    "a negative length": ({"head": {"entry": ENTRY, "offset": 0, "length": -10}},),
}


async def test_a_beginning_that_cannot_be_is_said(guest: Guest) -> None:
    for what, lines in BAD_BEGINNINGS.items():
        guest.behaviour = playing(*lines)
        answer = await guest.ask("GET", "content")
        assert (answer.status_code, answer.json()["code"]) == (502, "guest_bad_answer"), (what, answer.text)
        assert len(answer.text) < 2_000
    await guest.until_closed()


ALL = [
    ("GET", "content", None), ("HEAD", "content", None), ("PUT", "content", None), ("GET", "stat", None), ("GET", "list", None),
    ("POST", "mkdir", {"path": "/x"}), ("POST", "move", {"from": "/x", "to": "/y"}), ("POST", "remove", {"path": "/x"}),
    ("POST", "chmod", {"path": "/x", "mode": "7"}), ("GET", "watch", None), ("GET", "archive", None), ("PUT", "archive", None),
]  # fmt: skip


async def test_a_guest_that_says_nothing_is_not_waited_for_without_end(guest: Guest) -> None:
    guest.behaviour = playing(exits=False)
    answers = await asyncio.gather(
        *(
            guest.ask(method, verb, content=b"x" if method == "PUT" else None, json=body)
            if method == "PUT"
            else guest.ask(method, verb, json=body)
            for method, verb, body in ALL
        )
    )
    for (method, verb, _), answer in zip(ALL, answers, strict=True):
        assert answer.status_code == 502, (method, verb, answer.text)
        if method != "HEAD":
            assert answer.json()["code"] == "guest_no_answer"
    await guest.until_closed()


async def test_every_operation_refuses_an_end_that_is_none(guest: Guest) -> None:
    for end in ({"ok": {}}, {"ok": 5}, {"ok": None, "head": {}}, b"\n", b"null\n"):
        guest.behaviour = playing(end)
        for method, verb, body in ALL:
            more = {"content": b"x"} if method == "PUT" else {"json": body}
            answer = await guest.ask(method, verb, **more)
            assert answer.status_code == 502, (method, verb, end, answer.text)
    await guest.until_closed()


BAD_DOWNLOADS: list[tuple[bytes, tuple[Any, ...]]] = [
    (b"12345", ({"ok": {"bytes": 5}},)),
    (b"12345", (OK,)),
    (b"1234567890", ({"ok": {"bytes": 9}},)),
    (b"1234567890", ({"errno": errno.ESTALE, "code": "ESTALE", "message": "shorter"},)),
    (b"1234567890", ()),
    (b"1234567890", (b"{}\n",)),
    (b"1234567890", (HEAD,)),
    (b"12345678901234567890", (OK,)),
    (b"x" * 200_000, (OK,)),
]


async def test_a_download_that_is_not_what_was_announced_is_cut_off(guest: Guest) -> None:
    for data, ends in BAD_DOWNLOADS:
        guest.behaviour = playing(HEAD, *ends, data=data)
        with pytest.raises(httpx.RemoteProtocolError):
            await guest.ask("GET", "content")
    await guest.until_closed()


async def test_a_download_that_stalls_is_cut_off(guest: Guest) -> None:
    guest.behaviour = playing(HEAD, data=b"12345", exits=False)
    with pytest.raises(httpx.RemoteProtocolError):
        await guest.ask("GET", "content")
    await guest.until_closed()


async def test_an_end_that_comes_late_or_twice_harms_nobody(guest: Guest) -> None:
    async def slowly(run: Run) -> None:
        run.say(HEAD)
        for octet in b"1234567890":
            await asyncio.sleep(0.01)
            run.write(bytes([octet]))
        run.say(OK, OK, HEAD, b"garbage\n")
        run.exit()

    guest.behaviour = slowly
    answer = await guest.ask("GET", "content")
    assert (answer.status_code, answer.content) == (200, b"1234567890")
    await guest.until_closed()


async def test_a_flood_of_lines_is_hung_up_on_and_the_next_request_works(guest: Guest) -> None:
    guest.behaviour = playing(b"\n" * 600_000, exits=False)
    before = int(str(await guest.plane.tell("memory")))
    answer = await guest.ask("GET", "stat")
    assert answer.status_code in (502, 503)
    assert int(str(await guest.plane.tell("memory"))) - before < 16 * 2**20
    guest.behaviour = playing({"ok": {"entry": ENTRY}})
    assert (await guest.ask("GET", "stat")).json()["entry"] == ENTRY


async def test_what_nobody_knows_is_dropped(guest: Guest) -> None:
    guest.behaviour = playing({"ok": {"entry": ENTRY | {"surplus": ["<script>"] * 5}, "more": 1}, "another": 2})
    answer = await guest.ask("GET", "stat")
    assert answer.json() == {"entry": ENTRY}


async def test_ranges_are_checked_against_what_was_asked_for(guest: Guest) -> None:
    for offset, length in ((0, 5), (4, 5), (3, 6), (3, 2**62)):
        guest.behaviour = playing({"head": {"entry": ENTRY, "offset": offset, "length": length}}, OK)
        answer = await guest.ask("GET", "content", headers={"range": "bytes=3-7"})
        assert (answer.status_code, answer.json()["code"]) == (502, "guest_bad_answer"), (offset, length)
    assert b"offset=3" in guest.runs[0].arguments
    assert b"length=5" in guest.runs[0].arguments


async def test_lists_are_bounded_and_counted(guest: Guest) -> None:
    line = json.dumps(ENTRY).encode() + b"\n"
    done = {"ok": {"entries": 2, "skipped": 0}}
    for data in (line * 3, line, b"", line * 2 + b"x", line + b"null\n"):
        guest.behaviour = playing(done, data=data)
        answer = await guest.ask("GET", "list", params={"path": "/x", "limit": 2})
        assert (answer.status_code, answer.json()["code"]) == (502, "guest_bad_answer"), data
    for cursor in ({"next": "a", "next_base64": "%"}, {"next": 5}):
        guest.behaviour = playing({"ok": {"entries": 2, "skipped": 0, **cursor}}, data=line * 2)
        assert (await guest.ask("GET", "list")).status_code == 502
    guest.behaviour = playing(done, data=line * 2)
    assert (await guest.ask("GET", "list")).json() == {"entries": [ENTRY, ENTRY], "skipped": 0, "next_cursor": None}


async def test_a_long_list_is_cut_off_when_it_goes_wrong(guest: Guest) -> None:
    line = json.dumps(ENTRY | {"path": "/" + "p" * 4000}).encode() + b"\n"

    async def slowly(run: Run) -> None:
        for _ in range(100):
            run.write(line)
            await asyncio.sleep(0.005)  # within the window of the stream
        run.say({"errno": errno.EIO, "code": "EIO", "message": "broken"})
        run.exit()

    guest.behaviour = slowly
    with pytest.raises(httpx.RemoteProtocolError):
        await guest.ask("GET", "list")


async def test_uploads_are_counted_and_a_guest_that_takes_nothing_is_left(guest: Guest) -> None:
    written = {"entry": ENTRY, "bytes": 10, "created": True}
    guest.behaviour = playing({"ok": written})  # before anything was sent
    answer = await guest.ask("PUT", "content", content=b"12345")
    assert (answer.status_code, answer.json()["code"]) == (502, "guest_bad_answer")
    guest.behaviour = playing(exits=False)
    guest.takes_input = False
    answer = await guest.ask("PUT", "content", content=bytes(1_000_000))
    assert (answer.status_code, answer.json()["code"]) == (502, "guest_no_answer")
    answer = await guest.ask("PUT", "archive", content=bytes(1_000_000))
    assert (answer.status_code, answer.json()["code"]) == (502, "guest_no_answer")
    await guest.until_closed()


@pytest.mark.parametrize("headers", [{"content-length": "1000000"}, {}], ids=["announced", "in chunks"])
@pytest.mark.parametrize("minds", [True, False])
async def test_the_program_of_an_upload_that_is_cut_off_is_told_to_clear_away(
    guest: Guest, headers: dict[str, str], minds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hatchway.node.dataplane.files.uploads._GRACE_S", 0.2)
    guest.minds_signals = minds

    async def half() -> AsyncIterator[bytes]:
        yield bytes(1_000)
        async with asyncio.timeout(WITHIN):
            while not guest.runs:
                await asyncio.sleep(0.005)
        raise ConnectionResetError

    with pytest.raises((httpx.HTTPError, ConnectionResetError)):
        await guest.ask("PUT", "content", content=half(), headers=headers)
    await guest.until_closed()
    assert guest.terminated == [guest.runs[0].number]


async def test_an_upload_whose_end_comes_early_stops_the_upload(guest: Guest) -> None:
    guest.behaviour = playing({"errno": errno.ENOSPC, "code": "ENOSPC", "message": "no room\x07\u202e", "bytes": 5})
    answer = await guest.ask("PUT", "content", content=bytes(1_000_000))
    assert (answer.status_code, answer.json()["code"]) == (507, "sandbox_disk_full")
    assert answer.json()["cause"].isprintable()
    assert answer.json()["bytes"] == 5


class _Stream(httpx.AsyncByteStream):
    """An answer that was read, to be read again."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


async def test_a_watch_ends_with_what_was_wrong(guest: Guest) -> None:
    head = {"head": {"entry": ENTRY, "watches": 1, "unreadable": 0}}
    change = {"event": "create", "path": "/x/a", "name": "a", "dir": False}
    for bad in (b"garbage\n", b'{"event":"explode"}\n', b"x" * 40_000, b'{"event":"create"}\n'):
        guest.behaviour = playing(head, data=json.dumps(change).encode() + b"\n" + bad)
        answer = await guest.ask("GET", "watch")

        async def all_of(answer: httpx.Response = answer) -> list[Any]:
            return [event async for event in events(httpx.Response(200, stream=_Stream(answer.content)))]

        seen = await all_of()
        assert [event.name for event in seen] == ["ready", "file", "end"]
        assert (seen[-1].data["reason"], seen[-1].data["code"]) == ("failed", "guest_bad_answer")
    await guest.until_closed()


async def test_refusals_to_start(guest: Guest) -> None:
    guest.behaviour = playing({"ok": {"entry": ENTRY}})
    guest.spawn_answer = lambda fields: {Tag.STATUS: errno.EAGAIN, Tag.MESSAGE: None}
    answer = await guest.ask("GET", "stat")
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_file_operations")
    guest.spawn_answer = lambda fields: {Tag.STATUS: errno.ENOENT, Tag.MESSAGE: None}
    answer = await guest.ask("GET", "stat")
    assert (answer.status_code, answer.json()["code"]) == (422, "file_operation_failed")


async def test_the_default_user_is_root_where_there_is_no_other(guest: Guest) -> None:
    users: list[str | None] = []

    def spawn(fields: Fields) -> dict[Tag, Any]:
        users.append(fields.get_text(Tag.USER))
        return {Tag.PID: 7} if users[-1] == "root" else {Tag.MESSAGE: f"no such user: {users[-1]}"}

    guest.spawn_answer = spawn
    guest.behaviour = playing({"ok": {"entry": ENTRY}})
    assert (await guest.ask("GET", "stat")).status_code == 200
    assert users == ["user", "root"]
    answer = await guest.ask("GET", "stat", params={"path": "/x", "user": "user"})
    assert (answer.status_code, answer.json()["code"]) == (422, "unknown_user")


async def test_a_link_that_breaks_in_the_middle_goes_on_where_it_was(guest: Guest) -> None:
    async def broken(run: Run) -> None:
        run.say(HEAD)
        run.write(b"12345")
        await run.end.writer.drain()
        run.end.close()

    guest.behaviour = broken
    with pytest.raises(httpx.RemoteProtocolError):  # the agent does not know the program any more
        await guest.ask("GET", "content")
    guest.behaviour = playing({"ok": {"entry": ENTRY}})
    assert (await guest.ask("GET", "stat")).status_code == 200
