"""`hatchway run` as a user types it: a command in a fresh virtual machine, as if it ran here."""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import HATCHWAY, Service

pytestmark = pytest.mark.vm


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_python_program(service: Service) -> None:
    done = service.run("run", "--", "python3", "-c", "print(6*7)")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"42\n", b"")
    assert service.sandboxes() == []


def test_it_is_another_machine(service: Service) -> None:
    here = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    done = service.run("run", "--", "sh", "-c", "cat /proc/sys/kernel/random/boot_id; uname -r; id -un; pwd")
    boot_id, kernel, user, folder = done.stdout.splitlines()
    assert boot_id != here.strip()
    assert kernel.decode() != os.uname().release
    assert (user, folder) == (b"user", b"/home/user")


def test_standard_error_is_apart(service: Service) -> None:
    done = service.run("run", "--", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -TERM $$", 143)],
)
def test_the_status_is_passed_on(service: Service, script: str, status: int) -> None:
    assert service.run("run", "--", "sh", "-c", script).returncode == status


def test_a_command_that_does_not_exist(service: Service) -> None:
    done = service.run("run", "--", "no-such-command")
    assert done.returncode == 127
    assert b"could not be started" in done.stderr


def test_a_timeout(service: Service) -> None:
    done = service.run("run", "--timeout", "1", "--", "sleep", "600")
    assert done.returncode == 124
    assert service.sandboxes() == []


def test_input_is_binary_and_has_an_end(service: Service) -> None:
    data = os.urandom(2_000_000)
    done = service.run("run", "--", "cat", input=data)
    assert done.returncode == 0, done.stderr
    assert done.stdout == data


def test_a_command_that_does_not_want_its_input(service: Service) -> None:
    done = service.run("run", "--", "true", input=b"x" * 3_000_000)
    assert (done.returncode, done.stderr) == (0, b"")


def test_much_output(service: Service) -> None:
    script = "import sys\nfor n in range(200): sys.stdout.buffer.write(bytes([n]) * 100_000)"
    done = service.run("run", "--", "python3", "-c", script)
    expected = b"".join(bytes([n]) * 100_000 for n in range(200))
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(expected).digest()


def test_environment_and_working_directory(service: Service) -> None:
    done = service.run(
        "run", "-e", "GREETING=hello world", "--workdir", "/tmp", "--", "sh", "-c", 'echo "$GREETING"; pwd'
    )
    assert done.stdout == b"hello world\n/tmp\n"


def test_size_and_name(service: Service) -> None:
    done = service.run(
        "run", "--vcpus", "2", "--memory", "384", "--name", "big", "--", "sh", "-c", "nproc; free -m | sed -n 2p"
    )
    assert done.returncode == 0, done.stderr
    vcpus, memory = done.stdout.decode().split("\n")[:2]
    assert vcpus == "2"
    assert 256 < int(memory.split()[1]) <= 384


def test_a_folder_goes_with_it(service: Service, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "greeting.py").write_text("def greet(): return 'hello from a file'\n")
    (tmp_path / "job.py").write_text("from lib.greeting import greet\nprint(greet())\n")
    (tmp_path / "again.py").symlink_to("job.py")
    done = service.run("run", "--copy", str(tmp_path), "--workdir", "/home/user/job", "--", "python3", "again.py")
    assert (done.returncode, done.stdout) == (0, b"hello from a file\n"), done.stderr


def test_keep(service: Service) -> None:
    done = service.run("run", "--keep", "--", "sh", "-c", "echo kept > file")
    assert done.returncode == 0
    (sandbox,) = service.sandboxes()
    try:
        assert sandbox["id"].encode() in done.stderr
        assert service.run("exec", sandbox["id"], "--", "cat", "file").stdout == b"kept\n"
    finally:
        assert service.run("rm", sandbox["id"]).returncode == 0
    assert service.sandboxes() == []


def test_times_are_shown(service: Service) -> None:
    done = service.run("run", "-v", "--", "true")
    for phase in (b"create: ", b"command: ", b"delete: "):
        assert b"hatchway: " + phase in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command(service: Service, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.1; done"
    with service.start(*HATCHWAY, "run", "--", "sh", "-c", script) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            assert process.stdout.readline() == f"got {name}\n".encode()
            assert process.wait(60) == 9
        finally:
            process.kill()
    assert service.sandboxes() == []


def test_twice_is_enough(service: Service) -> None:
    with service.start(
        *HATCHWAY, "run", "--", "sh", "-c", "trap 'echo no' INT; echo ready; while :; do sleep 0.1; done"
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"no\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert service.sandboxes() == []


def test_an_interrupt_at_any_moment_leaves_nothing_behind(service: Service) -> None:
    for delay_s in (0.0, 0.1, 0.2, 0.3, 0.5):
        with service.start(*HATCHWAY, "run", "--", "sleep", "600") as process:
            try:
                # What is tested is that the moment does not matter.
                time.sleep(0.15 + delay_s)
                process.send_signal(signal.SIGINT)
                if process.poll() is None:
                    time.sleep(0.1)
                    process.send_signal(signal.SIGINT)
                process.wait(60)
            finally:
                process.kill()
    wait_for(lambda: service.sandboxes() == [])


def test_wrong_values_are_explained(service: Service) -> None:
    done = service.run("run", "--memory", "1", "--", "true")
    assert done.returncode == 125
    assert b"memory_mib" in done.stderr
    assert b"  remedy: " in done.stderr
    done = service.run("run", "--template", "no-such-template", "--", "true")
    assert done.returncode == 125
    assert b"no-such-template" in done.stderr
    assert service.sandboxes() == []


def test_the_example_with_the_standard_library_alone(service: Service, tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "first_sandbox.py")
    command = (sys.executable, "-I", example, "--state", str(tmp_path / "state"), "--yes")
    with service.start(*command) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert b"3 squared is 9\n" in out
    assert b"I was written by the first command.\n" in out
    assert service.sandboxes() == []
    transcript = [json.loads(line) for line in (tmp_path / "state" / "transcript.jsonl").read_text().splitlines()]
    assert {line["name"] for line in transcript if line["kind"] == "event"} >= {"started", "stdout", "exit", "end"}


def test_the_example_goes_on_after_an_interrupt(service: Service, tmp_path: Path) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "first_sandbox.py")
    command = (sys.executable, "-I", example, "--state", str(tmp_path / "state"))
    with service.start(*command) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"Hello from")
        process.send_signal(signal.SIGINT)
        shown = process.stdout.read()
        assert process.wait(60) == 130
    (left,) = service.sandboxes()
    with service.start(*command) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (shown + out).startswith(b"1 squared is 1\n2 squared is 4\n3 squared is 9\n")
    assert [one["id"] for one in service.sandboxes()] == [left["id"]]  # nobody said yes
    with service.start(*command, "--cleanup") as process:
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert service.sandboxes() == []
