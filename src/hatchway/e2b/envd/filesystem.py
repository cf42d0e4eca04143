"""`filesystem.Filesystem`: what there is in a sandbox, and changes to it."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from hatchway.client import FileEntry, NotFound
from hatchway.client import errors as ours
from hatchway.client.afiles import AsyncFiles
from hatchway.e2b.envd import connect, paths, users
from hatchway.e2b.envd.calls import OnStream, OnUnary
from hatchway.e2b.envd.connect import ConnectError
from hatchway.e2b.envd.entries import info
from hatchway.e2b.envd.messages import Message
from hatchway.e2b.envd.requests import Request
from hatchway.e2b.envd.watching import KEEPALIVE, Watchers, Wish, watched

NAME = "filesystem.Filesystem"
MAX_DEPTH = 32
"""How deep one question of ours goes; deeper trees take several."""
MAX_ENTRIES = 100_000
"""Entries of one answer."""
MAX_LISTED = 32 * 1024 * 1024
"""Octets of them, as they are answered: a guest chooses how long its paths are."""
_BUSY = frozenset({"file_busy", "file_system_read_only", "across_file_systems", "folder_not_empty"})


@dataclass
class Filesystem:
    """The service."""

    watchers: Watchers = field(default_factory=Watchers)

    def methods(self) -> dict[str, OnUnary | OnStream]:
        """Its methods, by name."""
        return {
            "Stat": OnUnary(self._stat),
            "MakeDir": OnUnary(self._make_dir),
            "Move": OnUnary(self._move),
            "ListDir": OnUnary(self._list_dir),
            "Remove": OnUnary(self._remove),
            "WatchDir": OnStream(self._watch_dir, KEEPALIVE),
            "CreateWatcher": OnUnary(self._create_watcher),
            "GetWatcherEvents": OnUnary(self._watcher_events),
            "RemoveWatcher": OnUnary(self._remove_watcher),
        }

    async def _stat(self, request: Request, message: Message) -> object:
        files, path = await _at(request, message)
        with errors_of(request):
            return {"entry": info(await files.stat(path, follow=False, user=paths.ROOT))}

    async def _make_dir(self, request: Request, message: Message) -> object:
        files, path = await _at(request, message)
        with errors_of(request):
            found = await _find(files, path)
            if found is not None and _is_dir(found):
                raise ConnectError("already_exists", f"directory already exists: {path}")
            if found is not None:
                raise ConnectError("invalid_argument", f"path already exists but it is not a directory: {path}")
            await files.mkdir(path, parents=True, user=paths.ROOT)
            return {"entry": info(await files.stat(path, follow=False, user=paths.ROOT))}

    async def _move(self, request: Request, message: Message) -> object:
        files = await _files(request)
        source, target = paths.local(message.text("source") or ""), paths.local(message.text("destination") or "")
        with errors_of(request):
            entry = await files.move(source, target, overwrite=True, parents=True, user=paths.ROOT)
            return {"entry": info(entry)}

    async def _list_dir(self, request: Request, message: Message) -> object:
        files, path = await _at(request, message)
        with errors_of(request):
            found = await files.stat(path, user=paths.ROOT)
            if not found.is_dir:
                raise ConnectError("invalid_argument", f"path is not a directory: {path}")
            entries: list[msgspec.Raw] = []
            octets = 0
            async with aclosing(_below(files, path, message.unsigned("depth") or 1)) as tree:
                async for entry in tree:
                    if len(entries) >= MAX_ENTRIES:
                        raise ConnectError(
                            "resource_exhausted", f"there are more than {MAX_ENTRIES} entries below {path}"
                        )
                    entries.append(msgspec.Raw(msgspec.json.encode(info(entry))))
                    octets += len(entries[-1])
                    if octets > MAX_LISTED:
                        raise ConnectError(
                            "resource_exhausted", f"what is below {path} takes more than {MAX_LISTED} octets"
                        )
            return {"entries": entries}

    async def _remove(self, request: Request, message: Message) -> object:
        files, path = await _at(request, message)
        with errors_of(request):
            try:
                await files.remove(path, recursive=True, user=paths.ROOT)
            except NotFound as error:
                if error.code != "file_not_found":
                    raise
            return {}

    # -- watches

    async def _watch_dir(self, request: Request, message: Message) -> AsyncGenerator[object, None]:
        files, path = await _at(request, message)
        wish = _wish(message)
        del message
        with errors_of(request):
            async with aclosing(watched(files, path, wish)) as events:
                async for event in events:
                    yield event

    async def _create_watcher(self, request: Request, message: Message) -> object:
        files, path = await _at(request, message)
        with errors_of(request):
            return {"watcherId": await self.watchers.create(await request.sandbox(), files, path, _wish(message))}

    async def _watcher_events(self, request: Request, message: Message) -> object:
        await request.sandbox()
        with errors_of(request):
            return {"events": await self.watchers.events(request.sandbox_id, message.text("watcher_id") or "")}

    async def _remove_watcher(self, request: Request, message: Message) -> object:
        await request.sandbox()
        await self.watchers.remove(request.sandbox_id, message.text("watcher_id") or "")
        return {}


async def _files(request: Request) -> AsyncFiles:
    return paths.files_of(await request.sandbox(), request.user())


async def _at(request: Request, message: Message) -> tuple[AsyncFiles, str]:
    return await _files(request), paths.local(message.text("path") or "")


def _wish(message: Message) -> Wish:
    return Wish(
        recursive=message.flag("recursive") or False,
        entries=message.flag("include_entry") or False,
        local=not message.flag("allow_network_mounts"),
    )


async def _find(files: AsyncFiles, path: str) -> FileEntry | None:
    try:
        return await files.stat(path, follow=False, user=paths.ROOT)
    except NotFound as error:
        if error.code != "file_not_found":
            raise
        return None


def _is_dir(entry: FileEntry) -> bool:
    return entry.is_dir or (entry.leads_to is not None and entry.leads_to.type == "dir")


async def _below(files: AsyncFiles, path: str, depth: int) -> AsyncGenerator[FileEntry, None]:
    """What is below a folder, each folder before what is in it, names in the order of their octets."""
    base: int | None = None
    listing = files.list(path, depth=min(depth, MAX_DEPTH), user=paths.ROOT)
    async for entry in listing:
        yield entry
        parts = entry.path.count("/")
        base = parts if base is None else base
        if depth > MAX_DEPTH and entry.is_dir and parts - base == MAX_DEPTH - 1:
            async with aclosing(_below(files, entry.path, depth - MAX_DEPTH)) as deeper:
                async for inner in deeper:
                    yield inner


class errors_of:
    """Turns the errors of file work into those that E2B's agent has; what says that the sandbox is gone passes."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ours.HatchwayError) and not self._request.gone(error):
            raise of_files(error) from None


def of_files(error: ours.HatchwayError) -> ConnectError:
    """An error of file work."""
    if users.is_unknown(error):
        return ConnectError("unauthenticated", f"invalid username: {error.cause}")
    if error.code in _BUSY:
        return ConnectError("internal", error.cause)
    if error.code in ("not_a_folder", "is_a_folder", "path_too_long", "link_loop", "file_exists"):
        return ConnectError("invalid_argument", error.cause)
    return connect.of_client(error)
