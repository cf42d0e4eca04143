"""What an operator sees of a service with real sandboxes: metrics, logs that belong together, the table, and no secret in any of it."""

import json
import os
import secrets
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.acceptance.conftest import Service

from hatchway.client import Sandbox

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def sandbox(service: Service) -> object:
    with service.client() as client, client.sandboxes.create(name="seen") as made:
        yield made


def scrape(service: Service, which: str) -> dict[str, float]:
    url = json.loads((service.data_dir / "endpoint.json").read_text())[which]
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def log_lines(service: Service) -> list[dict[str, object]]:
    found = []
    for path in sorted((service.data_dir / "log").iterdir()):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def test_what_a_sandbox_uses_is_what_it_does(sandbox: Sandbox) -> None:
    before = sandbox.metrics()
    assert sandbox.run("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; head -c 8M /dev/urandom > kept; sync").ok
    after = sandbox.metrics()
    assert before.guest is not None
    assert after.guest is not None
    assert after.guest.cpu_user_s > before.guest.cpu_user_s
    assert after.host.cpu_s > before.host.cpu_s > 0
    assert after.host.disk_bytes >= before.host.disk_bytes + (4 << 20)
    assert after.guest.disk_free_bytes < before.guest.disk_free_bytes
    assert 0 < after.guest.memory_available_bytes < after.guest.memory_total_bytes <= 512 << 20
    running = sandbox.start(["sleep", "300"])
    counted = sandbox.metrics().guest
    running.delete()
    assert counted is not None
    assert counted.processes > 0
    assert after.guest.cpus >= 1
    assert after.host.memory_private_bytes > 1 << 20
    sandbox.pause()
    try:
        paused = sandbox.metrics()
        assert (paused.state, paused.guest) == ("paused", None)
        assert paused.host.cpu_s >= after.host.cpu_s
    finally:
        sandbox.resume()


def test_two_scrapes_see_every_process(service: Service, sandbox: Sandbox) -> None:
    control, node = scrape(service, "api"), scrape(service, "data")
    assert control['hatchway_sandboxes{state="running"}'] >= 1
    assert control['hatchway_operations_total{kind="create",status="succeeded"}'] >= 1
    assert node['hatchway_node_sandboxes{state="running"}'] >= 1
    assert node['hatchway_node_request_seconds_count{method="sandbox.create",result="ok"}'] >= 1
    assert node['hatchway_phase_seconds_count{phase="bake"}'] >= 1
    assert node["hatchway_launcher_up"] == 1
    assert node['hatchway_launcher_requests_total{verb="start_vm"}'] >= 1
    assert node['hatchway_slots{of="used"}'] >= 1
    assert node['hatchway_memory_bytes{of="promised"}'] > 0
    assert node['hatchway_data_requests_total{endpoint="Attach",status="200"}'] >= 1
    assert node['hatchway_data_bytes_total{direction="sent"}'] > 0
    for values in (control, node):
        assert values["hatchway_event_loop_lag_seconds_count"] > 0
        assert not any(sandbox.id in name for name in values)


def test_one_search_shows_the_way_of_a_request_through_all_processes(service: Service) -> None:
    request_id = f"test-{secrets.token_hex(6)}"
    body = json.dumps({"template": "seed:latest"}).encode()
    headers = {
        "authorization": f"Bearer {service.key}",
        "content-type": "application/json",
        "prefer": "wait=60",
        "x-request-id": request_id,
    }
    request = urllib.request.Request(f"{service.url}/v1/sandboxes", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["x-request-id"] == request_id
        made = json.load(answer)["sandbox"]["id"]
    done = service.run("rm", made)
    assert done.returncode == 0, done.stderr
    shown = service.run("journal", "--data-dir", str(service.data_dir), "--request", request_id, "--json")
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {line["role"] for line in lines} == {"control", "node", "launcher"}
    assert any(line["role"] == "launcher" and line["event"] == "start_vm" for line in lines)
    assert any(line["role"] == "node" and line["event"] == "sandbox.create" for line in lines)
    assert {line["sandbox_id"] for line in lines if "sandbox_id" in line} == {made}
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    plain = service.run("journal", "--data-dir", str(service.data_dir), "--sandbox", made, "--role", "launcher")
    assert b"start_vm" in plain.stdout
    assert b"control" not in plain.stdout


def test_no_secret_is_written_down(service: Service, sandbox: Sandbox) -> None:
    marker = f"secret-{secrets.token_hex(12)}"
    assert sandbox.run("true", env={"PASSWORD": marker}).ok
    assert sandbox.run(["sh", "-c", f"echo {marker}"]).ok
    with service.client() as client:
        key = client.keys.create("short-lived")
        client.keys.delete(key.id)
    bad = f"hw_{secrets.token_urlsafe(24)}"
    request = urllib.request.Request(f"{service.url}/v1/sandboxes", headers={"authorization": f"Bearer {bad}"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30)
    text = "".join(path.read_text() for path in (service.data_dir / "log").iterdir())
    text += (service.data_dir / "supervisor.log").read_text()
    for hidden in (service.key, key.key, bad, marker, "eyJ"):
        assert hidden not in text
    assert all({"role", "event", "level", "timestamp"} <= line.keys() for line in log_lines(service))


def test_the_table_of_what_is_used(service: Service, sandbox: Sandbox) -> None:
    done = service.run("top", "--once", "--json", "--interval", "0.5")
    assert done.returncode == 0, done.stderr
    told = {one["id"]: one for one in json.loads(done.stdout)["sandboxes"]}
    assert told[sandbox.id]["cpu_percent"] >= 0.0
    assert told[sandbox.id]["guest"]["memory_total_bytes"] > 0
    done = service.run("top", "--once", "--interval", "0.2")
    lines = done.stdout.decode().splitlines()
    assert lines[0].split()[:3] == ["SANDBOX", "NAME", "STATE"]
    assert any(line.startswith(f"{sandbox.id}  seen  running") for line in lines[1:])


def test_doctor_tells_what_the_node_warns_of(service: Service) -> None:
    found = json.loads(service.run("doctor", "--data-dir", str(service.data_dir), "--json").stdout)["findings"]
    node = [finding for finding in found if finding["name"] == "node"]
    warned = scrape(service, "data")["hatchway_warnings"]
    assert len([finding for finding in node if finding["status"] == "degraded"]) == warned
    assert node


def test_a_role_that_hangs_is_noticed(service: Service, sandbox: Sandbox) -> None:
    def pids() -> dict[str, int]:
        return dict(json.loads((Path(service.data_dir) / "run" / "roles.json").read_text()))

    before = pids()
    restarts = scrape(service, "api").get('hatchway_role_hung_total{role="node"}', 0.0)
    os.kill(before["node"], signal.SIGSTOP)
    until = time.monotonic() + 150
    while pids().get("node") in (before["node"], None):
        assert time.monotonic() < until, "the node hangs, and nobody minds"
        time.sleep(0.2)
    assert pids()["control"] == before["control"]
    assert scrape(service, "api")['hatchway_role_hung_total{role="node"}'] == restarts + 1
    assert sandbox.run("echo alive").stdout == "alive\n"
