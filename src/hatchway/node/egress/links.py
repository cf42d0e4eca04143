"""A connection to one of our processes beside the node: made again for as long as the node lives."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.domain.errors import Unavailable
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

T = TypeVar("T")

RETRY_S = 0.1
CONNECT_WITHIN_S = 5.0
CALL_WITHIN_S = 10.0

log = logging.getLogger(__name__)


async def _nothing() -> None:
    """Nobody has anything to do."""


class Link:
    """See the module. `on_up` runs whenever it was connected anew, `on_down` when that connection has ended; `start` begins."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._connection: Connection | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.on_up: Callable[[], Awaitable[None]] = _nothing
        self.on_down: Callable[[], None] = lambda: None
        self.on_event: Callable[[str, msgspec.Raw], None] = lambda name, params: None

    @property
    def connected(self) -> bool:
        """Whether calls can be made."""
        return self._connection is not None

    def start(self) -> None:
        """Begins to connect. May be called again."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"link {self.name}")

    async def close(self) -> None:
        """Drops the connection; the process goes on without us."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def ready(self, within: float) -> None:
        """Waits for a connection. Raises `Unavailable("peer_lost")` after `within` seconds."""
        if self._connection is not None:
            return
        try:
            async with asyncio.timeout(within), self._changed:
                while self._connection is None:
                    await self._changed.wait()
        except TimeoutError:
            raise self._lost() from None

    async def call(
        self, method: str, params: object, result: type[T], *, within: float = CALL_WITHIN_S, alone: bool = False
    ) -> T:
        """Asks. Raises what is answered, and `Unavailable("peer_lost")` also where nothing is within `within` seconds: then it is connected anew.

        `alone`: what may last for reasons of its own says nothing of the others' calls. It raises `Unavailable("busy")` then, and the connection stays.
        """
        connection = self._connection
        if connection is None:
            raise self._lost()
        try:
            return await connection.call(method, params, result, within=within)
        except TimeoutError:
            if alone:
                cause = f"The process {self.name} has not answered {method} within {within:g} s."
                raise Unavailable("busy", cause, "It is asked again by itself.") from None
            # No stream says that its peer was stopped: this does. What it did of the request is found out when it is there again.
            log.warning("%s does not answer %s", self.name, method)
            await connection.close()
            raise self._lost() from None

    def _lost(self) -> Unavailable:
        return Unavailable(
            "peer_lost",
            f"The process {self.name} is not there.",
            "It is started again by itself; try again in a moment.",
        )

    async def _keep(self) -> None:
        told = False
        while True:
            try:
                async with asyncio.timeout(CONNECT_WITHIN_S):
                    with address(self._path) as reached:
                        reader, writer = await asyncio.open_unix_connection(reached)
                await self._serve(reader, writer)
                told = False
            except (OSError, TimeoutError) as error:
                if not told:
                    log.warning("%s cannot be reached yet: %s", self.name, error)
                    told = True
            await asyncio.sleep(RETRY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(reader, writer, on_event=lambda name, params: self.on_event(name, params))
        reading = loop.create_task(connection.run())
        self._connection = connection
        log.info("connected to %s", self.name)
        async with self._changed:
            self._changed.notify_all()
        up = asyncio.ensure_future(self.on_up())
        try:
            await connection.closed.wait()
        finally:
            self._connection = None
            up.cancel()
            await connection.close()
            reading.cancel()
            results = await asyncio.gather(up, reading, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    log.error("%s: what follows a connection failed", self.name, exc_info=result)
            with contextlib.suppress(RuntimeError):  # the loop is about to close
                self.on_down()
