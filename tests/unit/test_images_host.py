"""Tools of the host: which packages they come in, and running them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hatchway.domain.errors import Unavailable
from hatchway.node.images import host


def test_output_and_lines() -> None:
    lines: list[str] = []
    text = host.run(["sh", "-c", "echo one; echo two >&2"], within_s=30, on_line=lines.append, keep_output=True)
    assert sorted(lines) == ["one", "two"]
    assert sorted(text.split()) == ["one", "two"]


def test_a_failure_shows_the_last_lines() -> None:
    with pytest.raises(Unavailable, match=r"(?s)sh ended with status 3.*line 99") as caught:
        host.run(["sh", "-c", "for i in $(seq 99); do echo line $i; done; exit 3"], within_s=30)
    assert "line 50" not in caught.value.cause


def test_a_tool_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match="tool_failed"):
        host.run(["hatchway-no-such-tool"], within_s=30)


def test_what_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(Unavailable, match="did not end within 0 s"):
        host.run(["sleep", "100"], within_s=0.2)
    assert time.monotonic() - started < 50


def test_nothing_of_the_builders_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCHWAY_SECRET", "s3cret")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    text = host.run(["env"], within_s=30, keep_output=True)
    assert "s3cret" not in text
    assert "https_proxy=http://proxy.example:3128" in text


@pytest.mark.parametrize("isolated", [False, True])
def test_a_tool_dies_with_a_killed_builder(tmp_path: Path, isolated: bool) -> None:
    if isolated and os.geteuid() != 0:
        pytest.skip("namespaces without root need a user namespace; builds run as root")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # On its own the tool itself ends with us; isolated, so does whatever it started.
    script = f"exec 3> {fifo}; echo up >&3; " + ("sleep 100 & wait" if isolated else "exec sleep 100")
    code = (
        f"from hatchway.node.images import host; host.run(['sh', '-c', {script!r}], within_s=100, isolated={isolated})"
    )
    builder = subprocess.Popen([sys.executable, "-c", code])
    try:
        with fifo.open() as reader:
            assert reader.readline() == "up\n"
            builder.send_signal(signal.SIGKILL)
            builder.wait()
            assert reader.read() == "", "end of file comes when the last holder of the pipe is gone"
    finally:
        builder.kill()
        builder.wait()


def test_missing_tools_name_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_find", lambda tool: None if tool == "mkfs.erofs" else f"/usr/bin/{tool}")
    with pytest.raises(Unavailable) as caught:
        host.require_build_tools()
    assert caught.value.code == "missing_tools"
    assert caught.value.remedy.endswith(" erofs-utils")
    assert [package.name for package in host.missing_packages()] == ["erofs-utils"]
