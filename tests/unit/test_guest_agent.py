"""The guest agent's own tests, in C under sanitizers: its codec, the whole agent on this host, and hostile input."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.native import built

GUEST = Path(__file__).parents[2] / "guest"


def _make(target: str, folder: Path, *variables: str, within_s: float) -> str:
    done = subprocess.run(
        ["make", "-s", "-C", str(GUEST), target, f"OUT={folder}", *variables],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_codec_and_agent_in_c(tmp_path: Path) -> None:
    said = _make("test", tmp_path, within_s=500)
    assert "ok a_reconnection_loses_nothing" in said
    assert said.splitlines()[-1] == "ok as_many_processes_as_there_may_be"


def test_hostile_input(tmp_path: Path) -> None:
    """Four seconds of it; `make -C guest fuzz SECONDS_=N SEED=N` goes on for longer."""
    _make("fuzz", tmp_path, "SECONDS_=4", "SEED=1", within_s=300)


def test_sandbox_binary_is_static_and_small() -> None:
    """It is copied into every guest's memory."""
    binary = built("guest", "agent") / "hatchway-agent"
    assert binary.stat().st_size < 400_000
    assert os.access(binary, os.X_OK)
    header = binary.read_bytes()[:65536]
    assert header.startswith(b"\x7fELF")
    assert b"/lib/ld-" not in header


def test_agent_says_how_it_is_used(tmp_path: Path) -> None:
    binary = built("guest", "host") / "hatchway-agent-host"
    done = subprocess.run([binary, "nonsense"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--host-mode SOCKET" in done.stderr
    long = tmp_path / ("x" * 120)
    done = subprocess.run([binary, "--host-mode", long], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "longer than" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_host_mode_ends_on_signal_and_removes_its_socket(tmp_path: Path, number: signal.Signals) -> None:
    socket, folder = tmp_path / "agent.sock", built("guest", "host")
    process = subprocess.Popen([folder / "hatchway-agent-host", "--host-mode", socket], stderr=subprocess.PIPE)
    try:
        with subprocess.Popen(["/bin/sh", "-c", f"until [ -S {socket} ]; do sleep 0.01; done"]) as waiting:
            assert waiting.wait(timeout=60) == 0
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
        assert not socket.exists()
    finally:
        process.kill()
        process.communicate()
