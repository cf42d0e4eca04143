"""The template `seed`: what it is made of and the steps that make a release of it."""

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hatchway.domain.errors import HostExhausted, Unavailable
from hatchway.node.images import disk, files, host, initramfs, kernel, modules, rootfs
from hatchway.node.images.apt import Apt, Distribution, read_distribution
from hatchway.node.images.lock import exclusive
from hatchway.node.images.manifest import DEFAULT_TAG, FORMAT, MANIFEST_FILE, Manifest, Part
from hatchway.node.images.parts import CachedPart, PartCache, key_of
from hatchway.node.images.progress import BuildProgress, Report, silent
from hatchway.node.images.store import TEMPLATES, Images, Release, set_tag
from hatchway.wire.small_files import sync_folder

NAME = "seed"
DESCRIPTION = "Python 3 with pip and venv, git, curl, sudo; user `user`"
ARCHITECTURE = "x86_64"
CMDLINE = ""
"""The template adds nothing to the kernel command line of the VMM's driver."""

_FREE_BYTES = 1536 << 20
"""Free disk that making the base image needs: packages, root tree and image side by side."""
_UPPER_EPOCH = 1_767_225_600
_WAIT_S = 3600.0


def build_seed(
    folder: Path,
    agent: Path,
    *,
    tag: str = DEFAULT_TAG,
    refresh: bool = False,
    report: Report = silent,
    wait_s: float = _WAIT_S,
) -> Release:
    """Makes sure that the images folder has a release of `seed` with this agent, and that the tag points to it.

    What was made before is used again; only what changed is made anew, and `refresh` asks the distribution for newer
    packages. Must run as root, in the main thread, where something has to be made. Builders of one folder exclude each other;
    a waiter gives up after `wait_s` seconds.

    Raises `Unavailable` (`needs_root`, `missing_tools`, `unsupported_host`, `no_package_sources`, `tool_failed`,
    `build_busy`, `unsafe_folder`, `no_agent`, …) and `HostExhausted("host_disk_full")`.
    """
    try:
        data = agent.read_bytes()
    except OSError as error:
        raise Unavailable(
            "no_agent", f"The guest agent {agent} cannot be read: {error.strerror}.", "Build it: make -C guest agent."
        ) from error
    before = os.umask(0o022)
    try:
        _own_folder(folder)
        with exclusive(folder, report, within_s=wait_s) as shared:
            return _Build(folder, refresh, shared).release(data, tag)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(folder) from error
        raise
    finally:
        os.umask(before)


class _Build:
    def __init__(self, folder: Path, refresh: bool, report: Report) -> None:
        self._folder = folder
        self._refresh = refresh
        self._report = report
        self._distribution: Distribution = read_distribution()
        self._cache = PartCache(folder)
        self._apt: Apt | None = None

    def release(self, agent: bytes, tag: str) -> Release:
        self._cache.clean()
        started = time.monotonic()
        linux = self._kernel()
        base = self._base()
        upper = self._upper()
        with self._cache.work() as work:
            self._step("release", 0.0, "Putting the release together")
            initrd = work / "initrd"
            initrd.write_bytes(
                initramfs.make(agent, {part.file[3:-3]: linux.path(part.file).read_bytes() for part in _modules(linux)})
            )
            manifest = self._manifest(tag, linux, base, upper, initrd, key_of(agent))
            digest = manifest.digest()
            release = self._published(digest, work, manifest, (linux, base, upper), initrd)
            set_tag(self._folder, NAME, tag, digest)
        self._step("done", 1.0, f"{NAME}:{tag} is {digest} ({time.monotonic() - started:.1f} s)")
        return release

    def _published(
        self, digest: str, work: Path, manifest: Manifest, cached: tuple[CachedPart, ...], initrd: Path
    ) -> Release:
        images = Images(self._folder)
        final = self._folder / TEMPLATES / digest.removeprefix("sha256:")
        if final.is_dir():
            with contextlib.suppress(Unavailable):
                return images.resolve_digest(digest)
            final.rename(work / "damaged")
        made = work / "release"
        made.mkdir()
        initrd.rename(made / "initrd")
        for part in cached:
            for name in ("vmlinuz", "base.erofs", "packages.txt", "upper.raw"):
                with contextlib.suppress(KeyError):
                    files.place(part.path(name), made / name)
        (made / MANIFEST_FILE).write_bytes(manifest.encode())
        final.parent.mkdir(mode=0o755, exist_ok=True)
        sync_folder(self._folder)
        files.publish_folder(made, final, file_mode=0o644)
        release = images.resolve_digest(digest)
        release.verify()
        return release

    def _manifest(
        self, tag: str, linux: CachedPart, base: CachedPart, upper: CachedPart, initrd: Path, agent_digest: str
    ) -> Manifest:
        ramdisk = Part(file="initrd", sha256=files.sha256_file(initrd), size_bytes=initrd.stat().st_size)
        return Manifest(
            format=FORMAT,
            name=NAME,
            tag=tag,
            description=f"{self._distribution.name}: {DESCRIPTION}",
            architecture=ARCHITECTURE,
            kernel_release=linux.facts["release"],
            cmdline=CMDLINE,
            parts={
                "kernel": linux.part("vmlinuz"),
                "initrd": ramdisk,
                "base": base.part("base.erofs"),
                "packages": base.part("packages.txt"),
                "upper": upper.part("upper.raw"),
            },
            made_of={
                "distribution": self._distribution.name,
                "kernel_packages": linux.facts["packages"],
                "kernel_version": linux.facts["version"],
                "agent": agent_digest,
            },
            created_at=time.time(),
        )

    def _kernel(self) -> CachedPart:
        key = key_of(
            "kernel 1", self._distribution.id, self._distribution.codename, *modules.NEEDED, *modules.FOR_VSOCK
        )
        cached = self._cache.find("kernel", key)
        if cached is not None and not self._refresh:
            return cached
        self._prepare()
        self._step("kernel", None, "Looking for the newest kernel")
        apt = self._indexed()
        packages = kernel.find(apt)
        if (
            cached is not None
            and cached.facts["packages"] == " ".join(packages.names)
            and cached.facts["version"] == packages.version
        ):
            return cached
        with self._cache.work() as work:
            self._step("kernel", 0.1, f"Downloading {' '.join(packages.names)} {packages.version}")
            linux, downloaded = kernel.unpack(apt, packages, work / "package", lambda _line: None)
            self._step("kernel", 0.8, "Taking out kernel and modules")
            made = work / "made"
            made.mkdir()
            shutil.copyfile(linux.image, made / "vmlinuz")
            for number, (name, data) in enumerate(modules.collect(linux.modules).items()):
                (made / f"{number:02d}-{name}.ko").write_bytes(data)
            facts = {
                "release": linux.release,
                "packages": " ".join(packages.names),
                "version": packages.version,
                "downloaded_bytes": str(downloaded),
            }
            return self._cache.keep("kernel", key, made, facts)

    def _base(self) -> CachedPart:
        key = key_of("base 1", self._distribution.id, self._distribution.codename, rootfs.recipe_text())
        cached = self._cache.find("base", key)
        if cached is not None and not self._refresh:
            return cached
        self._prepare()
        if shutil.disk_usage(self._folder).free < _FREE_BYTES:
            raise _disk_full(self._folder)
        apt = self._indexed()
        with self._cache.work() as work:
            work.chmod(0o700)
            epoch = apt.release_time()
            self._step("root_tree", 0.0, f"Installing {self._distribution.name} into a root tree")
            installed = rootfs.make_tree(work / "root", work, apt, epoch, self._report)
            self._step("base_image", None, "Packing the base image")
            made = work / "made"
            made.mkdir()
            rootfs.pack(work / "root", made / "base.erofs", epoch)
            (made / "packages.txt").write_text("".join(f"{line}\n" for line in installed), encoding="utf-8")
            return self._cache.keep("base", key, made, {"packages": str(len(installed))})

    def _upper(self) -> CachedPart:
        key = key_of("upper 1", disk.recipe_text())
        cached = self._cache.find("upper", key)
        if cached is not None:
            return cached
        self._prepare()
        self._step("upper_disk", None, "Making the empty disk")
        with self._cache.work() as work:
            made = work / "made"
            made.mkdir()
            disk.make_upper(made / "upper.raw", _UPPER_EPOCH)
            return self._cache.keep("upper", key, made, {})

    def _prepare(self) -> None:
        if os.geteuid() != 0:
            raise Unavailable(
                "needs_root",
                "Building a template must be done as root: it installs packages into a root tree.",
                "Run the build with sudo, once; the node itself needs no root.",
            )
        host.require_build_tools()

    def _indexed(self) -> Apt:
        if self._apt is None:
            self._step("indexes", None, "Reading the distribution's package indexes")
            apt = Apt(self._folder / "apt", self._distribution)
            apt.refresh(lambda _line: None)
            self._apt = apt
        return self._apt

    def _step(self, phase: str, fraction: float | None, message: str) -> None:
        self._report(BuildProgress(phase=phase, fraction=fraction, message=message))


def _modules(linux: CachedPart) -> Iterator[Part]:
    return (part for part in linux.parts if part.file.endswith(".ko"))


def _own_folder(folder: Path) -> None:
    """Makes the images folder, or checks that nobody but us can write it."""
    if not folder.is_dir():
        folder.mkdir(parents=True, mode=0o755)
        folder.chmod(0o755)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise Unavailable(
            "unsafe_folder",
            f"The images folder {folder} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: others could change templates.",
            f"Make it yours alone: chown {os.geteuid()} {folder} && chmod 755 {folder}",
        )


def _disk_full(folder: Path) -> HostExhausted:
    free = shutil.disk_usage(folder).free >> 20
    return HostExhausted(
        "host_disk_full",
        f"The disk of {folder} has {free} MiB free; building a template needs {_FREE_BYTES >> 20} MiB.",
        "Free some space, or use another data folder.",
    )
