"""Sites that speak enough HTTP/1.1 for real clients: an answer is what a function makes of a request."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fake_internet import Site


@dataclass
class Asked:
    """A request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]


@dataclass
class Answer:
    """What is answered."""

    body: bytes = b""
    kind: str = "text/plain"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Answering = Callable[[Asked], Awaitable[Answer]]


def files(tree: dict[str, tuple[str, bytes]]) -> Answering:
    """A site of files: path → media type and content."""

    async def answer(asked: Asked) -> Answer:
        found = tree.get(asked.path)
        return Answer(b"not here", status=404) if found is None else Answer(found[1], found[0])

    return answer


def serving(answering: Answering) -> Callable[[Site, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A handler of `FakeInternet.site`."""

    async def handle(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await site.note(head)
                asked = await _rest(head, reader)
                await site.note(asked.body)
                answer = await answering(asked)
                body = b"" if asked.method == "HEAD" else answer.body
                lines = [
                    f"HTTP/1.1 {answer.status} x",
                    f"Content-Type: {answer.kind}",
                    f"Content-Length: {len(answer.body)}",
                ]
                lines += [f"{name}: {value}" for name, value in answer.headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()

    return handle


async def _rest(head: bytes, reader: asyncio.StreamReader) -> Asked:
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    elif length := int(headers.get("content-length", "0")):
        body = await reader.readexactly(length)
    return Asked(method, target, headers, body)


def git_site(root: Path) -> Answering:
    """The repositories below a folder, over git's own smart HTTP."""
    backend = Path(subprocess.check_output(["git", "--exec-path"], text=True).strip()) / "git-http-backend"

    async def answer(asked: Asked) -> Answer:
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": asked.method,
            "PATH_INFO": asked.path,
            "QUERY_STRING": asked.query,
            "CONTENT_TYPE": asked.headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(asked.body)),
            "HTTP_GIT_PROTOCOL": asked.headers.get("git-protocol", ""),
            "HTTP_CONTENT_ENCODING": asked.headers.get("content-encoding", ""),
            "GIT_CONFIG_COUNT": "2",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "GIT_CONFIG_KEY_1": "http.receivepack",
            "GIT_CONFIG_VALUE_1": "true",
        }
        process = await asyncio.create_subprocess_exec(
            str(backend), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        out, _ = await process.communicate(asked.body)
        head, _, body = out.partition(b"\r\n\r\n")
        made = Answer(body)
        for line in head.decode().split("\r\n"):
            name, _, value = line.partition(": ")
            if name == "Status":
                made.status = int(value.split(" ")[0])
            elif name == "Content-Type":
                made.kind = value
        return made

    return answer
