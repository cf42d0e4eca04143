"""How the wrapper asks the control plane: with a caller's key, or on behalf of a sandbox. All over one socket, and one set of connections.

The client's library is imported with the first request: a wrapper that nobody uses costs next to nothing.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hatchway.wire.behalf import ALL, HEADER

if TYPE_CHECKING:
    from hatchway.client.aio import AsyncSandbox
    from hatchway.client.atransport import AsyncDriver
    from hatchway.client.config import Config

Reach: TypeAlias = "Callable[[str], Awaitable[AsyncSandbox]]"
"""Gives the handle of a sandbox by its id, acting in its own right. Raises `hatchway.client.NotFound` for one that is none of the wrapper's,
and `ConnectionFailed`."""

URL = "http://control"
"""Names the control plane to the HTTP library; it is reached over its socket."""
TIMEOUT_S = 60.0
CONNECTIONS = 4096
"""To the control plane, and as many to nodes: more than the control plane answers at once, so that it decides who has to wait,
project by project, and nobody takes them all."""
MAX_HANDLES = 4096
"""Sandboxes whose handles are kept, with their tokens of the data plane."""


class Reaching:
    """The way to the control plane of this machine."""

    def __init__(self, control: Path, data_ca: Path | None = None) -> None:
        """`control` is the socket `wire.behalf.SOCKET`, `data_ca` see `E2bConfig`."""
        self._control = control
        self._data_ca = data_ca
        self._driver: AsyncDriver | None = None
        self._handles: OrderedDict[str, AsyncSandbox] = OrderedDict()
        self._asked: dict[str, asyncio.Task[AsyncSandbox]] = {}

    def with_key(self, key: str | None) -> "AsyncDriver":
        """Asks by the right of a key that a caller sent."""
        return self._shared().with_config(self._config(key))

    def for_sandbox(self, sandbox_id: str) -> "AsyncDriver":
        """Asks on behalf of a sandbox: what is its own, and nothing else."""
        return self._shared().with_config(self._config(None, {HEADER: sandbox_id}))

    async def reach(self, sandbox_id: str) -> "AsyncSandbox":
        """The handle of a sandbox; `info` has its annotations, and is as old as the handle: `look` asks anew. See `Reach`."""
        handle = self._handles.get(sandbox_id)
        if handle is not None:
            self._handles.move_to_end(sandbox_id)
            return handle
        return await self.look(sandbox_id)

    async def look(self, sandbox_id: str) -> "AsyncSandbox":
        """Like `reach`, with `info` as it is now. Who asks at the same time gets the same answer."""
        asked = self._asked.get(sandbox_id)
        if asked is None:
            asked = asyncio.get_running_loop().create_task(self._ask(sandbox_id))
            self._asked[sandbox_id] = asked
            asked.add_done_callback(lambda done: self._asked.get(sandbox_id) is done and self._asked.pop(sandbox_id))
        return await asyncio.shield(asked)

    def changed(self, sandbox_id: str) -> None:
        """The sandbox is not any more as it was: what is being answered may be old, and is no answer to who asks from now on."""
        self._asked.pop(sandbox_id, None)

    async def changes(self) -> "AsyncIterator[tuple[str, str] | None]":
        """The sandboxes of the wrapper whose state changes, each with the new one, for as long as the caller iterates. None at the beginning, and
        wherever changes may have been missed: what is of interest is to be looked at then. Raises `hatchway.client.HatchwayError`."""
        from hatchway.client import streams

        told = self.for_sandbox(ALL).stream(streams.service_events(None, {}, pings=True))
        async with contextlib.aclosing(told) as events:
            begun = False
            async for event in events:
                if event.kind == streams.PING:
                    if not begun:
                        begun = True
                        yield None
                elif event.kind == "gap":
                    yield None
                else:
                    yield event.subject, str(event.data.get("state"))

    def knows(self, sandbox_id: str) -> bool:
        """Whether there is a handle of it."""
        return sandbox_id in self._handles

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone, or is another than it was seen."""
        self._handles.pop(sandbox_id, None)

    async def _ask(self, sandbox_id: str) -> "AsyncSandbox":
        from hatchway.client import NotFound, calls
        from hatchway.client.aio import AsyncSandbox

        driver = self.for_sandbox(sandbox_id)
        try:
            info = await driver.run(calls.get_sandbox(sandbox_id, annotations=True))
        except NotFound:
            self.forget(sandbox_id)
            raise
        handle = self._handles.get(sandbox_id)
        if handle is None:
            handle = self._handles[sandbox_id] = AsyncSandbox(driver, info)
            while len(self._handles) > MAX_HANDLES:
                self._handles.popitem(last=False)
        handle.info = info
        self._handles.move_to_end(sandbox_id)
        return handle

    def _shared(self) -> "AsyncDriver":
        if self._driver is None:
            from hatchway.client.atransport import AsyncDriver

            self._driver = AsyncDriver(self._config(None), TIMEOUT_S)
        return self._driver

    def _config(self, key: str | None, headers: Mapping[str, str] | None = None) -> "Config":
        from hatchway.client.config import Config

        also_ca = None if self._data_ca is None or not self._data_ca.exists() else str(self._data_ca)
        return Config(
            URL, key, also_ca=also_ca, socket=str(self._control), headers=headers or {}, connections=CONNECTIONS
        )

    async def close(self) -> None:
        """Closes all connections."""
        if self._driver is not None:
            await self._driver.close()
