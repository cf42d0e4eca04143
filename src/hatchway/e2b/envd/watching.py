"""Watches of folders: as a stream, or kept here under an id and asked for what happened.

Events are E2B's: names relative to what is watched; a rename is told at both ends, as its agent's library does it. Who asks gets
everything that had happened by then: the guest is asked for a mark behind it.
"""

import asyncio
import contextlib
import posixpath
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import msgspec

from hatchway.client import FileChange, FileEntry
from hatchway.client import errors as ours
from hatchway.client.afiles import AsyncFiles
from hatchway.client.aio import AsyncSandbox
from hatchway.domain.ids import new_id
from hatchway.e2b.envd import paths
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.entries import as_text, info
from hatchway.e2b.held import Full, Held, Share

KEEPALIVE: Final[Mapping[str, object]] = {"keepalive": {}}
MAX_WAITING = 16_384
"""Events that one watcher keeps for who does not ask."""
MAX_KEPT = 2 * 1024 * 1024
"""Octets of them, as they are answered: a guest chooses how long its names are, and what an entry has."""
MAX_KEPT_OF_PROJECT = 128 * 1024 * 1024
MAX_KEPT_IN_ALL = 256 * 1024 * 1024
MAX_OF_PROJECT = 512
MAX_WATCHERS = 1_024
"""Watchers of all sandboxes, of which one project has half; one sandbox has 16 watches at most."""
MARK_S = 30.0
"""How long a guest may take to set a mark."""

_OF = {"one": "this watcher", "project": "watchers of this project", "all": "all watchers"}
_KINDS = {"create": "CREATE", "modify": "WRITE", "chmod": "CHMOD", "remove": "REMOVE"}


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be told: of folders below too, each event with its entry, and of file systems that are local alone."""

    recursive: bool = False
    entries: bool = False
    local: bool = True


class Names:
    """Events of ours as E2B's, below one folder."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._root: str | None = None

    def ready(self, change: FileChange, path: str) -> None:
        """The watch begins. Raises `ConnectError` for what is no folder."""
        entry = change.entry
        if entry is not None and not entry.is_dir:
            raise ConnectError("invalid_argument", f"path is not a directory: {path}")
        self._root = None if entry is None else entry.path

    def events(self, change: FileChange) -> Iterator[dict[str, object]]:
        """What one change is."""
        if change.event == "rename":
            if change.from_ is not None:
                yield self._event("RENAME", change.from_, None)
            yield self._event("CREATE", change.path, change.entry)
        elif change.event == "remove" and change.moved:
            yield self._event("RENAME", change.path, None)
        elif change.event in _KINDS and change.path != self._root:
            yield self._event(_KINDS[change.event], change.path, change.entry)

    def _event(self, kind: str, path: str, entry: FileEntry | None) -> dict[str, object]:
        name = posixpath.relpath(path, self._root) if self._root is not None else posixpath.basename(path)
        event: dict[str, object] = {"name": as_text(name), "type": f"EVENT_TYPE_{kind}"}
        return {**event, "entry": info(entry)} if self._wish.entries and entry is not None else event


def _changes(files: AsyncFiles, path: str, wish: Wish, *, marks: bool) -> AsyncGenerator[FileChange, None]:
    changes = files.watch(
        path, recursive=wish.recursive, entries=wish.entries, local=wish.local, marks=marks, user=paths.ROOT
    )
    assert isinstance(changes, AsyncGenerator)  # the driver's
    return changes


async def watched(files: AsyncFiles, path: str, wish: Wish) -> AsyncGenerator[object, None]:
    """The messages of a stream, until what is watched is gone. Raises `ConnectError` when changes may have been missed."""
    names = Names(wish)
    async with aclosing(_changes(files, path, wish, marks=False)) as changes:
        async for change in changes:
            if change.event == "ready":
                names.ready(change, path)
                yield {"start": {}}
            elif change.event == "overflow":
                raise missed(change.reason)
            for event in names.events(change):
                yield {"filesystem": event}


def missed(reason: str | None) -> ConnectError:
    """The error of a watch that cannot say what happened."""
    return ConnectError("data_loss", f"changes may have been missed ({reason or 'overflow'}): look, and watch again")


@dataclass(eq=False)
class _Watcher:
    """One watcher: a task reads the watch, whoever asks takes what is there."""

    files: AsyncFiles
    path: str
    wish: Wish
    project: str
    share: Share
    waiting: deque[msgspec.Raw] = field(default_factory=deque)
    octets: int = 0
    """Of `waiting`."""
    failure: ConnectError | None = None
    raised: ours.HatchwayError | None = None
    """What ended it, where that was an error of ours."""
    watch: str | None = None
    """The name by which marks are asked for."""
    marked: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self) -> None:
        """Reads until the watch is over."""
        names = Names(self.wish)
        try:
            async with aclosing(_changes(self.files, self.path, self.wish, marks=True)) as changes:
                async for change in changes:
                    self._take(change, names)
            self.failure = ConnectError("not_found", f"what was watched at {self.path} is gone")
        except ConnectError as error:
            self.failure = error
        except ours.HatchwayError as error:
            self.failure = self.failure or ConnectError("unavailable", f"the watch of {self.path} ended: {error.cause}")
            self.raised = error
            self._empty()  # its sandbox is gone, or out of reach: nobody asks
        finally:
            self.changed.set()

    def _take(self, change: FileChange, names: Names) -> None:
        if change.event == "ready":
            names.ready(change, self.path)
            self.watch = change.watch
        elif change.event == "mark":
            self.marked += 1
        elif change.event == "overflow":
            raise missed(change.reason)
        else:
            for event in names.events(change):
                self.waiting.append(msgspec.Raw(msgspec.json.encode(event)))
                self.octets += len(self.waiting[-1])
            try:
                self.share.hold(self.octets)
            except Full as full:
                raise ConnectError(
                    "resource_exhausted", f"too many and too long events of {_OF[full.bound]} waited to be asked for"
                ) from None
            if len(self.waiting) > MAX_WAITING:
                raise ConnectError("resource_exhausted", f"more than {MAX_WAITING} events waited to be asked for")
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, or for the end of the watch."""
        while not condition() and self.failure is None:
            self.changed.clear()
            await self.changed.wait()

    def _empty(self) -> None:
        self.waiting.clear()
        self.octets = 0
        self.share.hold(0)

    async def drain(self) -> list[msgspec.Raw]:
        """What had happened by now. Raises `ConnectError` once what there was before has been taken."""
        async with self.turn:
            if self.failure is None and self.watch is not None:
                wanted = self.marked + 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MARK_S):
                        await self.files.mark(self.watch)
                        await self.until(lambda: self.marked >= wanted)
            events = list(self.waiting)
            self._empty()
            if not events and self.failure is not None:
                raise self.failure
            return events

    async def close(self) -> None:
        """Ends it."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self._empty()


class Watchers:
    """The watchers of all sandboxes. They are in memory: after a restart of the wrapper, or when their sandbox stopped, they are not found."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Watcher] = {}
        self._held = Held(MAX_KEPT, MAX_KEPT_OF_PROJECT, MAX_KEPT_IN_ALL)

    async def create(self, sandbox: AsyncSandbox, files: AsyncFiles, path: str, wish: Wish) -> str:
        """Begins one; returns its id when changes are told from then on. Raises `ConnectError` and what the watch does."""
        project = sandbox.info.project or ""
        await self._find_room(project)
        watcher_id = new_id()
        watcher = _Watcher(files, path, wish, project, self._held.share(watcher_id, project))
        watcher.task = asyncio.get_running_loop().create_task(watcher.read())
        # It has its place while it begins: else as many as are asked for at once would find room.
        self._open[sandbox.id, watcher_id] = watcher
        try:
            await watcher.until(lambda: watcher.watch is not None)
            if watcher.watch is None:
                if watcher.raised is not None:
                    raise watcher.raised
                raise watcher.failure or ConnectError("internal", "the watch did not begin")
        except BaseException:
            self._open.pop((sandbox.id, watcher_id), None)
            await watcher.close()
            raise
        return watcher_id

    async def _find_room(self, project: str) -> None:
        """Forgets what has ended, where there is no room without. Raises `ConnectError`."""
        if not self._full(project):
            return
        for key, one in [*self._open.items()]:
            if one.failure is not None and self._open.pop(key, None) is not None:
                await one.close()
        if full := self._full(project):
            raise ConnectError("resource_exhausted", f"{full} watchers: remove some")

    def _full(self, project: str) -> str:
        """What there is too much of for one more; nothing where there is room."""
        if len(self._open) >= MAX_WATCHERS:
            return f"there are {MAX_WATCHERS}"
        mine = sum(one.project == project for one in self._open.values())
        return f"this project has {MAX_OF_PROJECT}" if mine >= MAX_OF_PROJECT else ""

    async def events(self, sandbox_id: str, watcher_id: str) -> list[msgspec.Raw]:
        """What happened since they were asked for. Raises `ConnectError`."""
        watcher = self._open.get((sandbox_id, watcher_id))
        if watcher is None:
            raise ConnectError("not_found", f"watcher with id {watcher_id[:40]} not found")
        try:
            return await watcher.drain()
        except ConnectError:
            self._open.pop((sandbox_id, watcher_id), None)
            await watcher.close()
            raise

    async def remove(self, sandbox_id: str, watcher_id: str) -> None:
        """Ends one. Raises `ConnectError("not_found")`."""
        watcher = self._open.pop((sandbox_id, watcher_id), None)
        if watcher is None:
            raise ConnectError("not_found", f"watcher with id {watcher_id[:40]} not found")
        await watcher.close()
