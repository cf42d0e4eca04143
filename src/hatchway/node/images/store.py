"""The releases of templates in an images folder, as the node reads them.

```
FOLDER/templates/DIGEST/   manifest.json, kernel, initrd, base.erofs, upper.raw     never changed once it is there
FOLDER/tags/NAME/TAG       the digest that the tag points to; replaced at once
FOLDER/cache/ work/ apt/   the build's own
```
"""

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError, NotFound, Unavailable
from hatchway.node.images import files
from hatchway.node.images.manifest import (
    FORMAT,
    MANIFEST_FILE,
    MAX_MANIFEST,
    Manifest,
    is_digest,
    is_name,
    is_tag,
    parse_reference,
)
from hatchway.node.vmm.seam import BootFiles
from hatchway.wire.node import TemplateRelease
from hatchway.wire.small_files import replace_file, sync_folder

TEMPLATES = "templates"
TAGS = "tags"
MAX_CHECKED = 256
_NEEDED = ("kernel", "initrd", "base", "upper")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Release:
    """One release of a template, complete in its folder."""

    folder: Path
    digest: str
    manifest: Manifest

    def part(self, name: str) -> Path:
        """Returns the file of a part, for example `base`. Raises `KeyError`."""
        return self.folder / self.manifest.parts[name].file

    def boot_files(self) -> BootFiles:
        """Returns what a VM boots from."""
        return BootFiles(
            kernel=self.part("kernel"),
            initrd=self.part("initrd"),
            base=self.part("base"),
            upper=self.part("upper"),
            cmdline=self.manifest.cmdline,
        )

    @property
    def release(self) -> TemplateRelease:
        """What other processes are told of it, with the tag that it was built for."""
        return TemplateRelease(
            name=self.manifest.name,
            tag=self.manifest.tag,
            digest=self.digest,
            size_bytes=sum(files.size_on_disk(self.part(name)) for name in self.manifest.parts),
            created_at=self.manifest.created_at,
            description=self.manifest.description,
        )

    def verify(self) -> None:
        """Reads every part and compares it with the manifest. Raises `Unavailable("template_damaged")` naming the first that differs."""
        for name, part in sorted(self.manifest.parts.items()):
            path = self.part(name)
            try:
                found = files.sha256_file(path)
            except OSError as error:
                raise _damaged(self.digest, f"{path.name} cannot be read: {error.strerror}") from error
            if found != part.sha256:
                raise _damaged(self.digest, f"{path.name} has digest {found}, not {part.sha256}")


class Images:
    """The releases under one folder. It reads the folder anew at each call: a build may add to it at any time."""

    def __init__(self, folder: Path, brought: Path | None = None) -> None:
        self.folder = folder
        self._brought = brought
        """Releases that came with archives, by digest; ours, where `folder` is another's. They have no tags."""
        self._checked: dict[str, tuple[int, Release]] = {}
        """Releases by digest, with the change time of the manifest that they were read from: a release never changes."""

    def list(self) -> tuple[TemplateRelease, ...]:
        """Returns what every tag points to, by name and tag. Tags whose release is damaged are left out."""
        found = []
        for name, tag in self._tags():
            try:
                found.append(msgspec.structs.replace(self._tagged(name, tag).release, tag=tag))
            except HatchwayError:
                continue
        return tuple(found)

    def resolve(self, reference: str) -> Release:
        """Returns the release behind `name`, `name:tag` or `name@sha256:…`.

        Raises `InvalidRequest("malformed_template")`, `NotFound("unknown_template")`, `Unavailable("template_damaged")`.
        """
        wanted = parse_reference(reference)
        if wanted.digest is None:
            assert wanted.tag is not None
            return self._tagged(wanted.name, wanted.tag)
        release = self.resolve_digest(wanted.digest)
        if release.manifest.name != wanted.name:
            raise self._unknown(reference)
        return release

    def resolve_digest(self, digest: str) -> Release:
        """Returns the release of this digest (`sha256:…`). Raises `NotFound("unknown_template")`, `Unavailable("template_damaged")`."""
        if not is_digest(digest):
            raise self._unknown(digest)
        folder = self.folder / TEMPLATES / digest.removeprefix("sha256:")
        if self._brought is not None and not folder.exists():
            folder = self._brought / digest.removeprefix("sha256:")
        try:
            changed_at = os.stat(folder / MANIFEST_FILE).st_ctime_ns
            known = self._checked.get(digest)
            if known is not None and known[0] == changed_at:
                self._check_parts(known[1])
                return known[1]
            with (folder / MANIFEST_FILE).open("rb") as file:
                data = file.read(MAX_MANIFEST + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise self._unknown(digest) from None
        except OSError as error:
            raise _damaged(digest, f"its manifest cannot be read: {error.strerror}") from error
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise _damaged(digest, f"its manifest is malformed: {error}") from error
        if manifest.format != FORMAT:
            raise _damaged(digest, f"its manifest has format {manifest.format}, this version reads {FORMAT}")
        if manifest.digest() != digest:
            raise _damaged(digest, "its manifest was changed")
        if any(name not in manifest.parts for name in _NEEDED):
            raise _damaged(digest, "its manifest lacks a part")
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        release = Release(folder, digest, manifest)
        self._check_parts(release)
        self._checked[digest] = (changed_at, release)
        return release

    @staticmethod
    def part_path(folder: Path, name: str) -> Path:
        """Where the file of a part lies below `folder`. Raises `Unavailable("template_damaged")` for a name that would lead out of it."""
        if not _PLAIN.fullmatch(name) or name == MANIFEST_FILE:
            raise _damaged("of the archive", f"its manifest names a file {name[:100]!r}")
        return folder / name

    def bring(self, work: Path, digest: str) -> Release:
        """Takes over a release that was unpacked in `work`, on the same file system. Raises `Unavailable("template_damaged")`, `OSError`."""
        assert self._brought is not None
        self._brought.mkdir(exist_ok=True, mode=0o755)
        target = self._brought / digest.removeprefix("sha256:")
        try:
            os.rename(work, target)
            sync_folder(self._brought)
            self.resolve_digest(digest).verify()
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return self.resolve_digest(digest)

    def _check_parts(self, release: Release) -> None:
        for part in release.manifest.parts.values():
            self._check(release.folder, release.digest, part.file, part.size_bytes)

    def _check(self, folder: Path, digest: str, name: str, size: int) -> None:
        if not _PLAIN.fullmatch(name):
            raise _damaged(digest, f"its manifest names a file {name[:100]!r}")
        try:
            found = os.lstat(folder / name)
        except OSError as error:
            raise _damaged(digest, f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise _damaged(digest, f"{name} is not the file of {size} octets that it should be")

    def _tagged(self, name: str, tag: str) -> Release:
        try:
            digest = (self.folder / TAGS / name / tag).read_text(encoding="ascii")[:200].strip()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            raise self._unknown(f"{name}:{tag}") from None
        return self.resolve_digest(digest)

    def _tags(self) -> tuple[tuple[str, str], ...]:
        tags = self.folder / TAGS
        if not tags.is_dir():
            return ()
        return tuple(
            (folder.name, path.name)
            for folder in sorted(tags.iterdir())
            if folder.is_dir() and is_name(folder.name)
            for path in sorted(folder.iterdir())
            if is_tag(path.name)
        )

    def _unknown(self, reference: str) -> NotFound:
        known = ", ".join(f"{name}:{tag}" for name, tag in self._tags()[:20])
        remedy = (
            f"There are: {known}." if known else "No template is built yet: start the service once, or run make demo."
        )
        return NotFound("unknown_template", f"There is no template {reference[:200]}.", remedy)


def _damaged(digest: str, why: str) -> Unavailable:
    return Unavailable(
        "template_damaged",
        f"The template release {digest} is damaged: {why}.",
        "Remove its folder below the images folder's templates and build it again.",
    )


def set_tag(folder: Path, name: str, tag: str, digest: str) -> None:
    """Points a tag to a release, at once and for good."""
    if not is_name(name) or not is_tag(tag) or not is_digest(digest):
        raise ValueError(f"not a tag: {name}:{tag} {digest}")
    tags = folder / TAGS / name
    if not tags.is_dir():
        tags.mkdir(parents=True, exist_ok=True)
        for path in (tags, tags.parent):
            path.chmod(0o755)
            sync_folder(path.parent)
    replace_file(tags / tag, f"{digest}\n".encode(), mode=0o644)
