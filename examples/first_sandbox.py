#!/usr/bin/env python3
"""A first sandbox, with nothing but Python's standard library.

It makes a virtual machine over HTTP, runs two commands in it while showing what they print, and deletes it:

    hatchway up --detach
    python3 examples/first_sandbox.py

Read it from the bottom up: `tour` is the story, the functions above are its vocabulary.

A sandbox outlives the program that made it. Therefore everything that is needed to find it again is written into a folder
(`--state`, by default ./first-sandbox-state) before it is needed: stop this program with Ctrl-C, or kill it, and
run it again: it goes on with the same sandbox and the same commands where it was. `transcript.jsonl` in that folder keeps every
request and every event.

    --cleanup   only delete what an earlier run left behind
    --yes       do not ask before deleting
"""

import argparse
import base64
import contextlib
import http.client
import json
import os
import signal
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# ---- Where is the service, and what is the key? ---------------------------------------------------------------------


def find_service() -> tuple[str, str]:
    """Returns URL and key: from the environment, else from the files that `hatchway up` wrote into its data folder."""
    if os.environ.get("HATCHWAY_DATA_DIR"):
        folder = Path(os.environ["HATCHWAY_DATA_DIR"])
    elif os.geteuid() == 0:
        folder = Path("/var/lib/hatchway")
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hatchway"
    url = os.environ.get("HATCHWAY_URL")
    key = os.environ.get("HATCHWAY_API_KEY")
    if not url and (folder / "endpoint.json").exists():
        url = json.loads((folder / "endpoint.json").read_text())["api"]
    if not key and (folder / "dev.key").exists():
        key = (folder / "dev.key").read_text().strip()
    if not key:
        sys.exit("error: no key found. Start the service with `hatchway up --detach`, or set HATCHWAY_API_KEY.")
    return (url or "http://127.0.0.1:7070").rstrip("/"), key


# ---- What survives this program -------------------------------------------------------------------------------------


class State:
    """A small JSON file, and a transcript beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # the tokens of sessions are in it
        self.file = folder / "state.json"
        self.values: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def set(self, **values: Any) -> None:
        """Remembers `values`: writes the file anew and puts it into place at once, so that it is never half written."""
        self.values.update(values)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(self.values, indent=2) + "\n")
        fresh.replace(self.file)

    def clear(self) -> None:
        """Forgets everything but the transcript."""
        self.values = {}
        self.file.unlink(missing_ok=True)

    def note(self, kind: str, **fields: object) -> None:
        """Adds a line to the transcript."""
        with (self.folder / "transcript.jsonl").open("a") as transcript:
            transcript.write(json.dumps({"time": time.time(), "kind": kind, **fields}) + "\n")


# ---- HTTP -----------------------------------------------------------------------------------------------------------


class Problem(Exception):
    """The service said no. Its answer is an RFC 9457 problem document: a code, the cause, and what to do about it."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            self.document = json.loads(body)
        except ValueError:
            self.document = {"code": "bad_answer", "cause": f"status {status}: {body[:200]!r}"}
        self.status = status
        self.code = str(self.document.get("code"))
        super().__init__(f"{self.document.get('cause')}\n  code: {self.code}\n  remedy: {self.document.get('remedy')}")


def connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Returns a connection for `url`; it is opened by the first request."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def open_request(
    method: str, url: str, token: str, body: object = None, headers: dict[str, str] | None = None, timeout_s: float = 60
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends a request and returns the answer with its body still unread. Raises `Problem` for an error."""
    connection = connect(url, timeout_s)
    parts = urllib.parse.urlsplit(url)
    content = None if body is None else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {token}", **({} if body is None else {"Content-Type": "application/json"})}
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(method, target, body=content, headers={**sent, **(headers or {})})
        answer = connection.getresponse()
        if answer.status >= 400:
            raise Problem(answer.status, answer.read())
    except BaseException:
        connection.close()
        raise
    return connection, answer


class Service:
    """The API of the control plane."""

    def __init__(self, url: str, key: str, state: State) -> None:
        self.url = url
        self.key = key
        self.state = state

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """One request, one JSON answer.

        A service that is just restarting is waited for. Asking again is safe for everything that this program asks: what
        makes something carries an `Idempotency-Key`, and the rest does nothing the second time.
        """
        for pause in (0.1, 0.2, 0.5, 1, 2, None):
            try:
                connection, answer = open_request(method, self.url + path, self.key, body, headers)
                with contextlib.closing(connection):
                    content = answer.read()
                self.state.note("call", method=method, path=path, status=answer.status)
                return dict(json.loads(content)) if content else {}
            except (OSError, http.client.HTTPException) as error:
                if pause is None:
                    sys.exit(f"error: nobody answers at {self.url}: {error}\n  remedy: hatchway up --detach")
                time.sleep(pause)
        raise AssertionError("the last attempt returns or ends")


# ---- A sandbox ------------------------------------------------------------------------------------------------------


def create_sandbox(service: Service, state: State) -> str:
    """Makes a sandbox and returns its id once it runs; the one of an earlier run, if there is one."""
    if "create_key" not in state.values:
        # Written down before it is used: should we die before the answer, the same key gets us the same sandbox.
        state.set(create_key=uuid.uuid4().hex)
    if "sandbox" not in state.values:
        accepted = service.call(
            "POST",
            "/v1/sandboxes",
            {"template": "seed:latest", "metadata": {"made-by": "first_sandbox.py"}},
            {"Idempotency-Key": state.values["create_key"]},
        )
        # 202 means that the request was stored, not that the machine runs. The operation says how far it is.
        state.set(sandbox=accepted["sandbox"]["id"], operation=accepted["operation"]["id"])
    say(f"sandbox {state.values['sandbox']} was asked for, operation {state.values['operation']}")
    wait_for_operation(service, state.values["operation"])
    sandbox = service.call("GET", f"/v1/sandboxes/{state.values['sandbox']}")["sandbox"]
    say(
        f"it is {sandbox['state']}: {sandbox['vcpus']} vCPU, {sandbox['memory_mib']} MiB, isolation {sandbox['isolation']}"
    )
    return str(sandbox["id"])


def wait_for_operation(service: Service, operation_id: str) -> None:
    """Asks for an operation until it has ended."""
    while True:
        operation = service.call("GET", f"/v1/operations/{operation_id}")["operation"]
        if operation["status"] == "succeeded":
            return
        if operation["status"] in ("failed", "cancelled"):
            error = operation["error"] or {"cause": f"it was {operation['status']}", "code": "", "remedy": ""}
            sys.exit(f"error: {error['cause']}\n  code: {error['code']}\n  remedy: {error['remedy']}")
        time.sleep(0.1)


def delete_sandbox(service: Service, state: State) -> None:
    """Deletes the sandbox and waits for the end; works from every state, and again."""
    if "create_key" in state.values and "sandbox" not in state.values:
        # We were killed while asking. Asking again tells the id of what there is to delete.
        create_sandbox(service, state)
    sandbox_id = state.values.get("sandbox")
    if sandbox_id is not None:
        try:
            accepted = service.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
            wait_for_operation(service, accepted["operation"]["id"])
            say(f"sandbox {sandbox_id} is deleted")
        except Problem as problem:
            if problem.status != 404:
                raise
            say(f"sandbox {sandbox_id} is gone already")
    state.clear()


# ---- A command in it ------------------------------------------------------------------------------------------------


def run_command(service: Service, state: State, name: str, sandbox_id: str, argv: list[str]) -> int:
    """Runs a command and shows what it prints; returns its exit code. `name` tells it apart in the state file."""
    command: dict[str, Any] = state.values.setdefault(name, {"key": uuid.uuid4().hex})
    state.set()
    if "session" not in command:
        # This makes the session: an id, where to attach, and a token for this session alone. Nothing runs yet.
        answer = service.call(
            "POST",
            f"/v1/sandboxes/{sandbox_id}/sessions",
            {"argv": argv, "stdin": False},
            {"Idempotency-Key": command["key"]},
        )
        command.update(session=answer["session"])
        state.set()
    say(f"session {command['session']['id']}: {' '.join(argv)}")
    while "ended" not in command:
        try:
            # Attaching starts the process, the first time; after that it shows what came since the event we saw last.
            follow(state, command)
        except Problem as problem:
            if problem.status != 401:
                raise
            # Tokens are short-lived. The API key gets a fresh one.
            session_id = command["session"]["id"]
            command["session"].update(service.call("POST", f"/v1/sessions/{session_id}/token")["session"])
        except (OSError, http.client.HTTPException) as error:
            say(f"the stream broke ({error}); attaching again")
            time.sleep(0.2)
        state.set()
    ended = command["exit"]
    say(f"it ended: {ended['reason']}, code {ended['code']}")
    return int(ended["code"]) if ended["code"] is not None else 125


def follow(state: State, command: dict[str, Any]) -> None:
    """Attaches to a session and shows its events until the connection or the session ends."""
    session = command["session"]
    headers = {"Accept": "text/event-stream"}
    if "last_event_id" in command:
        headers["Last-Event-ID"] = command["last_event_id"]
    # The service says something every 15 s at least, so a silence of 45 s means that the connection is dead.
    connection, answer = open_request("POST", session["attach_url"], session["token"], None, headers, timeout_s=45)
    with contextlib.closing(connection):
        for name, event_id, data in server_sent_events(answer):
            hold_interrupts(True)
            state.note("event", session=session["id"], name=name, id=event_id, data=data)
            if name in ("stdout", "stderr"):
                # Text where it is UTF-8, base64 where it is not.
                octets = data["text"].encode() if "text" in data else base64.b64decode(data["base64"])
                stream = sys.stdout.buffer if name == "stdout" else sys.stderr.buffer
                stream.write(octets)
                stream.flush()
            elif name == "gap":
                say(f"lost: {data['stream']} from {data['from']} to {data['to']}")
            elif name == "exit":
                command["exit"] = data
            elif name == "end":
                command["ended"] = True
            if event_id:
                # Remembered after it was shown, so that a new run begins right behind it.
                command["last_event_id"] = event_id
            state.set()
            hold_interrupts(False)
            if name == "end":
                return
    raise ConnectionError("it ended in the middle")


def hold_interrupts(held: bool) -> None:
    """While it holds, Ctrl-C waits: what was shown and what is remembered as shown must not come apart."""
    signal.pthread_sigmask(signal.SIG_BLOCK if held else signal.SIG_UNBLOCK, {signal.SIGINT})


def server_sent_events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str, Any]]:
    """Yields name, id and data of each event: `field: value` lines, an empty line after each event."""
    name, event_id, data = "message", "", ""
    for raw in answer:
        line = raw.decode().rstrip("\r\n")
        if line == "":
            if data:
                yield name, event_id, json.loads(data)
            name, data = "message", ""
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data += line.removeprefix("data: ")


# ---- The story ------------------------------------------------------------------------------------------------------

FIRST = """
import platform, time
print("Hello from", platform.node(), "with kernel", platform.release(), flush=True)
for n in range(1, 4):
    print(n, "squared is", n * n, flush=True)
    time.sleep(0.3)
open("note.txt", "w").write("I was written by the first command.\\n")
"""


def tour(service: Service, state: State) -> None:
    """Makes a sandbox and runs two commands in it."""
    sandbox_id = create_sandbox(service, state)
    if run_command(service, state, "first", sandbox_id, ["python3", "-c", FIRST.strip()]) != 0:
        sys.exit("error: the first command failed")
    # A sandbox is a machine of its own that stays: the second command finds what the first one left.
    if run_command(service, state, "second", sandbox_id, ["cat", "note.txt"]) != 0:
        sys.exit("error: the second command failed")


def say(text: str) -> None:
    """Shows a line of our own, apart from what the commands print."""
    print(f"--- {text}", file=sys.stderr, flush=True)


def agreed(question: str) -> bool:
    """Asks; nobody there to answer means no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="A first sandbox, with Python's standard library alone.")
    parser.add_argument(
        "--state", type=Path, default=Path("first-sandbox-state"), help="where to keep what must survive"
    )
    parser.add_argument("--cleanup", action="store_true", help="only delete what an earlier run left behind")
    parser.add_argument("--yes", action="store_true", help="delete at the end without asking")
    arguments = parser.parse_args()
    url, key = find_service()
    state = State(arguments.state)
    service = Service(url, key, state)
    later = f"go on: run this again; delete the sandbox: {sys.argv[0]} --state {arguments.state} --cleanup"
    try:
        if arguments.cleanup:
            delete_sandbox(service, state)
            return 0
        if "sandbox" in state.values:
            say(f"going on with the sandbox of an earlier run: {state.values['sandbox']}")
        tour(service, state)
        if arguments.yes or agreed("Delete the sandbox?"):
            delete_sandbox(service, state)
        else:
            say(f"the sandbox stays. To {later}")
        return 0
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        say(f"To {later}")
        return 1
    except KeyboardInterrupt:
        say(f"stopped. To {later}")
        return 130


if __name__ == "__main__":
    sys.exit(main())
