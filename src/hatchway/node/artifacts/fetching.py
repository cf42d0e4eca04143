"""Archives that this node fetches by itself: they become uploads, as if a client had brought them.

What has come stays when the connection breaks or the process ends; asked again, it goes on behind that, where the source is still the same.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from hatchway.domain.errors import Conflict, HatchwayError, HostExhausted, Unavailable
from hatchway.node.artifacts import sources
from hatchway.node.artifacts.refusals import invalid
from hatchway.node.artifacts.sources import Opened, Source
from hatchway.node.artifacts.spool import Spool
from hatchway.wire.node import UploadStatus

AT_ONCE = 4
"""Archives that are fetched at one time; the others wait."""
TRIES = 5
"""How often a source that breaks is taken up again without an octet in between."""
PAUSE_S = 0.5
"""Before the first of them; twice as long before each further one."""
WITHIN_S = 6 * 3600.0
"""How long one archive may take in all."""
BLOCK = 1 << 20

log = logging.getLogger(__name__)


class Fetches:
    """Fills uploads from allowed addresses. `store` is the one that nodes share, `allowed` are prefixes that the operator lists."""

    def __init__(self, uploads: Spool, *, store: str | None = None, allowed: Sequence[str] = ()) -> None:
        self._uploads = uploads
        self._store = store
        self._allowed = tuple(map(sources.check_prefix, allowed))
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, HatchwayError] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def begin(self, upload_id: str, project: str, url: str) -> UploadStatus:
        """Begins, or goes on with what was begun; returns at once. Raises `Unprocessable("url_not_allowed")`, `Conflict("upload_exists")`, `Exhausted`."""
        source = sources.find(url, project, store=self._store, allowed=self._allowed)
        entry = await asyncio.to_thread(self._uploads.find, upload_id)
        if entry is not None and (entry.project != project or entry.url not in ("", url)):
            raise Conflict("upload_exists", "The upload is another one.", "Begin a new one.")
        if upload_id not in self._running and not self.status(upload_id).complete:
            await asyncio.to_thread(self._uploads.begin, upload_id, project, url)
            self._failed.pop(upload_id, None)
            task = asyncio.get_running_loop().create_task(
                self._run(upload_id, project, source), name=f"fetch {upload_id}"
            )
            self._running[upload_id] = task
            task.add_done_callback(lambda _: self._running.pop(upload_id, None))
        return self.status(upload_id)

    def status(self, upload_id: str) -> UploadStatus:
        """How much is here, and what is being done about the rest. `complete` only of what is fetched: nobody else says how much there is."""
        entry = self._uploads.find(upload_id)
        path = self._uploads.path(upload_id)
        here = path.stat().st_size if entry is not None and path.exists() else 0
        size = None if entry is None else entry.size
        failed = self._failed.get(upload_id)
        return UploadStatus(
            offset=here,
            size=size,
            complete=size is not None and here == size,
            fetching=upload_id in self._running,
            error=None if failed is None else failed.as_dict(),
        )

    def require_whole(self, upload_id: str) -> None:
        """Raises `Conflict("upload_not_whole")` for one that is fetched and not all here."""
        status = self.status(upload_id)
        if status.fetching or (status.size is not None and not status.complete):
            raise Conflict(
                "upload_not_whole",
                f"{status.offset} octets of the archive are here, of {status.size or 'what is not known yet'}.",
                "Wait until it is `complete`." if status.fetching else "Have it fetched on: ask for it again.",
                offset=status.offset,
            )

    async def end(self, upload_id: str) -> None:
        """Nobody wants it any more."""
        self._failed.pop(upload_id, None)
        task = self._running.get(upload_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Stops; what has come stays."""
        for upload_id in list(self._running):
            await self.end(upload_id)

    async def _run(self, upload_id: str, project: str, source: Source) -> None:
        try:
            async with asyncio.timeout(WITHIN_S), self._turns:
                await self._fetch(upload_id, project, source)
        except HatchwayError as error:
            self._fail(upload_id, error)
        except TimeoutError:
            self._fail(upload_id, sources.unreachable(f"it took more than {WITHIN_S:g} s"))
        except OSError as error:
            why = error.strerror or str(error)
            self._fail(upload_id, HostExhausted("host_disk_full", f"It cannot be stored: {why}.", "Free space there."))
        except Exception as error:  # whoever asks for its state has to be told something
            log.exception("the archive of %s was not fetched", upload_id)
            self._fail(upload_id, sources.unreachable(type(error).__name__))

    def _fail(self, upload_id: str, error: HatchwayError) -> None:
        log.warning("%s was not fetched: %s", upload_id, error)
        self._failed[upload_id] = error
        for old in list(self._failed):
            if self._uploads.find(old) is None:
                del self._failed[old]

    async def _fetch(self, upload_id: str, project: str, source: Source) -> None:
        left = TRIES
        while True:
            before = self.status(upload_id).offset
            try:
                if await self._once(upload_id, project, source):
                    return
                raise sources.unreachable("it was cut off")
            except Unavailable:
                left = TRIES if self.status(upload_id).offset > before else left - 1
                if left <= 0:
                    raise
            await asyncio.sleep(PAUSE_S * 2 ** (TRIES - left))

    async def _once(self, upload_id: str, project: str, source: Source) -> bool:
        """One connection. Tells whether all is here."""
        entry, at = self._uploads.find(upload_id), self.status(upload_id).offset
        async with source.open(at, "" if entry is None else entry.version) as opened:
            if opened.start != at:
                at = opened.start
                if at:
                    raise sources.unreachable("it sent another part than was asked for")
            await asyncio.to_thread(self._uploads.expect, upload_id, opened.size, opened.version, restart=not at)
            async with contextlib.aclosing(_blocks(opened)) as blocks:
                async for block in blocks:
                    if at + len(block) > opened.size:
                        raise invalid("its source sent more than it announced")
                    at = await asyncio.to_thread(self._uploads.append, upload_id, project, at, block)
            return at == opened.size


async def _blocks(opened: Opened) -> AsyncGenerator[bytes, None]:
    """What comes, gathered to blocks that are worth a write. Raises `archive_unreachable` when nothing comes for too long."""
    held = bytearray()
    chunks = aiter(opened.chunks)
    while True:
        try:
            async with asyncio.timeout(sources.SILENT_S):
                held += await anext(chunks)
        except StopAsyncIteration:
            break
        except Exception as error:  # what came before it stays
            if held:
                yield bytes(held)
            if isinstance(error, TimeoutError):
                raise sources.unreachable(f"nothing came for {sources.SILENT_S:g} s") from None
            raise
        if len(held) >= BLOCK:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)
