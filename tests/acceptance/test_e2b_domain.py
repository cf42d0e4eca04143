"""E2B's SDKs against a domain of the service's own: certificates as `hatchway e2b certificate` makes them, trusted as it says."""

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import dns.message
import dns.rrset
import pytest
from conftest import ROOT, Service

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

DOMAIN = "sbx.test"
RESOLVER = "127.0.53.7"
SDKS = ROOT / "build" / "e2b-sdks"
PROGRAMS = ROOT / "tests" / "acceptance" / "e2b" / "programs"
WITHIN_S = 600


@pytest.fixture(scope="module")
def resolver() -> Iterator[str]:
    """A name server on loopback for which all names below the domain are this machine."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("programs get a name server of their own, which takes root")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((RESOLVER, 53))

    def serve() -> None:
        while True:
            data, peer = sock.recvfrom(4096)
            if not data:
                return
            query = dns.message.from_wire(data)
            answer = dns.message.make_response(query)
            name = query.question[0].name
            if query.question[0].rdtype == 1 and str(name).lower().endswith(f".{DOMAIN}."):
                answer.answer.append(dns.rrset.from_text(name, 30, "IN", "A", "127.0.0.1"))
            sock.sendto(answer.to_wire(), peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield RESOLVER
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", (RESOLVER, 53))
    thread.join()
    sock.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with the domain, and the environment of its clients."""
    service = Service(tmp_path_factory.mktemp("domain"))
    made = service.run("e2b", "certificate", "--domain", DOMAIN, "--data-dir", str(service.data_dir), "--json")
    assert made.returncode == 0, made.stderr
    files = json.loads(made.stdout)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = service.data_dir / "hatchway.toml"
    settings.write_text(
        f'[e2b]\nport = {port}\ndomain = "{DOMAIN}:{port}"\ncertificate = "{files["certificate"]}"\nkey = "{files["key"]}"\n'
    )
    settings.chmod(0o600)
    up = service.up()
    assert up.returncode == 0, up.stderr.decode()
    try:
        service.bake()
        with service.client() as hatchway:
            key = hatchway.keys.create("sdk", e2b=True).key
        yield (
            service,
            {
                **service.environ,
                "E2B_API_KEY": key,
                "E2B_DOMAIN": f"{DOMAIN}:{port}",
                "SSL_CERT_FILE": files["ca"],
                "NODE_EXTRA_CA_CERTS": files["ca"],
            },
        )
    finally:
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


@pytest.mark.parametrize("name", ["python-newest", "javascript"])
def test_an_sdk_goes_by_names(served: tuple[Service, dict[str, str]], resolver: str, tmp_path: Path, name: str) -> None:
    made = subprocess.run([str(ROOT / "scripts/setup-e2b-sdks"), name], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (tmp_path / "resolv.conf").write_text(f"nameserver {resolver}\n")
    folder = SDKS / name
    command = (
        [str(folder / "node"), str(PROGRAMS / "use_javascript.mjs"), "a sandbox", "a command", "a port", "signed URLs"]
        if name == "javascript"
        else [
            *(str(folder / "bin" / "python"), str(PROGRAMS / "use_python.py")),
            *("a_sandbox", "a_command", "a_port", "signed_urls"),
        ]
    )
    # A mount namespace of its own, so that nobody else's names are looked up there.
    inside = 'mount --bind "$1" "$(readlink -f /etc/resolv.conf)" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside, "sh", str(tmp_path / "resolv.conf"), *command],
        env={**served[1], "E2B_SDK": str(folder)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert results
    assert set(results.values()) == {"ok"}, results
