"""The service as the host of an impostor: commands in its sandbox, and another sandbox that has to be served all the while."""

import contextlib
import json
import secrets
import time
from typing import Protocol

from hatchway.client import Hatchway, HatchwayError, Sandbox, Session
from hatchway.redteam.use import memory_mib

TAKES_OVER_S = 3.0
"""What is asked while the agent is being stopped is lost, and costs a command's whole time: nothing is asked before."""
COMMAND_WITHIN_S = 2.0
SERVED_WITHIN_S = 60.0
MOST_MIB = 96
"""How much the node's memory may grow while it is spoken to: there is other work on it."""


class Processes(Protocol):
    """The processes of the service."""

    def roles(self) -> dict[str, int]:
        """By their roles."""


class LiveHost:
    """See `impostors.Host`. `other` is another sandbox, which is deleted in the end."""

    def __init__(self, hatchway: Hatchway, service: Processes, sandbox: Sandbox, other: Sandbox) -> None:
        self._hatchway = hatchway
        self._service = service
        self._sandbox = sandbox
        self._other = other
        self._neighbours = other.start(["sleep", "1000"], stdin=False)
        self._first: Session | None = None
        self._node = service.roles()["node"]
        self._memory = memory_mib([self._node])
        time.sleep(TAKES_OVER_S)

    def command(self, *argv: str) -> str:
        """As a client runs one."""
        with contextlib.suppress(HatchwayError):
            session = self._sandbox.start(list(argv), user="root", timeout=COMMAND_WITHIN_S, stdin=False)
            ended = session.wait()
            printed = b"".join(session.output()).decode("utf-8", "replace")
            if printed and self._first is None:
                self._first = session
            return f"{printed} {ended.message}"
        return ""

    def neighbours_command(self) -> str:
        """It sleeps."""
        return self._neighbours.id

    def kept_of_first(self) -> str:
        """Its output from the beginning, and what the service says of its end."""
        return "" if self._first is None else self._kept(self._first)

    def kept_of_neighbour(self) -> str:
        """The same."""
        return self._kept(self._neighbours)

    def _kept(self, session: Session) -> str:
        with contextlib.suppress(HatchwayError):
            told = session.refresh()
            kept = b"".join(session.output(follow=False)).decode("utf-8", "replace")
            return kept + json.dumps([told.state, None if told.exit is None else told.exit.message])
        return ""

    def harm(self) -> str:
        """See `impostors.Host`."""
        word = secrets.token_hex(8)
        try:
            served = word in self._other.run(["echo", word], timeout=SERVED_WITHIN_S).stdout
        except HatchwayError:
            served = False
        if not served:
            return "the host's end: another sandbox is not served"
        if self._service.roles().get("node") != self._node:
            return "the host's end: it died"
        if (grown := memory_mib([self._node]) - self._memory) > MOST_MIB:
            return f"the host's end: {grown} MiB of memory"
        return ""

    def close(self) -> None:
        """Deletes the other sandbox."""
        with contextlib.suppress(HatchwayError):
            self._other.delete()
