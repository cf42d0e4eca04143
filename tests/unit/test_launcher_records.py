import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hatchway.launcher import records
from hatchway.wire.launcher import VmRecord

RECORD = VmRecord(
    sandbox_id="a" * 20, generation=1, uid=2, slot=3, shim_pid=4, shim_starttime=5, host_boot_id="b", network=True
)


@pytest.fixture
def folder(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_a_record_is_read_as_it_was_written(folder: int, tmp_path: Path) -> None:
    assert records.read(folder) is None
    records.write(folder, RECORD)
    assert records.read(folder) == RECORD
    newer = msgspec.structs.replace(RECORD, generation=9)
    records.write(folder, newer)
    assert records.read(folder) == newer
    assert os.listdir(tmp_path) == ["launch.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"sandbox_id": 1}', msgspec.json.encode(RECORD)[:-1], b"\xff" * 5000]
)
def test_what_is_not_a_record_is_none(folder: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "launch.json").write_bytes(content)
    assert records.read(folder) is None


def test_a_link_is_not_followed(folder: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(msgspec.json.encode(RECORD))
    (tmp_path / "launch.json").symlink_to(tmp_path / "elsewhere")
    assert records.read(folder) is None
    (tmp_path / "launch.json.new").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        records.write(folder, RECORD)
    assert not (tmp_path / "target").exists()


def test_a_process_is_named_by_number_and_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = records.start_time(child.pid)
    assert started is not None
    pidfd = records.open_process(child.pid, started)
    assert pidfd is not None
    os.close(pidfd)
    assert records.open_process(child.pid, started + 1) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert records.start_time(child.pid) is None, "a zombie does not run"
    assert records.open_process(child.pid, started) is None
    child.wait()
    assert records.start_time(child.pid) is None
    assert records.open_process(child.pid, started) is None
    assert child.stdin is not None
    child.stdin.close()


def test_a_name_with_parentheses_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    try:
        ticks = records.start_time(child.pid)
        boot = float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")
        assert ticks is not None
        assert boot - 6000 < ticks <= boot + 1
    finally:
        child.kill()
        child.wait()
