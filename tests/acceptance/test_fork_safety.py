"""What is renewed in a branch and what programs keep: one test for each line of docs/fork-safety.md."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from conftest import Service

from hatchway.client import Hatchway, NotFound, Sandbox, Session

pytestmark = pytest.mark.vm

# A program that runs since before the fork, and does what it is asked from then on.
RUNNING = """
import glob, os, random, socket, time, traceback
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far, _ = listener.accept()
cached = open("/etc/machine-id").read()
random.random()
os.makedirs("/tmp/asked", exist_ok=True)
print("ready", flush=True)
while True:
    for name in glob.glob("/tmp/asked/*.py"):
        try:
            answer = str(eval(open(name).read()))
        except Exception:
            answer = traceback.format_exc()
        with open(name + ".new", "w") as file:
            file.write(answer)
        os.rename(name + ".new", name[:-3] + ".out")
        os.unlink(name)
    time.sleep(0.02)
"""
SSH_KEYGEN = "#!/bin/sh\nhead -c 16 /dev/urandom | sha256sum > /etc/ssh/ssh_host_ed25519_key\n"


@dataclass
class Family:
    """A source and two branches of one fork."""

    hatchway: Hatchway
    source: Sandbox
    branches: list[Sandbox]
    program: Session
    machine_id_before: str

    def each(self, command: str, user: str = "user") -> list[str]:
        """What a command says in each of the three."""
        return [one.run(command, user=user).check().stdout for one in (self.source, *self.branches)]

    def asked(self, expression: str) -> list[str]:
        """What the program that ran before the fork makes of an expression, in each of the three."""
        name = f"/tmp/asked/{uuid.uuid4().hex}"
        command = f"cat > {name}.tmp && mv {name}.tmp {name}.py && until [ -e {name}.out ]; do sleep 0.05; done; cat {name}.out"
        everyone = (self.source, *self.branches)
        return [one.run(command, stdin=expression, timeout=60).check().stdout for one in everyone]


@pytest.fixture(scope="module")
def family(service: Service) -> Iterator[Family]:
    with service.client() as hatchway, contextlib.ExitStack() as stack:
        source = stack.enter_context(hatchway.sandboxes.create(memory_mib=256, env={"WHO": "source"}))
        source.run(
            "mkdir -p /etc/ssh; cat > /usr/bin/ssh-keygen; chmod 755 /usr/bin/ssh-keygen", stdin=SSH_KEYGEN, user="root"
        )
        source.run("ssh-keygen -A", user="root").check()
        program = source.start(["python3", "-c", RUNNING])
        assert next(data for event in program if (data := getattr(event, "data", b""))) == b"ready\n"
        before = source.run("cat /etc/machine-id").stdout
        branches = [stack.enter_context(one) for one in source.fork(2, env={"WHO": "branch"})]
        assert len(branches) == 2
        yield Family(hatchway, source, branches, program, before)


def differ(values: list[str]) -> bool:
    return len(set(values)) == len(values) == 3


def test_kernel_random(family: Family) -> None:
    assert differ(family.each("head -c 16 /dev/urandom | sha256sum"))
    assert differ(family.asked("os.urandom(16).hex()"))


def test_new_program_random(family: Family) -> None:
    assert differ(family.each("python3 -c 'import random; print(random.random())'"))


def test_machine_id(family: Family) -> None:
    found = family.each("cat /etc/machine-id")
    assert differ(found)
    assert found[0] == family.machine_id_before


def test_host_name(family: Family) -> None:
    for names in (
        family.each("uname -n"),
        family.each("cat /etc/hostname"),
        family.asked("os.uname().nodename + chr(10)"),
    ):
        assert names == [f"{one.id}\n" for one in (family.source, *family.branches)]
    assert all("127.0.1.1" in line for line in family.each("getent ahosts $(uname -n)"))


def test_boot_id(family: Family, service: Service) -> None:
    shown = [str(one.refresh().boot_id) + "\n" for one in (family.source, *family.branches)]
    assert differ(shown)
    assert family.each("cat /proc/sys/kernel/random/boot_id") == shown
    with family.hatchway.sandboxes.create(memory_mib=256) as other:  # from the same baked snapshot
        boot_id = other.run("cat /proc/sys/kernel/random/boot_id").stdout
        assert boot_id not in shown
        other.suspend()
        other.restore()
        assert other.run("cat /proc/sys/kernel/random/boot_id").stdout == boot_id == f"{other.refresh().boot_id}\n"


def test_host_keys(family: Family) -> None:
    assert differ(family.each("cat /etc/ssh/ssh_host_ed25519_key", user="root"))


def test_wall_clock(family: Family) -> None:
    for one in (family.source, *family.branches):
        before = time.time()
        inside = float(one.run("date +%s.%N").stdout)
        assert before - 0.05 <= inside <= time.time() + 0.05


def test_environment(family: Family) -> None:
    assert family.each("echo $WHO") == ["source\n", "branch\n", "branch\n"]


def test_sessions(family: Family) -> None:
    for branch in family.branches:
        (theirs,) = [one for one in branch.sessions() if one.forked_from == family.program.id]
        assert theirs.id != family.program.id
    with pytest.raises(NotFound):
        family.hatchway.sessions.get("x" * 20)


def test_running_program_random(family: Family) -> None:
    assert len(set(family.asked("random.random()"))) == 1
    assert differ(family.asked("(random.seed(), random.random())[1]"))


def test_cached_values(family: Family) -> None:
    assert set(family.asked("cached")) == {family.machine_id_before}
    assert differ(family.asked("open('/etc/machine-id').read()"))


def test_running_environment(family: Family) -> None:
    assert family.asked("os.environ['WHO']") == ["source"] * 3


def test_process_ids(family: Family) -> None:
    assert len(set(family.asked("os.getpid()"))) == 1


def test_monotonic_clock(family: Family) -> None:
    source, *branches = (float(one) for one in family.asked("time.monotonic()"))
    assert all(abs(one - source) < 300 for one in branches)
    assert len(set(family.asked("time.clock_getres(time.CLOCK_MONOTONIC)"))) == 1


def test_loopback_connections(family: Family) -> None:
    assert family.asked("(near.send(b'hello'), far.recv(5))[1].decode()") == ["hello"] * 3
