import os
from pathlib import Path

import msgspec
import pytest

from hatchway.launcher import checks
from hatchway.launcher.errors import Refused
from hatchway.wire.launcher import StartVm

GOOD = StartVm(sandbox_id="abcdefghij0123456789", generation=1, argv=("/vmm", "-m", ""))
OWNERS = (os.geteuid(),)


@pytest.fixture
def root(tmp_path: Path):
    tmp_path.chmod(0o755)
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_accepts_a_start_with_files_pipes_and_sockets(root: int, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"")
    disk = os.open(tmp_path / "disk", os.O_RDWR)
    pipe = os.pipe()
    checks.check_start(GOOD, [root], OWNERS)
    checks.check_start(msgspec.structs.replace(GOOD, pass_as=(20, 99)), [root, disk, pipe[1]], OWNERS)
    for fd in (disk, *pipe):
        os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"sandbox_id": ""},
        {"sandbox_id": "abcdefghij012345678\n"},
        {"sandbox_id": "ABCDEFGHIJ0123456789"},
        {"generation": 2**53 + 1},
        {"argv": ()},
        {"argv": ("", "a")},
        {"argv": ("relative",)},
        {"argv": ("/vmm", "\0")},
        {"env": {"": "a"}},
        {"env": {"A\0": "a"}},
        {"env": {f"V{n}": "" for n in range(513)}},
        {"vcpus": -1},
        {"vcpus": 33},
        {"memory_limit_mib": 10**12},
        {"disk_limit_mib": 0},
        {"pass_as": (20,)},
    ],
)
def test_refuses(root: int, change: dict[str, object]) -> None:
    with pytest.raises(Refused) as refused:
        checks.check_start(msgspec.structs.replace(GOOD, **change), [root], OWNERS)
    assert refused.value.code == "invalid"


def test_refuses_ways_out_of_the_jail(root: int, tmp_path: Path) -> None:
    for path, flags in ((tmp_path, os.O_PATH), ("/", os.O_RDONLY), ("/dev/null", os.O_RDWR)):
        fd = os.open(path, flags)
        with pytest.raises(Refused, match="only files"):
            checks.check_start(msgspec.structs.replace(GOOD, pass_as=(20,)), [root, fd], OWNERS)
        os.close(fd)


def test_refuses_a_root_that_others_own_or_can_write(root: int, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        checks.check_start(GOOD, [root], (os.geteuid() + 1,))
    assert refused.value.code == "denied"
    tmp_path.chmod(0o775)
    with pytest.raises(Refused) as refused:
        checks.check_start(GOOD, [root], OWNERS)
    assert refused.value.code == "denied"


def test_a_root_counts_only_if_its_path_leads_to_it(tmp_path: Path) -> None:
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    fd = os.open(real, os.O_PATH | os.O_DIRECTORY)
    again = checks.reopen_root(fd)
    assert os.fstat(again).st_ino == real.stat().st_ino
    os.close(again)
    real.rename(tmp_path / "moved")
    again = checks.reopen_root(fd)  # the kernel knows the new name
    os.close(again)
    (tmp_path / "moved").rmdir()
    with pytest.raises(Refused, match="cannot be seen"):
        checks.reopen_root(fd)
    os.close(fd)
