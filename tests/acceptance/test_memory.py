"""Who has which secret in memory: each role its own, and a sandbox, its monitor and its gateway none."""

import base64
import http.client
import json
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Service
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from test_egress import NAME, Site, until
from tests.support.certificates import Authority
from tests.support.memory import found_in

from hatchway.client import Hatchway
from hatchway.client.errors import HatchwayError
from hatchway.supervisor.settings import SLOTS
from hatchway.supervisor.wrapper import HEALTHY, probe

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to read the memory of other users' processes"),
]

ENVIRONMENT = {
    "HATCHWAY_DATABASE_PASSWORD": "canary-database-password-0123456789",
    "PGPASSWORD": "canary-libpq-password-0123456789",
    "TEAM_TOKEN": "canary-team-token-0123456789",
}
WEBHOOK = "canary-webhook-secret-0123456789"
E2B = "canary-e2b-secret-0123456789abcdef0123456789"
STORED = "canary-stored-value-0123456789"
SETTINGS = """
[api]
port = 0
certificate = "api.pem"
key = "api.key"
[data]
port = 0
certificate = "data.pem"
key = "data.key"
[e2b]
enabled = true
port = 0
certificate = "e2b.pem"
key = "e2b.key"
secret_file = "e2b.secret"
[approvals]
webhook = "https://127.0.0.1:1/hook"
webhook_secret_file = "webhook.secret"
[broker.variables.TEAM_TOKEN]
projects = ["*"]
hosts = ["{name}"]
[egress]
shards = 2
trusted_ca_files = ["{ca}"]
[[egress.host_services]]
network = "127.0.0.1/32"
port = {port}
"""
ASK = """
import os, sys, urllib.request
for name in ("env", "stored"):
    fields = {"Authorization": "Bearer " + os.environ[name.upper() + "_TOKEN"]}
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + name, headers=fields), timeout=60) as answer:
        print(answer.status, answer.read().decode())
"""


class Tls(Service):
    """A service whose listeners speak TLS."""

    authority: Authority

    def client(self) -> Hatchway:
        return Hatchway(self.url, self.key, ca_file=str(self.authority.ca))


def key_forms(file: Path) -> tuple[bytes, ...]:
    """A private key as it may lie in memory: as text, and its number in either order of its octets."""
    text = file.read_bytes()
    key = load_pem_private_key(text, None)
    assert isinstance(key, EllipticCurvePrivateKey)
    number = key.private_numbers().private_value.to_bytes(32, "big")
    return text.split(b"\n")[2], number, number[::-1]


def raw_forms(key: bytes) -> tuple[bytes, ...]:
    return key, key.hex().encode(), base64.b64encode(key)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.close()


@pytest.fixture
def service(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tls]:
    service = Tls(tmp_path_factory.mktemp("secrets"))
    service.authority = Authority(service.data_dir / "tls", "roles")
    for name in ("api", "data", "e2b"):
        for path in service.authority.issue("127.0.0.1"):
            path.chmod(0o600)
            path.rename(service.data_dir / f"{name}{path.suffix}")
    for name, text in (("webhook", WEBHOOK), ("e2b", E2B)):
        (service.data_dir / f"{name}.secret").write_text(text + "\n")
        (service.data_dir / f"{name}.secret").chmod(0o600)
    settings = service.data_dir / "hatchway.toml"
    settings.write_text(SETTINGS.format(name=NAME, ca=site.authority.ca, port=site.port))
    settings.chmod(0o600)
    service.environ |= {"HATCHWAY_CA_FILE": str(service.authority.ca), **ENVIRONMENT}
    try:
        up = service.up()
        assert up.returncode == 0, up.stderr.decode()
        yield service
    finally:
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


def roles(service: Service) -> dict[str, int]:
    found: dict[str, int] = json.loads((service.data_dir / "run" / "roles.json").read_text())
    return found


def machines(service: Service) -> dict[str, int]:
    """The processes of sandboxes: of the users that machines have."""
    base = os.stat(f"/proc/{roles(service)['node']}").st_uid + 1
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if base <= entry.stat().st_uid < base + SLOTS:
                    found[f"machine {entry.name}"] = int(entry.name)
            except OSError:
                continue
    return found


def signing_keys(service: Service) -> dict[str, bytes]:
    with sqlite3.connect(f"file:{service.data_dir / 'control' / 'hatchway.db'}?mode=ro", uri=True) as database:
        rows = dict(database.execute("SELECT key, value FROM settings"))
    private = {key: json.loads(value)["private"] for key, value in rows.items() if "private" in value}
    assert len(private) == 2, "the keys that sign tokens and archives"
    keys = {f"key {name}": bytes.fromhex(text) for name, text in private.items()}
    (journal,) = (path for path in (service.data_dir / "audit").iterdir() if path.suffix == ".key")
    return {**keys, "key of the journal": bytes.fromhex(journal.read_text().strip())}


def test_each_role_has_its_own_secrets_in_memory_and_nobody_else_any(service: Tls, site: Site) -> None:
    document = site.policy()
    document["rules"][0]["credentials"] = ["env", "stored"]
    document["credentials"] = [
        {
            "id": name,
            "source": f"store:{name}",
            "expose": {"env": f"{name.upper()}_TOKEN"},
            "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}],
            "only": {"paths": [f"/ok/{name}"]},
        }
        for name in ("env", "stored")
    ]
    with service.client() as hatchway:
        hatchway.policies.put("lan", {"version": 1, "private_networks": ["127.0.0.1/32"]}, tier="project")
        hatchway.credentials.put("env", [NAME], variable="TEAM_TOKEN")
        hatchway.credentials.put("stored", [NAME], value=STORED)
        with hatchway.sandboxes.create(policy=document, timeout=300.0) as sandbox:
            ask = ["python3", "-c", ASK, f"https://{NAME}:{site.port}/ok/"]
            first = sandbox.run(ask)
            assert first.stdout.count("200 ") == 2, first.stdout + first.stderr
            # The control plane takes what is put through its hands; whoever is forked after that must not inherit anything of anybody.
            ask_e2b(service)
            before = roles(service)
            for name in ("control", "node", "egress-0", "egress-1", "e2b", "audit"):
                os.kill(before[name], signal.SIGKILL)
            until(lambda: not set(roles(service).values()) & {before["control"], before["node"], before["audit"]}, "")
            until(lambda: answers(hatchway), "the service did not come back")
            ask_e2b(service)
            again = sandbox.run(ask)
            assert again.stdout.count("200 ") == 2, again.stdout + again.stderr
            assert [told for _, _, told in site.arrived] == [
                f"Bearer {ENVIRONMENT['TEAM_TOKEN']}",
                f"Bearer {STORED}",
            ] * 2
            assert "canary" not in first.stdout + again.stdout

            everybody = {
                **roles(service),
                **machines(service),
                "supervisor": json.loads((service.data_dir / "endpoint.json").read_text())["pid"],
            }
            texts = {**ENVIRONMENT, "webhook": WEBHOOK, "e2b secret": E2B, "stored": STORED, "dev.key": service.key}
            wanted = {name: (text.encode(),) for name, text in texts.items()}
            wanted |= {f"TLS {name}": key_forms(service.data_dir / f"{name}.key") for name in ("api", "data", "e2b")}
            wanted |= {name: raw_forms(key) for name, key in signing_keys(service).items()}
            master = (service.data_dir / "broker" / "master.keys").read_bytes().strip()
            wanted["master key"] = (master, base64.b64decode(master))
            found = {name: found_in(pid, wanted) for name, pid in everybody.items()}

    assert any(name.startswith("machine") for name in found)
    control = {
        "HATCHWAY_DATABASE_PASSWORD",
        "webhook",
        "TLS api",
        *(name for name in wanted if name.startswith("key ")),
    }
    own = {
        "control": control - {"key of the journal"},
        "node": {"TLS data"},
        "broker": {"TEAM_TOKEN", "stored", "master key"},
        "audit": {"key of the journal"},
        "e2b": {"TLS e2b", "e2b secret"},
    }
    may = {"control": {"dev.key"}}
    strange = {name: names - own.get(name, set()) - may.get(name, set()) for name, names in found.items()}
    assert {name: names for name, names in strange.items() if names} == {}
    assert {name: names - found[name] for name, names in own.items()} == {name: set() for name in own}


def ask_e2b(service: Service) -> None:
    """Its role is started by whoever asks."""

    def healthy() -> bool:
        try:
            return probe(json.loads((service.data_dir / "endpoint.json").read_text())["e2b"]) == HEALTHY
        except (OSError, http.client.HTTPException):
            return False

    until(healthy, "the API of E2B does not answer")
    until(lambda: "e2b" in roles(service), "its role does not show")


def answers(hatchway: Hatchway) -> bool:
    try:
        return bool(hatchway.sandboxes.list())
    except HatchwayError:
        time.sleep(0.2)
        return False
