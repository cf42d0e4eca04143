"""A guest agent and a node's data plane as real processes, and a client that reads events."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hatchway.domain.ids import new_id
from hatchway.wire.tokens import Signer

HERE = Path(__file__).parent
WITHIN = 60.0


@dataclass
class Event:
    """One server-sent event."""

    id: str
    name: str
    data: dict[str, object]

    @property
    def octets(self) -> bytes:
        """The output that it carries."""
        if "text" in self.data:
            return str(self.data["text"]).encode()
        return base64.b64decode(str(self.data["base64"]))


async def events(response: httpx.Response) -> AsyncIterator[Event]:
    """Parses an event stream as it comes."""
    rest = b""
    async for piece in response.aiter_raw():
        rest += piece
        *frames, rest = rest.split(b"\n\n")
        for frame in frames:
            parts = dict(line.split(b": ", 1) for line in frame.split(b"\n"))
            yield Event(parts.get(b"id", b"").decode(), parts[b"event"].decode(), json.loads(parts[b"data"]))


@dataclass
class Seen:
    """What an attached client read: the streams put together, and the other events."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    others: list[Event] = field(default_factory=list)
    last_id: str = ""

    def add(self, event: Event) -> None:
        """Takes one event; output must come gapless."""
        if event.id:
            self.last_id = event.id
        if event.name in ("stdout", "stderr"):
            stream = self.stdout if event.name == "stdout" else self.stderr
            assert event.data["offset"] == len(stream)
            stream += event.octets
        elif event.name != "ping":
            self.others.append(event)

    @property
    def names(self) -> list[str]:
        """Names of the events that are not output."""
        return [event.name for event in self.others]

    def the(self, name: str) -> dict[str, object]:
        """Data of the one event of this name."""
        (data,) = [event.data for event in self.others if event.name == name]
        return data


class Plane:
    """One sandbox's agent, one node process, one client."""

    def __init__(self, folder: Path, agent: Path, **settings: object) -> None:
        self.folder = folder
        self.sandbox_id = new_id()
        self.settings = settings
        self.agent_socket = folder / "agent.sock"
        self._agent_binary = agent
        self._numbers = 0
        self._key = Ed25519PrivateKey.generate()
        self.signer = Signer(self._key, "key-1")
        self.agent: subprocess.Popen[bytes] | None = None
        self.node: asyncio.subprocess.Process | None = None
        self.client = httpx.AsyncClient(timeout=WITHIN)

    # -- processes

    def start_agent(self) -> None:
        """Starts a guest agent on the host."""
        log = (self.folder / "agent.log").open("ab")
        self.agent = subprocess.Popen(
            [self._agent_binary, "--host-mode", self.agent_socket], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()

    async def start_node(self, *, connect: bool = True) -> None:
        """Starts a node process on the folder."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        settings = {
            "folder": str(self.folder / "sessions"),
            "sandbox_id": self.sandbox_id,
            "listen_fd": listener.fileno(),
            **self.settings,
        }
        with (self.folder / "node.log").open("ab") as log:
            self.node = await asyncio.create_subprocess_exec(
                sys.executable,
                str(HERE / "dataplane_node.py"),
                json.dumps(settings),
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                limit=2**24,
            )
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        await self._answer()
        await self.configure()
        if connect:
            await self.tell("connect", str(self.agent_socket))

    def kill_node(self) -> None:
        """Ends the node as by a power failure of it alone."""
        assert self.node is not None
        with contextlib.suppress(ProcessLookupError):
            self.node.kill()

    async def restart_node(self, *, connect: bool = True) -> None:
        """Kills the node and starts another one on the same folder."""
        assert self.node is not None
        if self.node.returncode is None:
            self.node.kill()
        await self.node.wait()
        await self.start_node(connect=connect)

    async def stop(self) -> None:
        """Ends all processes that were started, and what they started."""
        await self.client.aclose()
        if self.node is not None and self.node.returncode is None:
            self.node.kill()
            await self.node.wait()
        self.stop_agent()

    def stop_agent(self) -> None:
        """Ends the agent and what it started."""
        if self.agent is not None:
            for pid in _descendants(self.agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agent.kill()
            self.agent.wait()
            self.agent = None

    async def tell(self, command: str, argument: object = None) -> object:
        """Gives the node one command."""
        assert self.node is not None
        assert self.node.stdin is not None
        self.node.stdin.write(json.dumps([command, argument]).encode() + b"\n")
        answer = await self._answer()
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["ok"]

    async def _answer(self) -> dict[str, object]:
        assert self.node is not None
        assert self.node.stdout is not None
        async with asyncio.timeout(WITHIN):
            line = await self.node.stdout.readline()
        if not line:
            raise AssertionError((self.folder / "node.log").read_text()[-4000:])
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    async def configure(self, revoked: tuple[str, ...] = ()) -> None:
        """Pushes the key and revocations to the node."""
        public = self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        keys = [{"key_id": "key-1", "public": base64.b64encode(public).decode()}]
        await self.tell("configure", {"token_keys": keys, "revoked": list(revoked)})

    # -- sessions

    async def create(self, *argv: str, **more: object) -> "Command":
        """Creates a session."""
        self._numbers += 1
        session_id = new_id()
        spec = {
            "session_id": session_id,
            "sandbox_id": self.sandbox_id,
            "project": "project",
            "process_id": self._numbers,
            "argv": list(argv),
            "env": {"PATH": os.environ["PATH"]},
            **more,
        }
        await self.tell("create", spec)
        return Command(self, session_id)

    async def python(self, code: str, **more: object) -> "Command":
        """Creates a session that runs a Python program."""
        return await self.create(sys.executable, "-c", code, **more)

    def token(self, session_id: str | None, **more: object) -> str:
        """Signs a token."""
        claims: dict[str, object] = {
            "project": "project",
            "sandbox_id": self.sandbox_id,
            "generation": 1,
            "ttl_s": 300.0,
            **more,
        }
        return self.signer.issue(session_id=session_id, **claims)[0]  # type: ignore[arg-type]


@dataclass
class Command:
    """One session, as a client uses it."""

    plane: Plane
    id: str

    @property
    def headers(self) -> dict[str, str]:
        """With a fresh token of the session."""
        return {"authorization": f"Bearer {self.plane.token(self.id)}"}

    def url(self, verb: str) -> str:
        """The address of one of its verbs."""
        return f"{self.plane.url}/v1/sessions/{self.id}/{verb}"

    @contextlib.asynccontextmanager
    async def attach(self, **offsets: int) -> AsyncIterator[AsyncIterator[Event]]:
        """Attaches; gives the events."""
        body = {"offsets": offsets} if offsets else None
        async with self.plane.client.stream("POST", self.url("attach"), json=body, headers=self.headers) as response:
            if response.status_code != 200:
                raise AssertionError((await response.aread()).decode())
            yield events(response)

    async def run(self, seen: Seen | None = None) -> Seen:
        """Attaches, reads everything until the end."""
        seen = seen or Seen()
        async with asyncio.timeout(WITHIN), self.attach(stdout=len(seen.stdout), stderr=len(seen.stderr)) as stream:
            async for event in stream:
                seen.add(event)
        assert seen.names[-1] == "end"
        return seen

    async def run_ignoring_gaps(self) -> None:
        """Attaches and waits for the end, whatever was dropped meanwhile."""
        async with asyncio.timeout(WITHIN), self.attach() as stream:
            names = [event.name async for event in stream]
        assert names[-1] == "end"

    async def post(self, verb: str, **more: object) -> httpx.Response:
        """Posts to one of its verbs."""
        return await self.plane.client.post(self.url(verb), headers=self.headers, **more)  # type: ignore[arg-type]

    async def output(self, **params: object) -> httpx.Response:
        """Reads raw octets until the answer ends."""
        return await self.plane.client.get(self.url("output"), headers=self.headers, params=params)  # type: ignore[arg-type]

    async def status(self) -> dict[str, object]:
        """What the node says of it."""
        status = await self.plane.tell("get", self.id)
        assert isinstance(status, dict)
        return status


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found
