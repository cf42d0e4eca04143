"""The build's cache of expensive parts, kept by what they are made of: the kernel, the base image, the empty disk."""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.node.images import files
from hatchway.node.images.manifest import Part
from hatchway.wire.small_files import replace_file

_INDEX = "part.json"
_KIND = re.compile(r"[a-z]{1,32}")


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    parts: tuple[Part, ...]
    facts: dict[str, str]


@dataclass(frozen=True)
class CachedPart:
    """A part that was made: its folder, its files in the order of their names, and facts about them."""

    folder: Path
    parts: tuple[Part, ...]
    facts: Mapping[str, str]

    def path(self, name: str) -> Path:
        """Returns one of its files. Raises `KeyError`."""
        return self.folder / self.part(name).file

    def part(self, name: str) -> Part:
        """Returns what is known of one of its files. Raises `KeyError`."""
        for part in self.parts:
            if part.file == name:
                return part
        raise KeyError(name)


def key_of(*inputs: str | bytes) -> str:
    """Returns a key for a part made of these inputs, in hex."""
    digest = hashlib.sha256()
    for item in inputs:
        data = item.encode() if isinstance(item, str) else item
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class PartCache:
    """Folders `cache/KIND-KEY`. Only whoever holds the build's lock may use it: there is one writer."""

    def __init__(self, folder: Path) -> None:
        self._cache = folder / "cache"
        self._work = folder / "work"

    def clean(self) -> None:
        """Removes what an interrupted build left."""
        files.remove_tree(self._work)
        for folder in (self._cache, self._work):
            folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def work(self) -> Iterator[Path]:
        """A folder for one step, removed at its end, whatever happens."""
        folder = Path(tempfile.mkdtemp(dir=self._work))
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            files.remove_tree(folder)

    def find(self, kind: str, key: str) -> CachedPart | None:
        """Returns the part when it is there and its files have their sizes; else None."""
        folder = self._folder(kind, key)
        try:
            index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index)
            if index.key != key or any((folder / part.file).stat().st_size != part.size_bytes for part in index.parts):
                return None
        except (OSError, msgspec.DecodeError):
            return None
        return CachedPart(folder, index.parts, index.facts)

    def keep(self, kind: str, key: str, made: Path, facts: Mapping[str, str]) -> CachedPart:
        """Takes over the folder `made` with the files of a part, in place of any other of this kind."""
        parts = tuple(
            Part(file=path.name, sha256=files.sha256_file(path), size_bytes=path.stat().st_size)
            for path in sorted(made.iterdir())
        )
        replace_file(made / _INDEX, msgspec.json.encode(_Index(key=key, parts=parts, facts=dict(facts))), mode=0o644)
        final = self._folder(kind, key)
        for old in self._cache.glob(f"{kind}-*"):
            doomed = Path(tempfile.mkdtemp(dir=self._work))
            old.rename(doomed / "old")
            files.remove_tree(doomed)
        files.publish_folder(made, final, file_mode=0o644)
        return CachedPart(final, parts, dict(facts))

    def _folder(self, kind: str, key: str) -> Path:
        if not _KIND.fullmatch(kind):
            raise ValueError(f"not a kind of part: {kind!r}")
        return self._cache / f"{kind}-{key[:32]}"
