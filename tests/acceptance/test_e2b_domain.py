"""E2B's SDKs against a domain of the service's own, on a host with an internet of its own: certificates as `hatchway e2b certificate` makes
them, trusted as it says; and what network settings let a sandbox reach."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Service
from tests.support import baked, own_internet
from tests.support.own_internet import RESOLVER, OwnInternet

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

DOMAIN, PORT = "sbx.test", 7443
ONE, OTHER = "93.184.216.34", "8.8.8.8"
ONE_NAME, OTHER_NAME = "one.example", "other.example"
SDKS = ROOT / "build" / "e2b-sdks"
PROGRAMS = ROOT / "tests" / "acceptance" / "e2b" / "programs"
WITHIN_S = 600
Run = Callable[..., str]


@pytest.fixture(scope="module")
def internet() -> Iterator[OwnInternet]:
    """Names below the domain are the host itself; two others have web sites."""
    if lacking := own_internet.lacking():
        pytest.skip(lacking)
    made = OwnInternet(ONE, OTHER)
    made.zone = {f".{DOMAIN}": "127.0.0.1", ONE_NAME: ONE, OTHER_NAME: OTHER}
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(internet: OwnInternet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with the domain, and the environment of its clients."""
    service = Service(tmp_path_factory.mktemp("domain"), inside=internet.inside)
    made = service.run("e2b", "certificate", "--domain", DOMAIN, "--data-dir", str(service.data_dir), "--json")
    assert made.returncode == 0, made.stderr
    files = json.loads(made.stdout)
    settings = service.data_dir / "hatchway.toml"
    settings.write_text(
        f'[egress]\nname_servers = [{{ address = "{RESOLVER}" }}]\n'
        f'[e2b]\nport = {PORT}\ndomain = "{DOMAIN}:{PORT}"\ncertificate = "{files["certificate"]}"\nkey = "{files["key"]}"\n'
    )
    settings.chmod(0o600)
    up = service.up()
    assert up.returncode == 0, up.stderr.decode()
    try:
        with baked.alone():
            baked.lend(service.data_dir)
            first = service.run("run", "--", "true", timeout=WITHIN_S)
            assert first.returncode == 0, first.stderr
            baked.keep(service.data_dir)
        key = json.loads(service.run("keys", "create", "sdk", "--e2b", "--json").stdout)["key"]
        yield (
            service,
            {
                **service.environ,
                "E2B_API_KEY": key,
                "E2B_DOMAIN": f"{DOMAIN}:{PORT}",
                "SSL_CERT_FILE": files["ca"],
                "NODE_EXTRA_CA_CERTS": files["ca"],
            },
        )
    finally:
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


@pytest.fixture
def run(served: tuple[Service, dict[str, str]], internet: OwnInternet, tmp_path: Path) -> Run:
    """Runs a program with an SDK on the service's host; gives the last line that it wrote."""
    (tmp_path / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
    # A mount namespace of its own, so that nobody else's names are looked up there.
    within = 'mount --bind "$1" "$(readlink -f /etc/resolv.conf)" && shift && exec "$@"'
    before = [*internet.inside, "unshare", "--mount", "sh", "-c", within, "sh", str(tmp_path / "resolv.conf")]

    def run(sdk: str, program: str, *arguments: str) -> str:
        made = subprocess.run([str(ROOT / "scripts/setup-e2b-sdks"), sdk], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        interpreter = SDKS / sdk / ("node" if sdk == "javascript" else "bin/python")
        done = subprocess.run(
            [*before, str(interpreter), str(PROGRAMS / program), *arguments],
            env={**served[1], "E2B_SDK": str(SDKS / sdk)},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("sdk", "program", "uses"),
    [
        ("python-newest", "use_python.py", ("a_sandbox", "a_command", "a_port", "signed_urls")),
        ("javascript", "use_javascript.mjs", ("a sandbox", "a command", "a port", "signed URLs")),
    ],
)
def test_an_sdk_goes_by_names(run: Run, sdk: str, program: str, uses: tuple[str, ...]) -> None:
    results = json.loads(run(sdk, program, *uses))["results"]
    assert results
    assert set(results.values()) == {"ok"}, results


def test_network_settings_decide_what_a_sandbox_reaches(run: Run, internet: OwnInternet) -> None:
    """Given with the creation, and changed: by address and by name. What arrived outside is what counts."""
    tried = json.loads(run("python-newest", "use_network.py", ONE, OTHER, ONE_NAME, OTHER_NAME))
    passed = {key for key, status in tried.items() if status == "200"}
    assert passed == {"created-allowed", "updated-other", "named-allowed"}, tried
    assert internet.arrived == [(ONE, "/created-allowed"), (OTHER, "/updated-other"), (ONE, "/named-allowed")]
