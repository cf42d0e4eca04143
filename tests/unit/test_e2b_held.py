"""What clients and guests can make the E2B wrapper keep in memory is bounded, for one sandbox and in all."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.test_e2b_envd import asked

from hatchway.client import FileChange
from hatchway.client import errors as ours
from hatchway.client.aio import AsyncSandbox
from hatchway.client.atransport import AsyncDriver
from hatchway.client.config import Config
from hatchway.client.models import SandboxInfo
from hatchway.e2b.control import calls
from hatchway.e2b.envd import app, filesystem, messages, requests, watching
from hatchway.e2b.envd.app import Envd
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.requests import MAX_OF_SANDBOX
from hatchway.e2b.envd.watching import MAX_KEPT, Watchers, Wish
from hatchway.e2b.errors import E2bError
from hatchway.e2b.held import FREE, Full, Held
from hatchway.e2b.identity import Identity

MIB = 1024 * 1024
ONE, OTHER, THIRD = "a" * 20, "b" * 20, "c" * 20


def test_one_owner_and_all_together_have_a_bound() -> None:
    held = Held(3 * FREE, 4 * FREE, 4 * FREE)
    small = [held.share(ONE, "p") for _ in range(100)]
    for share in small:
        share.hold(FREE)
    assert held.octets == 0, "what is small is not counted"
    with held.share(ONE, "p") as first, held.share(OTHER, "q") as second:
        first.hold(4 * FREE)
        with pytest.raises(Full):
            small[0].hold(FREE + 1)
        second.hold(2 * FREE)
        with pytest.raises(Full):
            second.hold(2 * FREE + 1)
        first.hold(0)
        second.hold(2 * FREE + 1)
    assert held.octets == 0


def test_one_project_does_not_take_the_room_of_others() -> None:
    held = Held(3 * FREE, 4 * FREE, 8 * FREE)
    with held.share(ONE, "p") as first, held.share(OTHER, "p") as second, held.share(THIRD, "q") as third:
        first.hold(4 * FREE)
        with pytest.raises(Full) as caught:
            second.hold(3 * FREE)
        assert caught.value.bound == "project"
        third.hold(4 * FREE)
        second.hold(2 * FREE)
    assert held.octets == 0
    assert not held._by, "nothing is kept of who has gone"
    assert requests.MAX_OF_SANDBOX < requests.MAX_OF_PROJECT <= requests.MAX_HELD // 2
    assert watching.MAX_KEPT_OF_PROJECT <= watching.MAX_KEPT_IN_ALL // 2
    assert watching.MAX_OF_PROJECT <= watching.MAX_WATCHERS // 2


class Sender:
    """A request whose body comes as the test says."""

    def __init__(self, envd: Envd, sandbox_id: str, path: str, kind: str, project: str = "p") -> None:
        self._envd = envd
        self._project = project
        self._sandbox_id = sandbox_id
        token = Identity(b"s" * 32).envd_token(sandbox_id)
        headers = {"content-type": kind, "x-access-token": token}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw}
        self.pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.taken = asyncio.Event()
        self.status = 0
        self.body = b""

    async def _receive(self) -> dict[str, Any]:
        if self.pieces.empty():
            self.taken.set()
        return await self.pieces.get()

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    def send(self, octets: bytes, more: bool = True) -> None:
        self.taken.clear()
        self.pieces.put_nowait({"type": "http.request", "body": octets, "more_body": more})

    def leave(self) -> None:
        self.pieces.put_nowait({"type": "http.disconnect"})

    async def serve(self) -> None:
        await self._envd.serve(self._sandbox_id, self._project, self._scope, self._receive, self._send)  # type: ignore[arg-type]  # ASGI's


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/process.Process/SendInput", "application/json"),
        ("/process.Process/Start", "application/connect+json"),
        ("/process.Process/StreamInput", "application/connect+json"),
    ],
)
async def test_messages_that_do_not_come_to_an_end_find_no_room(path: str, kind: str) -> None:
    """A frame that says that it is long, and many of them, each of an own connection."""
    envd = Envd(asked({}).sandboxes, Identity(b"s" * 32))
    head = (b"\0" + (30 * MIB).to_bytes(4, "big")) if "connect" in kind else b""
    senders = [Sender(envd, ONE, path, kind) for _ in range(3)]
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        serving = [group.create_task(one.serve()) for one in senders]
        for one in senders[:2]:
            one.send(head + bytes(19 * MIB))
            await one.taken.wait()
        assert senders[0].status == senders[1].status == 0, "they are still on their way"
        assert 2 * 19 * MIB - 2 * FREE <= envd._held.octets <= MAX_OF_SANDBOX
        senders[2].send(head + bytes(10 * MIB))
        await serving[2]
        assert senders[2].status == (200 if head else 429)
        assert b"resource_exhausted" in senders[2].body
        assert b"to this sandbox" in senders[2].body
        other = Sender(envd, OTHER, path, kind)
        task = group.create_task(other.serve())
        other.send(head + bytes(10 * MIB))
        await other.taken.wait()
        assert other.status == 0, "another sandbox has room"
        for one in (*senders[:2], other):
            one.leave()
        await asyncio.gather(*serving, task)
    assert envd._held.octets == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"x":[' + "[]," * messages.MAX_VALUES + "0]}",
        '{"x":[' + "0," * (3 * MIB) + "0]}",
        json.dumps({"x": {f"k{number}": {} for number in range(messages.MAX_VALUES + 1)}}),
    ],
    ids=["lists", "numbers", "objects"],
)
def test_a_message_of_very_many_values_is_refused(text: str) -> None:
    """Of an empty list, three octets on the wire become sixty here."""
    with pytest.raises(ConnectError) as caught:
        messages.of(text.encode())
    assert caught.value.code == "invalid_argument"


def test_a_long_message_of_few_values_is_taken() -> None:
    given = base64.b64encode(bytes(15 * MIB)).decode()
    assert messages.of(json.dumps({"input": {"stdin": given}}).encode()).required("input").octets("stdin") == bytes(
        15 * MIB
    )
    commas = messages.of(json.dumps({"args": ["," * MIB]}).encode())
    assert commas.texts("args") == ["," * MIB], "what a text has is no value"


class Flooding:
    """Files of a guest that tells of long names, and waits for nobody."""

    def __init__(self) -> None:
        self.told = 0
        self.ended = asyncio.Event()

    async def watch(self, path: str, **_: Any) -> AsyncIterator[FileChange]:
        try:
            yield msgspec.convert({"event": "ready", "path": path, "watch": "w"}, FileChange)
            while True:
                self.told += 1
                yield msgspec.convert({"event": "create", "path": f"{path}/{'x' * 4000}"}, FileChange)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


async def test_messages_of_one_project_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_OF_PROJECT", 2 * MIB)
    envd = Envd(asked({}).sandboxes, Identity(b"s" * 32))
    whose = ((ONE, "p"), (OTHER, "p"), (THIRD, "q"))
    first, second, third = (
        Sender(envd, one, "/process.Process/SendInput", "application/json", project) for one, project in whose
    )
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        serving = [group.create_task(one.serve()) for one in (first, second, third)]
        first.send(bytes(2 * MIB))
        await first.taken.wait()
        second.send(bytes(MIB))
        await serving[1]
        assert second.status == 429
        assert b"of this project" in second.body
        third.send(bytes(2 * MIB))
        await third.taken.wait()
        assert third.status == 0, "another project has room"
        for one in (first, third):
            one.leave()


def sandbox(sandbox_id: str, project: str = "p") -> AsyncSandbox:
    """The handle of a sandbox, as far as watchers look at it."""
    shown = {"id": sandbox_id, "state": "running", "project": project}
    return AsyncSandbox(AsyncDriver(Config("http://control.example", None), 1.0), msgspec.convert(shown, SandboxInfo))


class Quiet:
    """Files of a guest in which nothing happens: watches begin when the test says so."""

    def __init__(self) -> None:
        self.begin = asyncio.Event()

    async def watch(self, path: str, **_: Any) -> AsyncIterator[FileChange]:
        await self.begin.wait()
        yield msgspec.convert({"event": "ready", "path": path, "watch": "w"}, FileChange)
        await asyncio.Event().wait()


async def test_a_project_has_no_more_watchers_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are asked for at once, before the first has begun."""
    monkeypatch.setattr(watching, "MAX_OF_PROJECT", 2)
    monkeypatch.setattr(watching, "MAX_WATCHERS", 3)
    watchers, files = Watchers(), Quiet()

    async def create(sandbox_id: str, project: str) -> str:
        return await watchers.create(sandbox(sandbox_id, project), files, "/d", Wish())  # type: ignore[arg-type]  # they are played

    async with asyncio.timeout(60):
        begun = [asyncio.create_task(create(one, "p")) for one in (ONE, OTHER)]
        await asyncio.sleep(0)
        with pytest.raises(ConnectError, match="this project has 2 watchers") as caught:
            await create(ONE, "p")
        assert caught.value.code == "resource_exhausted"
        begun.append(asyncio.create_task(create(THIRD, "q")))
        await asyncio.sleep(0)
        with pytest.raises(ConnectError, match="there are 3 watchers"):
            await create(THIRD, "q")
        files.begin.set()
        ids = await asyncio.gather(*begun)
        await watchers.remove(ONE, ids[0])
        begun = [asyncio.create_task(create(ONE, "p"))]
        assert await begun[0]
        for sandbox_id, watcher_id in [*watchers._open]:
            await watchers.remove(sandbox_id, watcher_id)


async def test_a_watcher_keeps_no_more_than_its_share_for_who_does_not_ask() -> None:
    watchers, files = Watchers(), Flooding()
    watcher = await watchers.create(sandbox(ONE), files, "/d", Wish())  # type: ignore[arg-type]  # they are played
    async with asyncio.timeout(60):
        await files.ended.wait()
    assert files.told < (MAX_KEPT + FREE) // 4000 + 2
    kept = await watchers.events(ONE, watcher)
    assert sum(map(len, kept)) <= MAX_KEPT + FREE + 8192
    with pytest.raises(ConnectError) as caught:
        await watchers.events(ONE, watcher)
    assert caught.value.code == "resource_exhausted"
    assert watchers._held.octets == 0


async def test_what_a_watcher_kept_of_a_sandbox_that_is_gone_is_forgotten() -> None:
    class Dying(Flooding):
        async def watch(self, path: str, **_: Any) -> AsyncIterator[FileChange]:
            yield msgspec.convert({"event": "ready", "path": path, "watch": "w"}, FileChange)
            for _ in range(100):
                yield msgspec.convert({"event": "create", "path": f"{path}/{'x' * 4000}"}, FileChange)
            raise ours.ConnectionFailed("gone", "Look.")

    watchers = Watchers()
    watcher = await watchers.create(sandbox(ONE), Dying(), "/d", Wish())  # type: ignore[arg-type]  # they are played
    one = watchers._open[ONE, watcher]
    async with asyncio.timeout(60):
        await one.until(lambda: False)
    assert not one.waiting
    assert watchers._held.octets == 0


async def test_a_list_has_a_bound_in_octets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "MAX_LISTED", 100_000)
    entry = {"name": "x", "type": "file", "mode": 0o644, "user": "u", "group": "u"}
    made = 0

    async def tree(*_: Any) -> AsyncIterator[Any]:
        nonlocal made
        while made < 1_000:
            made += 1
            yield msgspec.convert({**entry, "path": "/" + "y" * 4000}, filesystem.FileEntry)

    async def stat(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(is_dir=True)

    async def at(*_: Any) -> Any:
        return SimpleNamespace(stat=stat), "/d"

    monkeypatch.setattr(filesystem, "_below", tree)
    monkeypatch.setattr(filesystem, "_at", at)
    with pytest.raises(ConnectError) as caught:
        await filesystem.Filesystem()._list_dir(asked({}), messages.of(b"{}"))
    assert caught.value.code == "resource_exhausted"
    assert made < 30


async def test_bodies_to_the_api_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(MIB, MIB, MIB)
    monkeypatch.setattr(calls, "_held", held)
    going_on = asyncio.Event()

    class Slow:
        async def stream(self) -> AsyncIterator[bytes]:
            yield bytes(900 * 1024)
            await going_on.wait()

    first = asyncio.create_task(calls._read(Slow()))  # type: ignore[arg-type]  # it is played
    async with asyncio.timeout(60):
        while not held.octets:
            await asyncio.sleep(0)
    with pytest.raises(E2bError) as caught:
        await calls._read(Slow())  # type: ignore[arg-type]  # it is played
    assert caught.value.status == 503
    assert caught.value.retry is True
    going_on.set()
    assert len(await first) == 900 * 1024
    assert held.octets == 0


async def test_a_message_whose_sender_falls_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_SILENCE_S", 0.01)

    async def never() -> Any:
        await asyncio.Event().wait()

    request = asked({})
    request.receive = never
    async with asyncio.timeout(60):
        with pytest.raises(ConnectError) as caught:
            await request.body(MIB)
    assert caught.value.code == "deadline_exceeded"
