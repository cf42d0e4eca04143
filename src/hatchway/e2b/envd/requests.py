"""One request for a sandbox: who asks, for which sandbox, its body within bounds, and what becomes of it when client or sandbox go."""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from hatchway.client import errors as ours
from hatchway.client.aio import AsyncSandbox
from hatchway.e2b import refusals
from hatchway.e2b.envd.connect import ConnectError, too_large
from hatchway.e2b.envd.endings import Endings
from hatchway.e2b.envd.seam import Identity, Sandboxes
from hatchway.e2b.errors import E2bError
from hatchway.e2b.held import Full, Held, Share

T = TypeVar("T")

GONE = frozenset({"unknown_sandbox", "sandbox_deleted", "sandbox_not_running", "sandbox_unreachable"})
"""Codes of API v1 that say that there is no such sandbox, that it does not run, or is out of reach."""
MAX_OF_SANDBOX = 40 * 1024 * 1024
"""Octets of messages to one sandbox that are in memory at once: the largest one, and some."""
MAX_OF_PROJECT = 128 * 1024 * 1024
MAX_HELD = 256 * 1024 * 1024
"""Of messages to all sandboxes, of which one project has half: it cannot take all."""
MAX_SILENCE_S = 60.0
"""How long the sender of a message may send nothing in the middle of it."""


_TO = {"one": "to this sandbox", "project": "to sandboxes of this project", "all": "to all sandboxes"}


class Departed(Exception):
    """The client went away: nobody is there to be answered."""


class Cut(Exception):
    """The answer is to end where it is, without its end: what it was of is gone."""


@dataclass
class Request:
    """A request, its head read. One for each; `sandbox` is asked for once."""

    scope: Scope
    receive: Receive
    headers: Mapping[str, str]
    sandbox_id: str
    sandboxes: Sandboxes
    identity: Identity
    endings: Endings
    lost: Callable[[str], None] = lambda _: None
    """Hears of the sandbox when it was found not to run."""
    share: Share = field(default_factory=lambda: Held(MAX_OF_SANDBOX, MAX_OF_PROJECT, MAX_HELD).share("", ""))
    """What of its body is in memory, among all others."""
    _handle: AsyncSandbox | None = field(default=None, init=False)
    _read: bool = field(default=False, init=False)

    async def sandbox(self) -> AsyncSandbox:
        """The sandbox's handle. Raises `E2bError` 502."""
        if self._handle is None:
            try:
                self._handle = await self.sandboxes.reach(self.sandbox_id)
            except ours.NotFound:
                raise self.not_found() from None
        return self._handle

    def not_found(self) -> E2bError:
        """The error of a sandbox that is not there: its SDK looks for these words, and for this status."""
        return refusals.not_found(self.sandbox_id)

    def gone(self, error: ours.HatchwayError) -> bool:
        """Whether an error says that the sandbox is not there, or does not run."""
        return error.code in GONE

    def user(self) -> str | None:
        """The user that the request names (`Authorization: Basic`), if it does. Raises `ConnectError`."""
        text = self.headers.get("authorization", "")
        scheme, _, credentials = text.partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            name = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[0]
        except (binascii.Error, ValueError):
            raise ConnectError("unauthenticated", "invalid Authorization header") from None
        return name or None

    async def pieces(self, silence_s: float | None = None) -> AsyncIterator[bytes]:
        """The octets of the body as they come. Raises `Departed` when it is cut off, `ConnectError` when nothing comes for `silence_s`."""
        while not self._read:
            try:
                async with asyncio.timeout(silence_s):
                    message = await self.receive()
            except TimeoutError:
                raise ConnectError("deadline_exceeded", f"nothing of the message came for {silence_s:g} s") from None
            if message["type"] == "http.disconnect":
                raise Departed
            self._read = not message.get("more_body", False)
            if octets := message.get("body", b""):
                yield octets

    async def body(self, most: int) -> bytes:
        """The whole body. Raises `ConnectError` beyond `most` octets, where no memory is left for it, and when it does not come."""
        found = bytearray()
        async for piece in self.pieces(MAX_SILENCE_S):
            found += piece
            if len(found) > most:
                raise too_large(most)
            self.hold(len(found))
        return bytes(found)

    def hold(self, octets: int) -> None:
        """So many of its octets are in memory now. Raises `ConnectError`."""
        try:
            self.share.hold(octets)
        except Full as full:
            raise ConnectError(
                "resource_exhausted",
                f"too much is being sent {_TO[full.bound]} at once: try again when less is on its way",
            ) from None

    async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """Does `work` for as long as the client is there, its body read, and the sandbox runs. Raises `Departed`, `Cut`."""
        task = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._left())
        ended = self.endings.watch(self.sandbox_id)
        waiting: set[asyncio.Future[Any]] = {task, leaving, ended.future}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and ended.future.done():
                raise Cut
            if not task.done():
                raise Departed
            return task.result()
        finally:
            ended.close()
            for one in (task, leaving):
                one.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)

    async def _left(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
