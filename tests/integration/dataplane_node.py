"""The sessions and the data plane of a node in a process of their own, which tests may kill.

Takes a JSON object on its command line and one command a line on its standard input; answers each with a line of JSON.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import msgspec

from hatchway.audit.client import AuditClient
from hatchway.domain.errors import HatchwayError
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.files.limits import FileLimits
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.server import DataPlaneServer
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.guest.link import connect
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.sessions.spool import SpoolLimits
from hatchway.node.sessions.surroundings import Limits
from hatchway.wire.node import Configure, SessionSpec


class Node:
    """One sandbox (a guest agent in host mode) and its sessions."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.sandbox_id = str(settings["sandbox_id"])
        self.link: GuestLink | None = None
        self.state = "running"
        self.vm_ended = asyncio.Event()
        self.tokens = TokenChecker()
        self.statuses: list[object] = []
        spool = msgspec.convert(settings.get("spool", {}), SpoolLimits)
        limits = Limits(spool=spool, followers=1100, **msgspec.convert(settings.get("waits", {}), dict[str, float]))
        self.sessions = Sessions(Path(str(settings["folder"])), self.statuses.append, limits=limits)
        self.sessions.load()
        self.plane = msgspec.convert(settings.get("plane", {}), PlaneLimits)
        self.files = msgspec.convert(settings.get("files", {}), FileLimits)

    def link_of(self, sandbox_id: str) -> GuestLink | None:
        """See `Guests`."""
        return self.link if self.state == "running" and sandbox_id == self.sandbox_id else None

    def state_of(self, sandbox_id: str) -> str | None:
        """See `Guests`."""
        return self.state if sandbox_id == self.sandbox_id else None

    def project_of(self, sandbox_id: str) -> str | None:
        """See `Guests`."""
        return "project" if sandbox_id == self.sandbox_id else None

    async def do(self, command: str, argument: object) -> object:
        """Carries out one command."""
        if command == "configure":
            self.tokens.configure(msgspec.convert(argument, Configure))
        elif command == "generation":
            self.tokens.require_generation(self.sandbox_id, int(str(argument)))
        elif command == "create":
            return msgspec.to_builtins(await self.sessions.create(msgspec.convert(argument, SessionSpec)))
        elif command == "get":
            return msgspec.to_builtins(self.sessions.get(str(argument)))
        elif command == "delete":
            await self.sessions.delete(str(argument))
        elif command == "connect":
            self.vm_ended = asyncio.Event()
            self.link = await connect(Path(str(argument)), fresh=False, vm_ended=self.vm_ended)
            await self.sessions.link_up(self.sandbox_id, self.link)
            self.state = "running"
        elif command == "state":
            self.state = str(argument)
        elif command == "lose":
            self.vm_ended.set()
            self.sessions.sandbox_lost(self.sandbox_id, str(argument))
            self.link, self.state = None, "failed"
        elif command == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * 4096
        elif command == "stop":
            await self.server.stop()
        return None

    async def run(self) -> None:
        """Serves until standard input ends."""
        sock = socket.socket(fileno=int(str(self.settings["listen_fd"])))
        domains = msgspec.convert(self.settings.get("port_domains", ["localhost"]), tuple[str, ...])
        journal = None
        if "audit" in self.settings:
            most = int(str(self.settings.get("audit_entries", 20_000)))
            journal = AuditClient(Path(str(self.settings["audit"])), "node", window_s=2.0, max_entries=most)
            journal.start()
        app = make_app(
            self.sessions,
            self.tokens,
            self,
            limits=self.plane,
            file_limits=self.files,
            port_domains=domains,
            journal=journal,
        )
        self.server = DataPlaneServer(app, [sock])
        await self.server.start()
        reader = asyncio.StreamReader(limit=2**24)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps({"ready": True}), flush=True)
        while line := await reader.readline():
            command, argument = json.loads(line)
            try:
                answer: dict[str, object] = {"ok": await self.do(command, argument)}
            except HatchwayError as error:
                answer = {"error": error.as_dict()}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(Node(json.loads(sys.argv[1])).run())
