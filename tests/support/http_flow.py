"""A flow of the gateway whose octets a test writes and reads itself: HTTP runs on it as on a real one, and the policy is a real one."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.http.seam import FlowError, Stream, StreamLost
from hatchway.egress.http.session import HttpSession
from hatchway.egress.shares import Shares

NOW = 1_000_000.0
WITHIN = 20.0
HOST = "index.example"


class PlayedStream:
    """One end of a connection (`seam.Stream`); the test is the other one."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.ended = self.closed = self.aborted = False
        self._chunks: list[bytes] = []
        self._eof = False
        self._changed = asyncio.Event()
        self._on_lost: list[Callable[[], None]] = []

    # -- the test's side

    def feed(self, data: bytes) -> None:
        """Octets arrive."""
        if data:
            self._chunks.append(data)
        self._wake()

    def feed_end(self) -> None:
        """The peer has nothing more to say."""
        self._eof = True
        self._wake()

    def lose(self) -> None:
        """The connection breaks."""
        self.abort()

    async def until(self, condition: Callable[["PlayedStream"], bool]) -> None:
        """Waits for what is written, or for the end."""
        async with asyncio.timeout(WITHIN):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    @property
    def over(self) -> bool:
        """Closed or aborted."""
        return self.closed or self.aborted

    def _wake(self) -> None:
        self._changed.set()

    # -- seam.Stream

    async def read(self) -> bytes:
        while True:
            if self._chunks:
                return self._chunks.pop(0)
            if self._eof:
                return b""
            if self.over:
                raise StreamLost("the connection was lost")
            self._changed.clear()
            await self._changed.wait()

    def unread(self, data: bytes) -> None:
        self._chunks.insert(0, data)

    def write(self, data: bytes) -> None:
        if not self.over and not self.ended:
            self.written += data
            self._wake()

    async def drain(self) -> None:
        if self.over:
            raise StreamLost("the connection was lost")

    def end(self) -> None:
        self.ended = True
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._lost()

    def abort(self) -> None:
        self.aborted = True
        self._lost()

    def when_lost(self, callback: Callable[[], None]) -> None:
        if self.over:
            callback()
        else:
            self._on_lost.append(callback)

    def _lost(self) -> None:
        self._wake()
        called, self._on_lost = self._on_lost, []
        for callback in called:
            callback()

    @property
    def lost(self) -> bool:
        return self.over

    @property
    def buffered(self) -> int:
        return sum(map(len, self._chunks))


Server = Callable[[PlayedStream], Awaitable[None]]


class PlayedExchange:
    """`seam.Exchange`."""

    def __init__(self, flow: "PlayedFlow", cut: Callable[[str], None]) -> None:
        self.flow = flow
        self.cut = cut

    def count(self, out: int, into: int) -> None:
        self.flow.out += out
        self.flow.into += into
        if self.flow.budget is not None and self.flow.out > self.flow.budget:
            raise FlowError("byte_budget", "the budget of octets is used up", 429)

    def end(self) -> None:
        self.flow.exchanges.discard(self)


class PlayedFlow:
    """`seam.BoundFlow`. `server` plays each connection to the outside; `arrived` is all that any of them was sent."""

    def __init__(
        self,
        policy: Policy,
        server: Server,
        *,
        host: str = HOST,
        port: int = 443,
        tls: bool = True,
        alpn: str = "http/1.1",
    ) -> None:
        self.host, self.port, self.tls, self.alpn = host, port, tls, alpn
        self.sandbox_id, self.project, self.generation = "s" * 20, "default", 1
        self.policy: Any = policy
        self.placeholders: dict[str, str] = {}
        self.shares = Shares()
        self.scarce: list[Callable[[], None]] = []
        self.records: list[tuple[str, str, str, dict[str, Any]]] = []
        self.lines: list[PlayedStream] = []
        self.legs: list[tuple[str, PlayedStream]] = []
        self.exchanges: set[PlayedExchange] = set()
        self.answers: list[bool] = []
        self.asked: list[Request] = []
        self.held: asyncio.Event | None = None
        """Set: an ask waits for it."""
        self.dial_error: FlowError | None = None
        self.record_error: FlowError | None = None
        self.begin_error: FlowError | None = None
        self.budget: int | None = None
        self.out = self.into = 0
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def arrived(self) -> bytes:
        """What reached the outside, in the order of the connections."""
        return b"".join(bytes(line.written) for line in self.lines)

    def reasons(self, decision: str) -> list[str]:
        """The reasons of the records with this decision."""
        return [reason for _, decided, reason, _ in self.records if decided == decision]

    def when_scarce(self, callback: Callable[[], None]) -> None:
        self.scarce.append(callback)

    def decide(self, request: Request) -> Verdict:
        verdict: Verdict = self.policy.request(request, NOW)
        return verdict

    def judge(self, request: Request) -> Verdict:
        return self.decide(request)

    async def ask(self, verdict: Verdict, request: Request) -> bool:
        assert verdict.action is Action.ASK
        self.asked.append(request)
        if self.held is not None:
            await self.held.wait()
        return self.answers.pop(0)

    def begin(self, request: Request, verdict: Verdict, cut: Callable[[str], None], stream: Stream) -> PlayedExchange:
        if self.begin_error is not None:
            raise self.begin_error
        exchange = PlayedExchange(self, cut)
        self.exchanges.add(exchange)
        return exchange

    async def dial(
        self, request: Request, verdict: Verdict, alpn: tuple[str, ...] = ("http/1.1",)
    ) -> tuple[PlayedStream, str]:
        if self.dial_error is not None:
            raise self.dial_error
        return self._line(), "http/1.1"

    async def leg(self, request: Request, verdict: Verdict, credential: str) -> PlayedStream:
        if self.dial_error is not None:
            raise self.dial_error
        line = self._line()
        self.legs.append((credential, line))
        return line

    def record(
        self,
        kind: str,
        decision: str,
        verdict: Verdict | None = None,
        *,
        reason: str = "",
        data: dict[str, Any] | None = None,
    ) -> None:
        if self.record_error is not None:
            raise self.record_error
        self.records.append((kind, decision, reason or (verdict.reason if verdict else ""), data or {}))

    def _line(self) -> PlayedStream:
        line = PlayedStream()
        self.lines.append(line)
        task = asyncio.get_running_loop().create_task(_until_lost(self._server(line)))
        self._tasks.add(task)
        return line

    async def over(self) -> None:
        """Ends the servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _until_lost(played: Awaitable[None]) -> None:
    try:
        await played
    except StreamLost:
        return


def answering(*answers: bytes) -> Server:
    """A server that waits for a whole head and its body, and gives one answer for each request; then it says nothing more."""

    async def play(line: PlayedStream) -> None:
        at = 0
        for answer in answers:
            end = 0
            while not end:
                end = whole_request(bytes(line.written), at)
                if not end:
                    seen = len(line.written)
                    await line.until(lambda one, seen=seen: len(one.written) > seen or one.over)  # type: ignore[misc]
                    if line.over:
                        return
            at = end
            line.feed(answer)

    return play


def whole_request(data: bytes, at: int) -> int:
    """Where the request at `at` ends; 0: it is not whole. A reading of its own, as simple as a server's may be."""
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        return 0
    head = data[at:end].lower()
    end += 4
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            end += int(value)
        if name == b"transfer-encoding":
            last = data.find(b"0\r\n\r\n", end)
            return 0 if last < 0 else last + 5
    return end if len(data) >= end else 0


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def policy_of(*rules: dict[str, Any], credentials: list[dict[str, Any]] | None = None, **more: Any) -> Policy:
    """A policy of one document, read as any other."""
    document: dict[str, Any] = {"version": 1, "rules": list(rules), **more}
    if credentials:
        document["credentials"] = credentials
    return compile_policy([TieredDocument(tier="sandbox", name="test", document=load(json.dumps(document), NOW))])


def rule(rule_id: str = "all", host: str = HOST, **more: Any) -> dict[str, Any]:
    """A rule that lets all methods and paths of a host pass."""
    made: dict[str, Any] = {"id": rule_id, "to": {"hosts": [host]}, "protocol": "http"}
    made["http"] = {"allow": [{"methods": ["*"], "paths": ["/**"]}]}
    return {**made, **more}


ALL = rule()


class Played:
    """A client's connection, served."""

    def __init__(self, flow: PlayedFlow) -> None:
        self.flow = flow
        self.client = PlayedStream()
        self.serving = asyncio.get_running_loop().create_task(HttpSession().serve(self.client, flow))

    async def ended(self) -> None:
        """Waits until the connection is over."""
        async with asyncio.timeout(WITHIN):
            await asyncio.shield(self.serving)

    async def over(self) -> None:
        """Cleans up."""
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        await self.flow.over()


async def say(flow: PlayedFlow, *octets: bytes, end: bool = True, rounds: int = 0) -> bytes:
    """Sends octets over one connection, and returns what came back until it was over. It ends after so many rounds of the loop."""
    played = Played(flow)
    try:
        for piece in octets:
            played.client.feed(piece)
        for _ in range(rounds):
            await asyncio.sleep(0)
        if end:
            played.client.feed_end()
        await played.ended()
        return bytes(played.client.written)
    finally:
        await played.over()
