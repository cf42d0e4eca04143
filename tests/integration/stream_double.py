"""A stand-in for API and data plane whose connections break where a test says.

It keeps to the protocol of sessions: offsets, `Last-Event-ID`, tokens that expire, input that is taken once. What it cannot
do is run anything: the output of its one command is given beforehand.
"""

import base64
import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

SESSION = "s" * 20
SANDBOX = "b" * 20


class Cut(Exception):
    """The connection ends here."""


@dataclass
class Seen:
    """One request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """What the double does."""

    stdout: bytes = b""
    stderr: bytes = b""
    piece: int = 1000
    """Octets of output in one event."""
    cuts: list[int] = field(default_factory=list)
    """For each attach in turn, after how many octets of the answer's body the connection is cut; then never more."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """For each attach in turn, status and code of a refusal instead; taken before `cuts`."""
    expired_tokens: int = 0
    """How many tokens are handed out that no listener takes."""
    kept_from: int = 0
    """Octets of stdout before this one were dropped."""
    stdin_cuts: int = 0
    """How many input requests are taken and then not answered."""
    until: str = ""
    """What the command runs until: `stdin` has ended, or the signal of this name came."""
    creates_unanswered: int = 0
    """How many creates are done and then not answered."""
    archive_refusal: str = ""
    """The code that uploads of archives are refused with."""
    operation_polls: int = 0
    """How often an operation is still running when it is asked for."""
    operation_error: dict[str, str] | None = None
    end: dict[str, Any] = field(default_factory=lambda: {"reason": "exited", "code": 0, "signal": None})


class StreamDouble:
    """Use it as a context manager; `url` is where it listens."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.stdin = b""
        self.stdin_ended = False
        self.created: dict[str, str] = {}
        self.deleted: list[str] = []
        self.archives: dict[str, bytes] = {}
        self.signals: list[str] = []
        self._tokens = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._open: set[socket.socket] = set()

    def __enter__(self) -> "StreamDouble":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            connection.close()
        self._thread.join(5)

    def requests(self, pattern: str) -> list[Seen]:
        """The requests whose method and path match `pattern` as a whole."""
        return [seen for seen in self.seen if re.fullmatch(pattern, f"{seen.method} {seen.path}")]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rwb")
        try:
            while (line := stream.readline()) not in (b"", b"\r\n"):
                method, target, _ = line.decode().split()
                headers: dict[str, str] = {}
                while (header := stream.readline()) not in (b"", b"\r\n"):
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                chunked = headers.get("transfer-encoding") == "chunked"
                body = _chunks(stream) if chunked else stream.read(int(headers.get("content-length", "0")))
                with self._lock:
                    self.seen.append(Seen(method, target, headers, body))
                self._answer(method, target, headers, body, stream)
                stream.flush()
        except Cut:
            with contextlib.suppress(OSError):
                stream.flush()
        except (OSError, ValueError):
            pass
        finally:
            self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes, out: BinaryIO) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        script = self.script
        match (method, parts.path.split("/")[2:]):
            case ("POST", ["sandboxes"]):
                key = headers["idempotency-key"]
                self.created.setdefault(key, SANDBOX)
                if script.creates_unanswered > 0:
                    script.creates_unanswered -= 1
                    raise Cut
                self._json(out, 202, {"sandbox": self._sandbox("pending"), "operation": self._operation()})
            case ("GET", ["sandboxes", _]):
                self._json(out, 200, {"sandbox": self._sandbox("running")})
            case ("DELETE", ["sandboxes", name]):
                self.deleted.append(name)
                self._json(
                    out, 200, {"sandbox": self._sandbox("deleted"), "operation": self._operation("delete", True)}
                )
            case ("GET", ["operations", _]):
                self._json(out, 200, {"operation": self._operation()})
            case ("POST", ["sandboxes", _, "tokens"]):
                self._json(out, 201, {"token": "files", "expires_at": 2e9, "data_plane_url": self.url})
            case ("PUT", ["sandboxes", _, "files", "archive"]) if script.archive_refusal:
                self._problem(out, 507, script.archive_refusal)
            case ("PUT", ["sandboxes", _, "files", "archive"]):
                self.archives[query["path"]] = body
                self._json(out, 200, {"files": 1, "dirs": 0, "links": 0, "bytes": 0, "skipped": 0})
            case ("POST", ["sandboxes", _, "sessions"]):
                self._json(out, 201, {"session": self._session()})
            case ("GET", ["sessions", _]):
                self._json(out, 200, {"session": self._session()})
            case ("POST", ["sessions", _, "token"]):
                self._json(out, 200, {"session": self._session()})
            case (_, ["sessions", _, *_]) if not self._admitted(headers):
                self._problem(out, 401, "token_expired")
            case ("POST", ["sessions", _, "attach"]):
                self._attach(headers, body, out)
            case ("GET", ["sessions", _, "output"]):
                self._output(query, out)
            case ("POST", ["sessions", _, "stdin"]):
                self._take(query, body)
                self._json(out, 200, {"offset": len(self.stdin)})
            case ("POST", ["sessions", _, "signal"]):
                with self._changed:
                    self.signals.append(json.loads(body)["signal"])
                    self._changed.notify_all()
                self._json(out, 200, {"delivered": True})
            case _:
                self._problem(out, 404, "unknown_path")

    def _sandbox(self, state: str) -> dict[str, Any]:
        return {"id": SANDBOX, "state": state, "template": "seed:latest", "metadata": {}}

    def _operation(self, kind: str = "create", done: bool = False) -> dict[str, Any]:
        running = not done and self.script.operation_polls > 0
        if running:
            self.script.operation_polls -= 1
        error = None if running or done else self.script.operation_error
        status = "running" if running else "failed" if error else "succeeded"
        return {"id": "o" * 20, "kind": kind, "target": SANDBOX, "status": status, "phase": "", "error": error}

    def _session(self) -> dict[str, Any]:
        self._tokens += 1
        return {
            "id": SESSION,
            "state": "created",
            "process_id": 1,
            "attach_url": f"{self.url}/v1/sessions/{SESSION}/attach",
            "token": f"token-{self._tokens}",
        }

    def _admitted(self, headers: dict[str, str]) -> bool:
        number = headers.get("authorization", "").removeprefix("Bearer token-")
        return number.isdigit() and int(number) > self.script.expired_tokens

    def _attach(self, headers: dict[str, str], body: bytes, out: BinaryIO) -> None:
        script = self.script
        if script.refusals:
            status, code = script.refusals.pop(0)
            self._problem(out, status, code)
            return
        limit = script.cuts.pop(0) if script.cuts else None
        place = {"stdout": 0, "stderr": 0}
        if event_id := headers.get("last-event-id"):
            _, place["stdout"], place["stderr"] = map(int, event_id.split("."))
        elif body:
            place = json.loads(body)["offsets"]
        answer = bytearray()

        def event(name: str, data: dict[str, Any]) -> None:
            at = f"1.{place['stdout']}.{place['stderr']}"
            answer.extend(f"id: {at}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode())

        event("started", {"pid": 42})
        out.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if script.until:
            out.write(b"%x\r\n%b\r\n" % (len(answer), answer))
            out.flush()
            answer.clear()
            with self._changed:
                self._changed.wait_for(self._is_over, 30)
        if place["stdout"] < script.kept_from:
            lost, place["stdout"] = place["stdout"], script.kept_from
            event("gap", {"stream": "stdout", "from": lost, "to": script.kept_from})
        for stream, content in (("stdout", script.stdout), ("stderr", script.stderr)):
            while place[stream] < len(content):
                offset = place[stream]
                piece = content[offset : offset + script.piece]
                place[stream] += len(piece)
                event(stream, {"offset": offset, "base64": base64.b64encode(piece).decode()})
        sizes = {"stdout_bytes": len(script.stdout), "stderr_bytes": len(script.stderr)}
        event("exit", {**script.end, **sizes})
        event("end", sizes)
        whole = bytes(answer)
        sent = whole if limit is None else whole[:limit]
        if sent:
            out.write(b"%x\r\n%b\r\n" % (len(sent), sent))
        if limit is not None:
            raise Cut
        out.write(b"0\r\n\r\n")

    def _is_over(self) -> bool:
        return self.stdin_ended if self.script.until == "stdin" else self.script.until in self.signals

    def _output(self, query: dict[str, str], out: BinaryIO) -> None:
        script = self.script
        at = int(query["from"])
        content = script.stdout if query["stream"] == "stdout" else script.stderr
        if query["stream"] == "stdout" and at < script.kept_from:
            self._problem(out, 410, "output_dropped")
            return
        out.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nHatchway-Offset: %d\r\n\r\n" % at)
        limit = script.cuts.pop(0) if script.cuts else None
        sent = content[at:] if limit is None else content[at : at + limit]
        if sent:
            out.write(b"%x\r\n%b\r\n" % (len(sent), sent))
        if limit is not None:
            raise Cut
        out.write(b"0\r\n\r\n")

    def _take(self, query: dict[str, str], body: bytes) -> None:
        offset = int(query.get("offset", len(self.stdin)))
        assert offset <= len(self.stdin)
        self.stdin += body[len(self.stdin) - offset :]
        with self._changed:
            self.stdin_ended = self.stdin_ended or query.get("eof") == "1"
            self._changed.notify_all()
        if self.script.stdin_cuts > 0:
            self.script.stdin_cuts -= 1
            raise Cut

    def _json(self, out: BinaryIO, status: int, content: object, kind: str = "application/json") -> None:
        body = json.dumps(content).encode()
        out.write(
            b"HTTP/1.1 %d -\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, kind.encode(), len(body))
        )
        out.write(body)

    def _problem(self, out: BinaryIO, status: int, code: str) -> None:
        content = {"status": status, "code": code, "cause": f"Refused: {code}.", "remedy": "None."}
        self._json(out, status, content, "application/problem+json")


def _chunks(stream: BinaryIO) -> bytes:
    pieces = []
    while size := int(stream.readline(), 16):
        pieces.append(stream.read(size))
        stream.readline()
    stream.readline()
    return b"".join(pieces)
