"""A stand-in for API and data plane of one sandbox's files, terminals and ports, as hostile or broken as a test says."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.sync.server import Server, ServerConnection, serve

SANDBOX = "b" * 20
SESSION = "s" * 20


@dataclass
class Asked:
    """A request for files that came."""

    method: str
    verb: str
    query: dict[str, str]
    headers: dict[str, str]
    token: str
    body: bytes
    whole: bool
    """Whether the body came to its end."""


@dataclass
class Answer:
    """What is answered: `length` is what is announced (None: chunks), and with `cut` the connection ends behind the content."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = -1
    cut: bool = False


def problem(status: int, code: str) -> Answer:
    """A problem document."""
    body = json.dumps({"status": status, "code": code, "cause": f"Refused: {code}.", "remedy": "None."}).encode()
    return Answer(body, status, {"Content-Type": "application/problem+json"})


def entry(path: str, kind: str = "file", size: int = 0, **more: Any) -> dict[str, Any]:
    """What is told of a file."""
    name = path.rsplit("/", 1)[-1]
    return {"path": path, "name": name, "type": kind, "size": size, "mode": 0o644, "mtime_ns": 0, **more}


def told(value: object, status: int = 200) -> Answer:
    """JSON."""
    return Answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


Script = Callable[[Asked], Answer]
Wire = Callable[[ServerConnection], None]


class PlaceDouble:
    """`url` is where it listens; `asked` are the requests for files."""

    def __init__(self, script: Script | None = None, wire: Wire | None = None) -> None:
        self.script = script or (lambda _asked: problem(404, "unknown_path"))
        self.wire = wire
        self.asked: list[Asked] = []
        self.tokens = 0
        self.first_good = 1
        """Tokens with a smaller number are refused."""
        self.paths: list[str] = []
        """Where WebSockets were opened."""
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                double.serve(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *_args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.sockets: Server = serve(self._wire, "127.0.0.1", 0, process_request=self._admit)
        self.sockets_url = f"http://127.0.0.1:{self.sockets.socket.getsockname()[1]}"

    def good(self, token: str) -> bool:
        """Whether a token is taken."""
        number = token.removeprefix("Bearer token-")
        return number.isdigit() and int(number) >= self.first_good

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers one request."""
        parts = urlsplit(handler.path)
        body, whole = _body(handler)
        if match := re.fullmatch(rf"/v1/sandboxes/{SANDBOX}/files/(\w+)", parts.path):
            query = {
                name: value[0]
                for name, value in parse_qs(parts.query, errors="surrogateescape", encoding="latin-1").items()
            }
            headers = {name.lower(): value for name, value in handler.headers.items()}
            asked = Asked(handler.command, match[1], query, headers, headers.get("authorization", ""), body, whole)
            self.asked.append(asked)
            answer = self.script(asked) if self.good(asked.token) else problem(401, "token_expired")
        elif parts.path.endswith("/tokens"):
            self.tokens += 1
            base = self.sockets_url if json.loads(body)["scopes"] == ["ports"] else self.url
            answer = told(
                {
                    "token": f"token-{self.tokens}",
                    "expires_at": 2e9,
                    "data_plane_url": base,
                    "port_url": "http://{port}-x.localhost:1",
                },
                201,
            )
        elif parts.path.endswith(("/sessions", f"/sessions/{SESSION}/token")):
            self.tokens += 1
            access = {"attach_url": f"{self.sockets_url}/v1/sessions/{SESSION}/attach", "token": f"token-{self.tokens}"}
            answer = told({"session": {"id": SESSION, "sandbox_id": SANDBOX, **access}}, 201)
        else:
            answer = told({"sandbox": {"id": SANDBOX, "state": "running"}})
        _send(handler, answer)

    def _admit(self, connection: ServerConnection, request: Any) -> Any:
        if self.good(request.headers.get("Authorization", "")):
            return None
        refused = problem(401, "token_expired")
        return connection.respond(401, refused.content.decode())

    def _wire(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.paths.append(connection.request.path)
        if self.wire is not None:
            self.wire(connection)


def _body(handler: BaseHTTPRequestHandler) -> tuple[bytes, bool]:
    if handler.headers.get("Transfer-Encoding") == "chunked":
        pieces = []
        while (line := handler.rfile.readline()) and (size := int(line, 16)):
            pieces.append(handler.rfile.read(size))
            handler.rfile.readline()
        handler.rfile.readline()
        return b"".join(pieces), bool(line)
    length = int(handler.headers.get("Content-Length", "0"))
    body = handler.rfile.read(length)
    return body, len(body) == length


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    if answer.length is None:
        handler.send_header("Transfer-Encoding", "chunked")
    else:
        handler.send_header("Content-Length", str(len(answer.content) if answer.length < 0 else answer.length))
    handler.end_headers()
    if answer.length is None:
        if answer.content:
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(answer.content), answer.content))
        if not answer.cut:
            handler.wfile.write(b"0\r\n\r\n")
    else:
        handler.wfile.write(answer.content)
    handler.close_connection = answer.cut


@contextmanager
def double(script: Script | None = None, wire: Wire | None = None) -> Iterator[PlaceDouble]:
    """A double that serves until the end of the block."""
    made = PlaceDouble(script, wire)
    threads = [
        threading.Thread(target=made.http.serve_forever, args=(0.02,), daemon=True),
        threading.Thread(target=made.sockets.serve_forever, daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        made.http.shutdown()
        made.http.server_close()
        made.sockets.shutdown()
        for thread in threads:
            thread.join(10)
