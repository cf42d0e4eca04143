"""A production service, as an operator starts it: TLS on both listeners, a key made while it is down, and what it refuses."""

import json
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import HATCHWAY, UP_WITHIN_S, Service
from tests.support import baked
from tests.support.certificates import Authority

from hatchway.client import Hatchway
from hatchway.client.errors import ConnectionFailed

pytestmark = pytest.mark.vm
CONFIG = """
profile = "production"
allow_emulated = true
bake = false
[api]
port = 0
certificate = "127.0.0.1.pem"
key = "127.0.0.1.key"
[data]
port = 0
certificate = "127.0.0.1.pem"
key = "127.0.0.1.key"
[e2b]
certificate = "127.0.0.1.pem"
key = "127.0.0.1.key"
"""


class Production(Service):
    """A service with a settings file; its clients trust `authority` and have `api_key`."""

    authority: Authority
    api_key: str

    @property
    def key(self) -> str:
        return self.api_key

    def renew(self, authority: Authority) -> None:
        """Another certificate, of another authority."""
        self.authority = authority
        for path in authority.issue("127.0.0.1"):
            path.chmod(0o600)
            (self.data_dir.parent / path.name).write_bytes(path.read_bytes())
            (self.data_dir.parent / path.name).chmod(0o600)
        self.environ["HATCHWAY_CA_FILE"] = str(authority.ca)

    def client(self) -> Hatchway:
        return Hatchway(self.url, self.key, ca_file=str(self.authority.ca))

    def up(self) -> "subprocess.CompletedProcess[bytes]":
        config = str(self.data_dir.parent / "hatchway.toml")
        arguments = ("up", "--data-dir", str(self.data_dir), "--config", config, "--detach")
        done = self.run(*arguments, timeout=UP_WITHIN_S)
        if done.returncode == 0:
            baked.lend(self.data_dir)
        return done


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Production]:
    folder = tmp_path_factory.mktemp("production")
    service = Production(folder / "data")
    (folder / "hatchway.toml").write_text(CONFIG)
    service.renew(Authority(folder / "first", "first"))
    try:
        made = service.run("keys", "create", "operator", "--scope", "read", "--scope", "write", "--scope", "admin",
                           "--offline", "--data-dir", str(service.data_dir))  # fmt: skip
        assert made.returncode == 0, made.stderr.decode()
        service.api_key = service.environ["HATCHWAY_API_KEY"] = made.stdout.decode().strip()
        up = service.up()
        assert up.returncode == 0, up.stderr.decode()
        yield service
    finally:
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


def test_a_command_runs_over_tls_on_both_listeners(production: Production) -> None:
    assert production.url.startswith("https://127.0.0.1:")
    done = production.run("run", "--", "echo", "over TLS")
    assert (done.returncode, done.stdout) == (0, b"over TLS\n"), done.stderr.decode()


def test_e2bs_api_reaches_sandboxes_over_tls(production: Production) -> None:
    """Also what it asks the data plane goes over TLS, under a certificate that no authority of the system has signed."""
    context = ssl.create_default_context(cafile=str(production.authority.ca))
    url = json.loads((production.data_dir / "endpoint.json").read_text())["e2b"]
    assert url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=url, verify=context, headers={"x-api-key": production.key}, timeout=120) as e2b:
        made = e2b.post("/v2/sandboxes", json={"templateID": "base"})
        assert made.status_code == 201, made.text
        sandbox_id = made.json()["sandboxID"]
        try:
            with production.client() as hatchway:
                hatchway.sandboxes.get(sandbox_id).start("cd /etc && python3 -m http.server 8000")
            through = {"e2b-sandbox-id": sandbox_id, "e2b-sandbox-port": "8000"}
            deadline = time.monotonic() + 120
            while (shown := e2b.get("/hostname", headers=through)).status_code == 502:  # until it listens
                assert time.monotonic() < deadline, shown.text
            assert (shown.status_code, shown.text.strip()) == (200, sandbox_id)
        finally:
            assert e2b.delete(f"/sandboxes/{sandbox_id}").status_code == 204


def test_no_key_is_made_for_development(production: Production) -> None:
    assert not (production.data_dir / "dev.key").exists()
    assert not (production.data_dir / "control" / "dev.key").exists()
    listed = production.run("keys", "list")
    assert b"development" not in listed.stdout
    without = {name: value for name, value in production.environ.items() if name != "HATCHWAY_API_KEY"}
    done = subprocess.run([*HATCHWAY, "ls"], env=without, capture_output=True, check=False)
    assert (done.returncode, b"key_missing" in done.stderr) == (1, True)


def test_plain_http_is_not_answered(production: Production) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(production.url.replace("https", "http") + "/healthz")


def test_a_certificate_of_another_authority_is_not_trusted(production: Production, tmp_path: Path) -> None:
    others = str(Authority(tmp_path, "others").ca)
    with Hatchway(production.url, production.key, ca_file=others) as client, pytest.raises(ConnectionFailed) as refused:
        list(client.sandboxes.list())
    assert refused.value.code == "not_trusted"
    assert "HATCHWAY_CA_FILE" in refused.value.remedy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_versions_of_tls_are_refused(production: Production) -> None:
    context = ssl.create_default_context(cafile=str(production.authority.ca))
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.HTTPError):
        httpx.get(production.url + "/healthz", verify=context)


def test_a_renewed_certificate_is_taken_up_without_a_stop(production: Production) -> None:
    before = pid(production)
    production.renew(Authority(production.data_dir.parent / "second", "second"))
    os.kill(before, signal.SIGHUP)
    context = ssl.create_default_context(cafile=str(production.authority.ca))
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(production.url + "/readyz", verify=context).status_code == 200
            break
        except (httpx.HTTPError, AssertionError):
            assert time.monotonic() < deadline, "the new certificate was not taken up"
            time.sleep(0.05)
    assert pid(production) == before
    assert production.run("ls").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--profile", "production"), "isolation_emulated"),
        (("--profile", "production", "--api-host", "0.0.0.0"), "not_loopback"),
        (("--api-host", "0.0.0.0"), "not_loopback"),
    ],
)
def test_what_a_profile_refuses_ends_the_start(
    production: Production, tmp_path: Path, arguments: tuple[str, ...], code: str
) -> None:
    if code == "isolation_emulated" and kvm_works(production):
        pytest.skip("KVM works here: nothing would be emulated")
    done = production.run("up", "--data-dir", str(tmp_path / "data"), "--api-port", "0", "--data-port", "0", *arguments)
    assert done.returncode == 1
    assert code.encode() in done.stderr
    assert b"remedy" in done.stderr


def test_a_development_folder_becomes_one_of_production_only_without_its_keys(
    production: Production, tmp_path: Path
) -> None:
    folder = ("--data-dir", str(tmp_path / "data"))
    ports = ("--api-port", "0", "--data-port", "0", "--no-bake")
    strict = ("--profile", "production", "--allow-emulated")
    own = {name: value for name, value in production.environ.items() if name not in ("HATCHWAY_API_KEY",)}

    def hatchway(*words: str) -> Any:
        return subprocess.run([*HATCHWAY, *words], env=own, capture_output=True, text=True, check=False, timeout=300)

    try:
        assert hatchway("up", "--detach", *folder, *ports).returncode == 0
        assert hatchway("down", *folder).returncode == 0
        refused = hatchway("up", "--detach", *folder, *ports, *strict)
        assert (refused.returncode, "development_keys" in refused.stderr) == (1, True), refused.stderr
        for name in ("dev.key", "control/dev.key"):  # whoever only removes the files leaves keys that work
            (tmp_path / "data" / name).unlink()
        refused = hatchway("up", "--detach", *folder, *ports, *strict)
        assert (refused.returncode, "development_keys" in refused.stderr) == (1, True), refused.stderr
        revoked = hatchway("keys", "revoke", "--development", "--offline", *folder)
        assert (revoked.returncode, len(revoked.stdout.split())) == (0, 1), revoked.stderr
        started = hatchway("up", "--detach", *folder, *ports, *strict)
        assert started.returncode == 0, started.stderr
        busy = hatchway("keys", "list", "--offline", *folder)
        assert (busy.returncode, "service_is_up" in busy.stderr) == (1, True)
        assert hatchway("down", *folder).returncode == 0
        refused = hatchway("up", "--detach", *folder, *ports)
        assert (refused.returncode, "production_folder" in refused.stderr) == (1, True), refused.stderr
    finally:
        hatchway("down", *folder)


def test_what_a_killed_service_left_is_ended_without_its_settings(production: Production) -> None:
    """The last one here: the service is down afterwards."""
    with production.client() as client:
        client.sandboxes.create()
    assert any((production.data_dir / "run" / "vm").iterdir())
    killed = pid(production)
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{killed}").exists() and "State:\tZ" not in Path(f"/proc/{killed}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (production.data_dir / "hatchway.toml").write_text("nonsense")
    down = production.run("down", "--data-dir", str(production.data_dir))
    assert down.returncode == 0, down.stderr.decode()
    assert b"left aside" in down.stderr
    assert not any((production.data_dir / "run" / "vm").iterdir())
    (production.data_dir / "hatchway.toml").unlink()


def pid(service: Service) -> int:
    return int(json.loads((service.data_dir / "endpoint.json").read_text())["pid"])


def kvm_works(service: Service) -> bool:
    found = json.loads(service.run("doctor", "--json", "--data-dir", str(service.data_dir)).stdout)["findings"]
    return any(finding["name"] == "kvm" and finding["status"] == "ok" for finding in found)
