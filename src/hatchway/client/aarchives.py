"""Archives, for asyncio: `AsyncHatchway.archives`. `archives` has the same for blocking code."""

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from . import archivecalls, calls
from .arecords import all_of
from .atransport import AsyncDriver
from .bodies import Body, Content, body_of
from .models import Export, Snapshot

if TYPE_CHECKING:
    from .aio import AsyncSandbox


class AsyncArchives:
    """Sandboxes and snapshots as files, and both from such files."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def export(
        self, source: "AsyncSandbox | Snapshot | str", *, include_template: bool = False, timeout: float = 600.0
    ) -> Export:
        """Has an archive made of a suspended or stopped sandbox (or its id), or of a snapshot; returns when it can be fetched.

        It stays for an hour. With `include_template` it can be taken in where the template is not. Raises `Conflict("wrong_state")`,
        `OperationFailed`, `WaitTimeout`.
        """
        if isinstance(source, Snapshot):
            flow = archivecalls.export_snapshot(source.id, include_template=include_template, timeout_s=timeout)
        else:
            sandbox_id = source if isinstance(source, str) else source.id
            flow = archivecalls.export_sandbox(sandbox_id, include_template=include_template, timeout_s=timeout)
        return await self._driver.run(flow)

    def fetch(self, export: Export, *, passphrase: str | None = None, offset: int = 0) -> AsyncIterator[bytes]:
        """Iterates over the octets of an archive, encrypted where a passphrase is given, from `offset` on. A connection that breaks is taken up."""
        return self._driver.stream(archivecalls.content(export, passphrase, offset))

    async def get(self, export_id: str) -> Export:
        """Returns the export with this id; raises `NotFound`."""
        return await self._driver.run(archivecalls.get_export(export_id))

    def list(self) -> AsyncIterator[Export]:
        """Iterates over the exports that can be fetched, are being made, or failed, page by page."""
        return all_of(self._driver, archivecalls.exports())

    async def delete(self, export_id: str) -> None:
        """Deletes an export before its time is over."""
        await self._driver.run(archivecalls.delete_export(export_id))

    async def load(
        self,
        content: Content | Body,
        *,
        passphrase: str | None = None,
        memory: bool = True,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> "AsyncSandbox | Snapshot":
        """Makes of an archive what it is of: a sandbox, `suspended` where it has memory, which `memory=False` leaves out, else `stopped`; or a snapshot.

        What is not given is as the archive says; a snapshot has neither `metadata` nor `env`. Raises `Unprocessable` for an archive that is not whole, altered, not trusted or
        encrypted otherwise, and `Conflict("memory_lost")` where its memory cannot be loaded here; nothing is left then.
        """
        from .aio import AsyncSandbox

        upload = await self._driver.run(archivecalls.upload(body_of(content), passphrase))
        body = calls.compact(memory=memory, name=name, metadata=metadata, env=env)
        info, operation = await self._driver.run(archivecalls.load(upload, body, timeout_s=timeout))
        return info if isinstance(info, Snapshot) else AsyncSandbox(self._driver, info, operation)

    async def load_from(
        self,
        url: str,
        *,
        passphrase: str | None = None,
        memory: bool = True,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
    ) -> "AsyncSandbox | Snapshot":
        """Makes a sandbox or a snapshot of an archive that its node fetches by itself: see `load`. `url` lies under a prefix that the service's operator allows.

        Raises `Unprocessable("url_not_allowed")`, and `OperationFailed` where it cannot be fetched.
        """
        from .aio import AsyncSandbox

        upload = await self._driver.run(archivecalls.fetched(url, passphrase, timeout))
        body = calls.compact(memory=memory, name=name, metadata=metadata, env=env)
        info, operation = await self._driver.run(archivecalls.load(upload, body, timeout_s=timeout))
        return info if isinstance(info, Snapshot) else AsyncSandbox(self._driver, info, operation)
