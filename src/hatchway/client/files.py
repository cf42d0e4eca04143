"""The files of a sandbox, for blocking code: `Sandbox.files`. `afiles` has the same for asyncio."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import closing

from .bodies import Body, Content, body_of
from .errors import NotFound
from .filecalls import DEFAULT_MAX_READ, FileCalls, FileHead, Reading, Seeing
from .models import FileChange, FileEntry, Transfer
from .reach import Reach
from .receiving import MAX_ENTRIES, Bounds, receiver_for
from .sending import Progress, source_of
from .transport import SyncDriver


class Files:
    """The files of one sandbox.

    Work is done as `user` of the sandbox, by default `user`, with the rights of that user. A relative path starts at the user's
    home. What is not UTF-8 in a name is given and taken as `os.fsdecode` has it. What goes wrong is an error of the service
    (`NotFound("file_not_found")`, `Forbidden("file_permission_denied")`, `HostExhausted("sandbox_disk_full")` and so on).
    """

    def __init__(self, driver: SyncDriver, reach: Reach) -> None:
        self._driver = driver
        self._calls = FileCalls(reach)

    def seeing(self, *, links: bool = False, attributes_of: str | None = None, owner: str | None = None) -> "Files":
        """The same files, where every operation is asked more.

        `links`: of symbolic links it is told what they lead to (`FileEntry.leads_to`). `attributes_of`: the extended attributes of
        the namespace `user` whose names begin so are told, without that beginning (`FileEntry.attributes`), and those that `write`
        takes are named so. `owner`, with `user="root"`: what is made belongs to this user, and a relative path starts at its home.
        """
        files = copy.copy(self)
        files._calls = self._calls.seeing(Seeing(links=links, attributes_of=attributes_of, owner=owner))
        return files

    def read(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        max_bytes: int = DEFAULT_MAX_READ,
        user: str | None = None,
    ) -> bytes:
        """Returns the content of a file, or `length` octets of it from `offset` on.

        Raises `OutputLimit("file_too_large")` beyond `max_bytes`, and `ConnectionFailed` rather than return a part.
        """
        reading = Reading(path, max_bytes)
        flow = self._calls.content(path, offset=offset, length=length, user=user)
        with closing(self._driver.stream(flow)) as pieces:
            for piece in pieces:
                reading.take(piece)
        return reading.octets()

    def read_text(self, path: str, *, max_bytes: int = DEFAULT_MAX_READ, user: str | None = None) -> str:
        """Returns the content of a file as text; what is no UTF-8 becomes replacement characters."""
        return self.read(path, max_bytes=max_bytes, user=user).decode("utf-8", "replace")

    def stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> Iterator[bytes]:
        """Iterates over the content of a file of any size. Raises `ConnectionFailed` when it is cut off."""
        return self._driver.stream(self._calls.content(path, offset=offset, length=length, user=user))

    def write(
        self,
        path: str,
        content: Content | Body,
        *,
        mode: int | None = None,
        parents: bool = False,
        in_place: bool = False,
        attributes: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> FileEntry:
        """Writes a file: octets, text, a binary file from where it stands, or an iterator of octets, of any size.

        The file is replaced as a whole when the last octet is on the sandbox's disk, or not at all. `mode` is a number (`0o644`);
        without it a file that is replaced keeps its own. `parents` makes the folders above. What can be begun anew is sent
        again when the connection breaks; an iterator is not. With `in_place` the file itself is emptied and written, so that links to it
        stay and watches see a change; what is cut off stays so. `attributes` are the extended ones of `seeing(attributes_of=…)`, all of them.
        """
        flow = self._calls.write(
            path, body_of(content), mode=mode, parents=parents, user=user, in_place=in_place, attributes=attributes
        )
        return self._driver.run(flow)

    def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileEntry:
        """Returns what is at a path, with `follow=False` a symbolic link itself. Raises `NotFound`."""
        return self._driver.run(self._calls.stat(path, follow=follow, user=user))

    def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at a path; a link that leads nowhere counts as nothing."""
        try:
            self.stat(path, user=user)
        except NotFound as error:
            if error.code != "file_not_found":
                raise
            return False
        return True

    def list(self, path: str = ".", *, depth: int = 1, user: str | None = None) -> Iterator[FileEntry]:
        """Iterates over what is in a folder, and in those inside down to `depth` (at most 32); names in the order of their octets.

        A folder inside that the user may not read is there, but not what is in it.
        """
        listing = self._calls.listing(path, depth=depth, user=user)
        cursor: str | None = None
        while True:
            page = self._driver.run(listing.page(cursor))
            yield from page.items
            cursor = page.cursor
            if cursor is None:
                return

    def mkdir(self, path: str, *, mode: int | None = None, parents: bool = False, user: str | None = None) -> FileEntry:
        """Makes a folder; with `parents` those above too, and one that is there already is no error."""
        return self._driver.run(self._calls.mkdir(path, mode=mode, parents=parents, user=user))

    def move(
        self, source: str, target: str, *, overwrite: bool = False, parents: bool = False, user: str | None = None
    ) -> FileEntry:
        """Renames. It never moves into a folder; what is at `target` is `Conflict("file_exists")` without `overwrite`; `parents` makes the folders above."""
        return self._driver.run(self._calls.move(source, target, overwrite=overwrite, parents=parents, user=user))

    def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> int:
        """Removes a file, or with `recursive` a folder with what is in it; returns how many entries went."""
        return self._driver.run(self._calls.remove(path, recursive=recursive, user=user))

    def chmod(self, path: str, mode: int, *, recursive: bool = False, user: str | None = None) -> int:
        """Sets the mode, a number like `0o755`; returns of how many entries."""
        return self._driver.run(self._calls.chmod(path, mode, recursive=recursive, user=user))

    def open(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        tail: int | None = None,
        user: str | None = None,
    ) -> Iterator[FileHead | bytes]:
        """Iterates over the content of a file, or a part of it (the last `tail` octets); the first item tells of it (`FileHead`).

        Raises `RangeUnsatisfiable`, and `ConnectionFailed` when it is cut off.
        """
        return self._driver.stream(self._calls.opened(path, offset=offset, length=length, tail=tail, user=user))

    def mark(self, watch: str) -> None:
        """Asks for a `mark` in a watch that was begun with `marks`, by the name that its `ready` has: it comes behind the changes before."""
        self._driver.run(self._calls.mark(watch))

    def watch(
        self,
        path: str,
        *,
        recursive: bool = False,
        entries: bool = False,
        local: bool = False,
        marks: bool = False,
        user: str | None = None,
    ) -> Iterator[FileChange]:
        """Iterates over changes below a path, until what it names is gone.

        The first item is `ready`: what happens from then on is told. After a lost connection it goes on, and an `overflow` with
        the reason `reconnected` says that changes may be missing. With `entries` each change tells what is there by now. `local` refuses
        file systems that others change unseen. With `marks` see `mark`; then a `ready` comes again after a lost connection.
        """
        return self._driver.stream(
            self._calls.watch(path, recursive=recursive, user=user, entries=entries, local=local, marks=marks)
        )

    def pack(self, path: str, *, user: str | None = None) -> Iterator[bytes]:
        """Iterates over a folder, or a file, as a tar archive. Raises `ConnectionFailed` when it is cut off.

        The archive is what the sandbox says it is: unpack it with `download`, or with tools that expect the worst.
        """
        return self._driver.stream(self._calls.pack(path, user=user))

    def unpack(self, path: str, content: Content | Body, *, parents: bool = True, user: str | None = None) -> Transfer:
        """Unpacks a tar archive into a folder, which `parents` makes. Nothing is written outside of it."""
        return self._driver.run(self._calls.unpack(path, body_of(content), parents=parents, user=user))

    def upload(
        self,
        local: str | os.PathLike[str],
        remote: str,
        *,
        progress: Progress | None = None,
        user: str | None = None,
    ) -> Transfer:
        """Copies a file, or the content of a folder, from here to the path `remote`.

        A file has its permission bits, and becomes `remote` itself; a folder is made if need be, and files in it take the place
        of files. Symbolic links in a folder are copied as such; sockets, devices and the like are `skipped`. `progress` is called
        with the octets so far and a name.
        """
        source = source_of(local, progress)
        if not source.is_dir:
            entry = self.write(remote, source.body, mode=source.mode, parents=True, user=user)
            return Transfer(files=1, bytes=entry.size)
        done = self.unpack(remote, source.body, user=user)
        return done.plus(Transfer(skipped=source.skipped))

    def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        max_bytes: int | None = None,
        max_entries: int = MAX_ENTRIES,
        user: str | None = None,
    ) -> Transfer:
        """Copies a file, or the content of a folder, from the path `remote` to `local` on this machine.

        Nothing appears under its final name before all of it came. Whatever the sandbox sends, nothing is written outside of
        `local`: symbolic links that lead out of the folder and devices are left out (`skipped`), set-user-id bits and owners are
        dropped, and an archive that tries is refused (`UnsafeArchive`). `max_bytes` and `max_entries` bound what may come;
        64 MiB of the disk are left free in any case.
        """
        entry = self.stat(remote, user=user)
        content = self._calls.content(remote, offset=0, length=None, user=user)
        flow = self._calls.pack(remote, user=user) if entry.is_dir else content
        with receiver_for(entry, local, Bounds(max_bytes, max_entries), progress) as receiver:
            with closing(self._driver.stream(flow)) as pieces:
                for piece in pieces:
                    receiver.feed(piece)
            return receiver.finish()
