"""Which session of a sandbox a process of E2B's is: found by pid or tag through API v1, so that it is found after any restart.

Sessions that were started here carry `MARK` in their metadata; others are not shown. What is kept in memory saves questions and
decides nothing.
"""

import time
from collections import OrderedDict
from contextlib import aclosing

from hatchway.client import SessionInfo
from hatchway.client.aio import AsyncSandbox, AsyncSession
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.messages import Message

MARK = "e2b"
TAG = "e2b.tag"
MAX_TAG = 512
"""Characters of a tag: what a value of a session's metadata may have."""
RETAIN_S = 30.0
"""How long a process that ended is still found by who connects to it."""
MAX_KEPT = 4096
LIVING = ("running", "exited")
"""States of a session whose process runs, or whose streams are held open by what it left behind."""


def metadata(tag: str | None) -> dict[str, str]:
    """What a session that is started here carries. Raises `ConnectError`."""
    if tag is None:
        return {MARK: "process"}
    if len(tag) > MAX_TAG:
        raise ConnectError("invalid_argument", f"tag is longer than {MAX_TAG} characters")
    return {MARK: "process", TAG: tag}


class Processes:
    """The processes of all sandboxes."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], AsyncSession] = OrderedDict()

    async def running(self, sandbox: AsyncSandbox) -> list[SessionInfo]:
        """Those whose command has not ended, with their environment."""
        listing = sandbox.sessions(state="running", metadata={MARK: "process"}, live=True, env=True)
        return [info async for info in listing]

    async def find(self, sandbox: AsyncSandbox, selector: Message) -> SessionInfo:
        """The process that a selector names: the one that runs, else the one that ended last. Raises `ConnectError`."""
        which = selector.one_of("pid", "tag")
        if which == "pid":
            pid = selector.unsigned("pid") or 0
            found = None if pid == 0 else await self._newest(sandbox, pid=pid)
            if found is None:
                raise ConnectError("not_found", f"process with pid {pid} not found")
            return found
        if which == "tag":
            tag = selector.text("tag") or ""
            found = None if len(tag) > MAX_TAG else await self._newest(sandbox, tag=tag)
            if found is None:
                raise ConnectError("not_found", f"process with tag {tag[:80]} not found")
            return found
        raise ConnectError("unimplemented", "invalid input type <nil>")

    def session(self, sandbox: AsyncSandbox, info: SessionInfo) -> AsyncSession:
        """The handle by which a process is written to and signalled: the same one each time, with its token."""
        key = (sandbox.id, info.id)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = sandbox.session(info)
            while len(self._sessions) > MAX_KEPT:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(key)
        return session

    async def _newest(
        self, sandbox: AsyncSandbox, *, pid: int | None = None, tag: str | None = None
    ) -> SessionInfo | None:
        wanted = {MARK: "process"} if tag is None else {MARK: "process", TAG: tag}
        ended: SessionInfo | None = None
        listing = sandbox.sessions(state="running,exited,ended", pid=pid, metadata=wanted, live=True)
        async with aclosing(listing) as infos:  # type: ignore[type-var]  # it is an async generator
            async for info in infos:
                if info.state in LIVING:
                    return info
                if ended is None and info.pid is not None and (info.retain_until or 0) > time.time():
                    ended = info
        return ended
