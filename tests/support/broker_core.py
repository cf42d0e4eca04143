"""The broker's own sources and grants behind its real socket, which can be away and remember, or end and forget, as a process does."""

import asyncio
import os
from pathlib import Path

from tests.support.broker_world import HOST, Recorded, listening

from hatchway.broker.config import BrokerConfig
from hatchway.broker.grants import Grants
from hatchway.broker.service import BrokerService
from hatchway.broker.sources import Sources
from hatchway.broker.store import Store
from hatchway.wire import broker
from hatchway.wire.broker import Source


class Core:
    """A broker without legs. It begins away."""

    def __init__(self, run: Path) -> None:
        own = os.geteuid()
        self._path = run / broker.SOCKET
        self._config = BrokerConfig(
            folder=run / "secrets", control_uids=frozenset({own}), node_uids=frozenset({own}), egress_uids=(own,)
        )
        self._config.folder.mkdir()
        self.audit = Recorded()
        self._server: asyncio.Server | None = None
        self.forget()

    def forget(self) -> None:
        """It is a new process: it has its sources, and no grant."""
        self.sources = Sources(self._config, Store(self._config.folder))
        self.grants = Grants(self.sources)
        self.service = BrokerService(self._config, self.sources, self.grants, self.audit)

    async def put(self, name: str) -> None:
        """Keeps a secret."""
        await self.sources.put(Source(project="default", name=name, hosts=(HOST,), value=b"a secret value"))

    def granted(self, sandbox_id: str) -> tuple[str, ...]:
        """The sources that a sandbox may use now."""
        held = self.grants._held.get(sandbox_id)
        return () if held is None else tuple(sorted({one.source for one in held.grant.bindings}))

    async def here(self) -> None:
        """It listens from now on."""
        self._server = await self.service.serve_unix(listening(self._path))

    async def away(self) -> None:
        """Nobody reaches it any more; what it has it keeps."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await self.service.close()
            self._path.unlink()

    async def close(self) -> None:
        await self.away()
        self.sources.close()
