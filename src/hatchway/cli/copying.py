"""`hatchway cp`, and what `hatchway run --copy` shares with it: which of two places is where, and what a copy becomes there."""

import os
import posixpath
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hatchway.client import InvalidRequest, NotFound, Transfer
from hatchway.client.bodies import Body

from .front import Front, note
from .interrupts import Interrupted, Interrupts
from .output import print_json, write_octets
from .progress import meter

if TYPE_CHECKING:
    from collections.abc import Generator

    from hatchway.client import FileEntry, Files, Sandbox

_REMOTE = re.compile(r"([a-z0-9]{20}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A path here, a path in a sandbox, or our standard input or output."""

    path: str
    sandbox: str | None = None

    @property
    def is_pipe(self) -> bool:
        """Whether it is `-`."""
        return self.sandbox is None and self.path == "-"

    @property
    def name(self) -> str:
        """What it is called in a folder that it is copied into; empty for what stands for its content (`.`)."""
        name = posixpath.basename(self.path.rstrip("/"))
        return "" if name in (".", "..") else name


def place(text: str) -> Place:
    """Reads `SANDBOX:PATH`, `-`, or a path here; a path here that looks like a sandbox's is written with `./`."""
    if match := _REMOTE.fullmatch(text):
        return Place(match[2] or ".", match[1])
    return Place(text)


class Copier:
    """Copies with the options of one call."""

    def __init__(self, front: Front, *, recursive: bool, user: str | None, max_bytes: int | None) -> None:
        self._front = front
        self._recursive = recursive
        self._user = user
        self._max_bytes = max_bytes
        self._files: dict[str, Files] = {}

    def files(self, sandbox: str) -> "Files":
        """The files of a sandbox."""
        if sandbox not in self._files:
            self._files[sandbox] = self._front.client.sandboxes.get(sandbox).files
        return self._files[sandbox]

    def copy(self, source: Place, target: Place, *, into: bool) -> Transfer:
        """Copies one thing; `into` says that `target` has to be a folder."""
        if (source.is_pipe and target.is_pipe) or (source.sandbox is None and target.sandbox is None):
            raise InvalidRequest(
                "no_sandbox",
                "Neither of the two is in a sandbox.",
                "Write one of them as SANDBOX:PATH, where SANDBOX is an id of 20 letters and digits (`hatchway ls`), not a name.",
            )
        if source.is_pipe:
            return self._from_stdin(target)
        if target.is_pipe:
            return self._to_stdout(source)
        if target.sandbox is None:
            return self._download(source, _in_folder(source, target, os.path.isdir(target.path), into))
        target = _in_folder(source, target, self._is_folder(target), into)
        return self._upload(source, target) if source.sandbox is None else self._across(source, target)

    def _is_folder(self, target: Place) -> bool:
        try:
            return self._stat(target).is_dir
        except NotFound as error:
            if error.code != "file_not_found":
                raise
            return False

    def _stat(self, place_: Place) -> "FileEntry":
        assert place_.sandbox is not None  # it is a place in one
        return self.files(place_.sandbox).stat(place_.path, user=self._user)

    def _upload(self, source: Place, target: Place) -> Transfer:
        assert target.sandbox is not None  # else it would be a download
        is_dir = os.path.isdir(source.path)
        self._may_be(source, is_dir)
        size = None if is_dir or not os.path.isfile(source.path) else os.path.getsize(source.path)
        with meter(self._front, size) as progress:
            return self.files(target.sandbox).upload(source.path, target.path, progress=progress, user=self._user)

    def _download(self, source: Place, target: Place) -> Transfer:
        assert source.sandbox is not None  # one of both is in a sandbox
        entry = self._stat(source)
        self._may_be(source, entry.is_dir)
        with meter(self._front, None if entry.is_dir else entry.size) as progress:
            return self.files(source.sandbox).download(
                source.path, target.path, progress=progress, max_bytes=self._max_bytes, user=self._user
            )

    def _across(self, source: Place, target: Place) -> Transfer:
        """From one sandbox to another: through here, piece by piece."""
        assert source.sandbox is not None and target.sandbox is not None  # noqa: PT018 - both are in one
        entry = self._stat(source)
        self._may_be(source, entry.is_dir)
        here, there = self.files(source.sandbox), self.files(target.sandbox)
        with meter(self._front, None if entry.is_dir else entry.size) as progress:

            def pieces() -> Iterator[bytes]:
                opened = (
                    here.pack(source.path, user=self._user)
                    if entry.is_dir
                    else here.stream(source.path, user=self._user)
                )
                done = 0
                with closing(cast("Generator[bytes, None, None]", opened)) as stream:
                    for piece in stream:
                        done += len(piece)
                        yield piece
                        if progress is not None:
                            progress(done, source.path)

            if entry.is_dir:
                return there.unpack(target.path, Body(pieces, None, again=True), user=self._user)
            # What the kernel makes up has no size beforehand.
            body = Body(pieces, entry.size if entry.size > 0 else None, again=True)
            written = there.write(target.path, body, mode=entry.mode & 0o777, user=self._user)
        return Transfer(files=1, bytes=written.size)

    def _from_stdin(self, target: Place) -> Transfer:
        assert target.sandbox is not None  # else both would be here
        files = self.files(target.sandbox)
        if self._recursive:
            return files.unpack(target.path, sys.stdin.buffer, user=self._user)
        return Transfer(files=1, bytes=files.write(target.path, sys.stdin.buffer, user=self._user).size)

    def _to_stdout(self, source: Place) -> Transfer:
        assert source.sandbox is not None  # else both would be here
        files = self.files(source.sandbox)
        is_dir = self._stat(source).is_dir
        self._may_be(source, is_dir)
        opened = files.pack(source.path, user=self._user) if is_dir else files.stream(source.path, user=self._user)
        done = 0
        with closing(cast("Generator[bytes, None, None]", opened)) as stream:
            for piece in stream:
                write_octets(1, piece)
                done += len(piece)
        return Transfer(bytes=done)

    def _may_be(self, source: Place, is_dir: bool) -> None:
        if is_dir and not self._recursive:
            raise InvalidRequest("is_folder", f"{source.path} is a folder.", "Copy folders with -r.")


def _in_folder(source: Place, target: Place, is_folder: bool, into: bool) -> Place:
    if is_folder:
        return Place(posixpath.join(target.path, source.name), target.sandbox) if source.name else target
    if into or target.path.endswith("/"):
        raise InvalidRequest("no_folder", f"{target.path} is not a folder.", "Make it first, or give another name.")
    return target


def copy(front: Front, places: list[str], *, recursive: bool, user: str | None, max_bytes: int | None) -> int:
    """Copies all but the last of `places` to the last one; returns the exit status. It stops at the first that fails."""
    if len(places) < 2:
        raise InvalidRequest("no_target", "There is one place only.", "Give what to copy, and where to.")
    *sources, target = map(place, places)
    copier = Copier(front, recursive=recursive, user=user, max_bytes=max_bytes)
    done = Transfer()
    with Interrupts():
        try:
            for source in sources:
                done = done.plus(copier.copy(source, target, into=len(sources) > 1))
        except Interrupted as error:
            return error.status
    if done.skipped:
        note(f"left out: {done.skipped} (links that lead out of the folder, devices, sockets and the like)")
    if front.json and not target.is_pipe:
        print_json(done)
    return 0


def upload_folder(sandbox: "Sandbox", folder: Path, target: str, user: str | None) -> None:
    """Copies the content of `folder` into the folder `target` of the sandbox, which is made where it is missing.

    Raises `InvalidRequest("no_folder")` when `folder` is none, and what an upload does.
    """
    if not folder.is_dir():
        raise InvalidRequest("no_folder", f"{folder} is not a folder.", "Give --copy the folder to copy.")
    with meter(Front(None, None, False), None) as progress:
        done = sandbox.files.upload(folder, target, progress=progress, user=user)
    if done.skipped:
        note(f"left out: {done.skipped} (neither file, folder nor link)")
