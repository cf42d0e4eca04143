"""E2B's API and the agent of a sandbox as their wire has them, for tests: plain HTTP and the Connect protocol, no SDK."""

import base64
import contextlib
import json
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from hatchway.client import Hatchway

WITHIN = 180.0
Event = dict[str, Any]


def frame(message: object, flags: int = 0) -> bytes:
    """One message of a stream."""
    octets = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(octets)) + octets


class Stream:
    """An answer in messages. `end` is what the last frame said, None where the answer was cut off."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.end: Event | None = None
        self._pieces = response.iter_raw()
        self._octets = b""

    def __iter__(self) -> Iterator[Event]:
        while (found := self._next()) is not None:
            flags, message = found
            if flags & 2:
                self.end = message
                return
            yield message

    def next(self) -> Event:
        """The next message."""
        return next(iter(self))

    def rest(self) -> list[Event]:
        """All that comes."""
        return list(self)

    def _next(self) -> tuple[int, Event] | None:
        while True:
            if len(self._octets) >= 5:
                flags, size = struct.unpack_from(">BI", self._octets)
                if len(self._octets) >= 5 + size:
                    message = json.loads(self._octets[5 : 5 + size])
                    self._octets = self._octets[5 + size :]
                    return flags, message
            piece = next(self._pieces, None)
            if piece is None:
                return None
            self._octets += piece


@dataclass
class Ended:
    """What a command told."""

    events: list[Event]
    error: Event | None

    def output(self, stream: str = "stdout") -> str:
        found = [event["data"].get(stream, "") for event in self.events if "data" in event]
        return b"".join(map(base64.b64decode, found)).decode()

    @property
    def pid(self) -> int:
        return int(self.events[0]["start"]["pid"])

    @property
    def end(self) -> Event:
        assert self.error is None, self.error
        return dict(self.events[-1]["end"])


@dataclass
class Agent:
    """The agent of one sandbox."""

    url: str
    sandbox_id: str
    token: str | None
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": "49983"}
        if self.token is not None:
            headers["X-Access-Token"] = self.token
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=WITHIN, trust_env=False)

    def call(self, method: str, message: object, *, user: str | None = None, **headers: str) -> httpx.Response:
        """One message, one answer."""
        return self.http.post(f"/{method}", json=message, headers={**as_user(user), **headers})

    def ok(self, method: str, message: object, *, user: str | None = None) -> Event:
        answer = self.call(method, message, user=user)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def code(self, method: str, message: object, *, user: str | None = None) -> tuple[int, str]:
        """Status and code of an error."""
        answer = self.call(method, message, user=user)
        return answer.status_code, str(answer.json()["code"])

    @contextlib.contextmanager
    def stream(
        self, method: str, *messages: object, user: str | None = None, headers: dict[str, str] | None = None
    ) -> Iterator[Stream]:
        """A stream, closed at the end of the block."""
        sent = {"Content-Type": "application/connect+json", **as_user(user), **(headers or {})}
        with self.http.stream("POST", f"/{method}", content=b"".join(map(frame, messages)), headers=sent) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"] == "application/connect+json"
            yield Stream(answer)

    def start(self, command: str, *, timeout_ms: int = 0, user: str | None = None, **more: Any) -> Any:
        """A command's stream; as SDKs start one."""
        message = started(command, **more)
        return self.stream("process.Process/Start", message, user=user, headers=deadline(timeout_ms))

    def run(self, command: str, *, timeout_ms: int = 0, user: str | None = None, **more: Any) -> Ended:
        """A command to its end."""
        with self.start(command, timeout_ms=timeout_ms, user=user, **more) as stream:
            events = [message["event"] for message in stream]
            assert stream.end is not None
            return Ended(events, stream.end.get("error"))


def started(command: str, *, cwd: str | None = None, envs: dict[str, str] | None = None, **more: Any) -> Event:
    process: Event = {"cmd": "/bin/bash", "args": ["-l", "-c", command], "envs": envs or {}}
    if cwd is not None:
        process["cwd"] = cwd
    return {"process": process, "stdin": False, **more}


def deadline(timeout_ms: int) -> dict[str, str]:
    return {"Connect-Timeout-Ms": str(timeout_ms)} if timeout_ms else {}


def as_user(user: str | None) -> dict[str, str]:
    return {} if user is None else {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


@dataclass
class Cloud:
    """E2B's API of a service, with a key of its own."""

    url: str
    key: str

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"X-API-KEY": self.key}, timeout=WITHIN, trust_env=False)

    def create(self, **more: Any) -> Agent:
        answer = self.http.post("/v2/sandboxes", json={"templateID": "base", "timeout": 3600, **more})
        assert answer.status_code == 201, answer.text
        made = answer.json()
        return Agent(self.url, made["sandboxID"], made.get("envdAccessToken"))

    def kill(self, agent: Agent) -> None:
        assert self.http.delete(f"/sandboxes/{agent.sandbox_id}").status_code in (204, 404)


def key_of(client: Hatchway) -> str:
    """A new key in E2B's form."""
    return client.keys.create("e2b-tests", e2b=True).key


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
