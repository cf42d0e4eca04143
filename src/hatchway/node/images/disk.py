"""The empty upper disk: a sparse ext4 image that grows online, cheaply, to the largest disk that a sandbox may have."""

import uuid
from pathlib import Path

from hatchway.domain.shapes import MAX_DISK_MIB, MIN_DISK_MIB
from hatchway.node.images import host

_BLOCK = 4096
_WITHIN_S = 60.0

_FEATURES = (
    "none",
    "has_journal",
    "ext_attr",
    "resize_inode",
    "dir_index",
    "filetype",
    "extent",
    "64bit",
    "flex_bg",
    "sparse_super",
    "large_file",
    "huge_file",
    "dir_nlink",
    "extra_isize",
    "metadata_csum",
)

_MOUNT = "noinit_itable"
"""Default mount options, kept in the image: what growing adds is zeroed at once (a request without data to the device), not by a
kernel thread that would go on in every sandbox."""


def recipe_text() -> str:
    """Returns all that the image is made by, for the key of the cache."""
    return " ".join((*_FEATURES, *_options(), _MOUNT, str(MIN_DISK_MIB)))


def _options() -> tuple[str, ...]:
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, "upper.template.hatchway.example")
    # Descriptor blocks are reserved up to the largest disk, so that growing allocates them in place. The image's holes are
    # zeros already: nothing is left for the guest's kernel to initialise in the background of every sandbox.
    extended = f"resize={MAX_DISK_MIB * (1 << 20) // _BLOCK},lazy_itable_init=0,lazy_journal_init=0,nodiscard,hash_seed={identity},root_owner=0:0"
    return (
        "-b",
        str(_BLOCK),
        "-I",
        "256",
        "-i",
        "16384",
        "-m",
        "0",
        "-J",
        "size=16",
        "-U",
        str(identity),
        "-E",
        extended,
    )


def make_upper(image: Path, epoch: int) -> None:
    """Makes the image (`MIN_DISK_MIB` large) with the folders `root` and `work` for the overlay in it.

    `epoch` (Unix seconds) is the time of all that is in it; the same call gives the same image. Raises `Unavailable`.
    """
    with image.open("xb") as file:
        file.truncate(MIN_DISK_MIB << 20)
    env = {"E2FSPROGS_FAKE_TIME": str(epoch), "MKE2FS_CONFIG": "/dev/null"}
    host.run(
        ["mke2fs", "-q", "-F", "-t", "ext4", "-O", ",".join(_FEATURES), *_options(), image], within_s=_WITHIN_S, env=env
    )
    for folder in ("root", "work"):
        # Not by mke2fs's own -d: that takes over the change times of a source folder, which nobody can set.
        host.run(["debugfs", "-w", "-R", f"mkdir {folder}", image], within_s=_WITHIN_S, env=env)
    host.run(["tune2fs", "-E", f"mount_opts={_MOUNT}", image], within_s=_WITHIN_S, env=env)
    host.run(["fallocate", "--dig-holes", image], within_s=_WITHIN_S)
    host.run(["e2fsck", "-f", "-n", image], within_s=_WITHIN_S)
