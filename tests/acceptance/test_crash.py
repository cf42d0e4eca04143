"""Any of our processes is killed while sandboxes run commands: nothing is lost, and what is shown is so."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from conftest import HATCHWAY, WITHIN_S, Service, make_service
from tests.support.pseudo_terminal import Person

from hatchway.client import Exit, Hatchway, HatchwayError, NotFound, Output, Sandbox

pytestmark = pytest.mark.vm

ROLES = {"control", "node", "launcher"}
COUNTER = "for i in $(seq 1 100000); do echo $i; sleep 0.05; done"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of its own: its processes are killed."""
    yield from make_service(tmp_path_factory)


def role_pids(service: Service) -> dict[str, int]:
    return dict(json.loads((service.data_dir / "run" / "roles.json").read_text()))


def all_roles(service: Service) -> dict[str, int]:
    """The processes of all roles, once all run."""
    wait_for(lambda: set(role_pids(service)) >= ROLES, what="all roles run")
    return role_pids(service)


def kill_roles(service: Service, victims: Iterable[str]) -> None:
    """Kills them, and waits until others are in their place."""
    before = all_roles(service)
    for name in victims:
        os.kill(before[name], signal.SIGKILL)
    wait_for(
        lambda: all(role_pids(service).get(name, before[name]) != before[name] for name in victims), what="restart"
    )
    all_roles(service)


def wait_for(condition: Callable[[], bool], within_s: float = 60, what: str = "") -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def answers(hatchway: Hatchway, sandbox: Sandbox) -> bool:
    try:
        return hatchway.sandboxes.get(sandbox.id).state == "running"
    except HatchwayError:
        return False


def vmm_pid(service: Service, sandbox_id: str) -> int:
    """The VMM: the child of the shim that the launcher recorded."""
    shim = json.loads((service.data_dir / "run" / "vm" / sandbox_id / "launch.json").read_text())["shim_pid"]
    return int(Path(f"/proc/{shim}/task/{shim}/children").read_text().split()[0])


@pytest.mark.parametrize(
    "victims", [("control",), ("node",), ("launcher",), ("control", "node", "launcher")], ids="+".join
)
def test_a_killed_role_changes_nothing(service: Service, victims: tuple[str, ...]) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        boot_id = sandbox.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout
        vmm = vmm_pid(service, sandbox.id)
        with sandbox.start(["bash", "-c", COUNTER]) as session:
            seen = b""
            for event in session:
                if isinstance(event, Output):
                    seen += event.data
                if seen.count(b"\n") >= 5:
                    break
            kill_roles(service, victims)
            for event in session:  # attaches again by itself, at its offset
                if isinstance(event, Output):
                    seen += event.data
                if seen.count(b"\n") >= 60:
                    break
            numbers = [int(line) for line in seen.split(b"\n")[:-1]]
            assert numbers == list(range(1, len(numbers) + 1))
        wait_for(lambda: answers(hatchway, sandbox), what="the sandbox is shown as running")
        assert vmm_pid(service, sandbox.id) == vmm
        assert sandbox.run(["cat", "/proc/sys/kernel/random/boot_id"]).stdout == boot_id


def test_a_command_goes_on_while_nobody_is_there(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        session = sandbox.start(["bash", "-c", "for i in $(seq 1 40); do echo $i; sleep 0.05; done; exit 3"])
        next(iter(session))
        session.close()
        kill_roles(service, ROLES)
        again = hatchway.sessions.get(session.id)
        output = b"".join(again.output("stdout"))
        assert output == b"".join(b"%d\n" % number for number in range(1, 41))
        assert again.wait().code == 3


def test_a_terminal_goes_on_when_the_node_was_killed(service: Service) -> None:
    with (
        service.client() as hatchway,
        hatchway.sandboxes.create() as sandbox,
        Person([*HATCHWAY, "shell", sandbox.id], service.environ, within_s=WITHIN_S) as person,
    ):
        person.until(b"$ ")
        person.press(b"answer=42\r")
        person.until(b"$ ")
        # Keys that are on their way in that moment may be lost: it is typed when the connection is known to be gone.
        kill_roles(service, ["node"])
        person.press(b"echo it is $answer; exit 5\r")
        person.until(b"it is 42")
        assert person.ended() == 5
        assert person.settings_now() == person.settings


def test_a_killed_vm_is_failed_and_can_be_started_on_its_disk(service: Service) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        sandbox.run(["bash", "-c", "echo kept > /home/user/file; sync"])
        session = sandbox.start(["sleep", "600"])
        events = iter(session)
        next(events)
        os.kill(vmm_pid(service, sandbox.id), signal.SIGKILL)
        exits = [event for event in events if isinstance(event, Exit)]
        assert [event.reason for event in exits] == ["sandbox_lost"]
        wait_for(lambda: sandbox.refresh().state == "failed", what="the sandbox is failed")
        assert "signal 9" in sandbox.refresh().reason
        sandbox.start_vm()
        assert sandbox.refresh().state == "running"
        assert sandbox.run(["cat", "/home/user/file"]).stdout == "kept\n"


@pytest.mark.parametrize(
    ("request_", "cause"),
    [("o", "guest_power_off"), ("b", "guest_reset"), ("c", "guest_reset")],
    ids=["power-off", "reboot", "panic"],
)
def test_a_guest_that_powers_off_is_stopped(service: Service, request_: str, cause: str) -> None:
    with service.client() as hatchway, hatchway.sandboxes.create() as sandbox:
        session = sandbox.start(["sudo", "sh", "-c", f"sync; echo {request_} > /proc/sysrq-trigger; sleep 60"])
        list(session)
        wait_for(lambda: sandbox.refresh().state in ("stopped", "failed"), what="the end is noticed")
        info = sandbox.refresh()
        assert (info.state, info.cause) == ("stopped", cause)


def test_a_killed_supervisor_leaves_the_sandboxes_running(service: Service) -> None:
    with service.client() as hatchway:
        sandbox = hatchway.sandboxes.create()
        vmm = vmm_pid(service, sandbox.id)
        pid = json.loads((service.data_dir / "endpoint.json").read_text())["pid"]
        roles = all_roles(service)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(Path(f"/proc/{role}").exists() for role in roles.values()), what="the roles end")
        assert Path(f"/proc/{vmm}").exists()
        up = service.up()
        assert up.returncode == 0, up.stderr
    with service.client() as hatchway:
        again = hatchway.sandboxes.get(sandbox.id)
        assert again.state == "running"
        assert vmm_pid(service, sandbox.id) == vmm
        assert again.run(["echo", "here"]).stdout == "here\n"
        again.delete()
        with pytest.raises((NotFound, HatchwayError)):
            again.run(["true"])


def test_down_leaves_nothing_and_the_disk_stays(service: Service) -> None:
    with service.client() as hatchway:
        sandbox = hatchway.sandboxes.create(name="kept")
        sandbox.run(["bash", "-c", "echo mine > file"])
        pids = [vmm_pid(service, sandbox.id), *all_roles(service).values()]
    down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list((service.data_dir / "run" / "vm").iterdir()) == []
    assert str(service.data_dir) not in Path("/proc/self/mountinfo").read_text()
    assert service.up().returncode == 0
    with service.client() as hatchway:
        again = hatchway.sandboxes.get(sandbox.id)
        wait_for(lambda: again.refresh().state == "stopped", what="the sandbox is shown as stopped")
        assert again.refresh().cause == "service_down"
        again.start_vm()
        assert again.run(["cat", "file"]).stdout == "mine\n"
        again.delete()
