"""What the profiles refuse before anything is started, the settings file, the range of user ids, and what systemd is told."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificates import Authority

from hatchway.domain.errors import Conflict, Forbidden, HatchwayError, Unprocessable
from hatchway.supervisor import configuration, folder, profile, service_manager, uids
from hatchway.supervisor.doctor import doctor
from hatchway.supervisor.settings import DEFAULT_UID_BASE, UID_RANGE, Settings, Tls

OUTSIDE = ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "sandboxes.example", ""]
TLS = Tls(Path("a.pem"), Path("a.key"))
root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data")


# -- listeners


@pytest.mark.parametrize("host", OUTSIDE)
@pytest.mark.parametrize("which", ["api", "data", "e2b"])
def test_a_listener_that_other_machines_reach_needs_production_and_tls(
    settings: Settings, host: str, which: str
) -> None:
    outside = replace(settings, **{f"{which}_host": host})  # type: ignore[arg-type]
    for one in (
        outside,
        replace(outside, api_tls=TLS, data_tls=TLS, e2b_tls=TLS),
        replace(outside, profile="production"),
    ):
        with pytest.raises(Forbidden, match="TLS") as refused:
            profile.check_listeners(one)
        assert refused.value.code == "not_loopback"
    profile.check_listeners(replace(outside, profile="production", **{f"{which}_tls": TLS}))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_neither(settings: Settings, host: str) -> None:
    profile.check_listeners(replace(settings, api_host=host, data_host=host, e2b_host=host))
    profile.check_listeners(replace(settings, api_host=host, data_host=host, e2b_host=host, profile="production"))


# -- TLS


def test_a_certificate_with_its_key_is_loaded(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "ours").issue("localhost")
    key.chmod(0o600)
    assert profile.load_tls(Tls(certificate, key)).minimum_version >= 0x0303


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "ours").issue("localhost")
    key.chmod(0o640)
    with pytest.raises(Forbidden, match="read by others") as refused:
        profile.load_tls(Tls(certificate, key))
    assert refused.value.code == "config_insecure"
    assert "chmod go-rwx" in refused.value.remedy


def test_files_that_are_no_certificate_and_key_are_refused(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "one", "ours").issue("localhost")
    _, other = Authority(tmp_path / "two", "others").issue("localhost")
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("x")
    for path in (key, other, nonsense):
        path.chmod(0o600)
    for pair in ((certificate, other), (nonsense, key), (certificate, nonsense), (tmp_path / "missing", key)):
        with pytest.raises(Unprocessable) as refused:
            profile.load_tls(Tls(*pair))
        assert refused.value.code == "tls_unusable"
        assert "PEM" in refused.value.remedy


# -- the data folder


def test_a_folder_of_production_gets_no_key_for_development(settings: Settings) -> None:
    production = replace(settings, profile="production")
    folder.prepare(settings)
    profile.check_folder(settings)
    profile.note(settings)
    profile.check_folder(production)
    profile.note(production)
    profile.check_folder(production)
    with pytest.raises(Forbidden) as refused:
        profile.check_folder(settings)
    assert refused.value.code == "production_folder"


@pytest.mark.parametrize("where", ["dev.key", "control/dev.key"])
def test_production_refuses_keys_made_for_development(settings: Settings, where: str) -> None:
    folder.prepare(settings)
    (settings.data_dir / where).write_text("hw_x")
    profile.check_folder(settings)
    with pytest.raises(Forbidden) as refused:
        profile.check_folder(replace(settings, profile="production"))
    assert refused.value.code == "development_keys"
    assert "keys revoke --development --offline" in refused.value.remedy


@pytest.mark.parametrize("name", ["control", "node"])
def test_production_refuses_state_that_others_can_read(settings: Settings, name: str) -> None:
    folder.prepare(settings)
    (settings.data_dir / name).chmod(0o750)
    profile.check_folder(settings)
    with pytest.raises(Forbidden) as refused:
        profile.check_folder(replace(settings, profile="production"))
    assert refused.value.code == "insecure_state"


@root
def test_production_refuses_state_of_somebody_else(settings: Settings) -> None:
    folder.prepare(settings)
    database = settings.control / "hatchway.db"
    database.touch()
    os.chown(database, 12345, 12345)
    with pytest.raises(Forbidden, match="12345") as refused:
        profile.check_folder(replace(settings, profile="production"))
    assert refused.value.code == "insecure_state"


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_could_exchange_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(Forbidden) as refused:
        folder.prepare(Settings(data_dir=tmp_path / "a" / "data"))
    assert refused.value.code == "unsafe_folder"
    tmp_path.chmod(0o1777)  # as /tmp is
    folder.prepare(Settings(data_dir=tmp_path / "a" / "data"))


@root
def test_a_folder_below_somebody_elses_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(Forbidden, match="12345") as refused:
        folder.prepare(Settings(data_dir=tmp_path / "data"))
    assert refused.value.code == "unsafe_folder"


def findings(capsys: pytest.CaptureFixture[str], settings: Settings) -> dict[str, tuple[str, str]]:
    doctor(settings, as_json=True)
    return {
        found["name"]: (found["status"], found["detail"]) for found in json.loads(capsys.readouterr().out)["findings"]
    }


def test_doctor_says_what_up_would_refuse(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(capsys, settings)["profile"][0] == "ok"
    outside = replace(settings, api_host="0.0.0.0")
    status, detail = findings(capsys, outside)["profile"]
    assert (status, "loopback" in detail) == ("missing", True)
    folder.prepare(settings)
    profile.note(replace(settings, profile="production"))
    assert "production service" in findings(capsys, settings)["profile"][1]


# -- the settings file

WHOLE = """
profile = "production"
allow_emulated = true
uid_base = 1910000000
bake = false

[api]
host = "0.0.0.0"
port = 443
certificate = "tls/api.pem"
key = "/etc/hatchway/api.key"
url = "https://api.sandboxes.example"

[data]
port = 8443

[limits]
memory_reserve_mib = 1024
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hatchway.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_a_whole_settings_file(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    found = configuration.settings(tmp_path)
    assert found.config == path
    assert (found.profile, found.allow_emulated, found.uid_base, found.bake) == ("production", True, 1910000000, False)
    assert (found.api_host, found.api_port, found.api_url) == ("0.0.0.0", 443, "https://api.sandboxes.example")
    assert found.api_tls == Tls(tmp_path / "tls/api.pem", Path("/etc/hatchway/api.key"))
    assert (found.data_host, found.data_port, found.data_tls) == ("127.0.0.1", 8443, None)
    assert found.limits.memory_reserve_mib == 1024


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    found = configuration.settings(
        tmp_path, profile="development", allow_emulated=False, bake=True, api_host="::1", api_port=0, data_port=1
    )
    assert (found.profile, found.allow_emulated, found.bake) == ("development", False, True)
    assert (found.api_host, found.api_port, found.data_port) == ("::1", 0, 1)
    bare = configuration.settings(tmp_path / "elsewhere")
    assert (bare.profile, bare.api_port, bare.data_port, bare.config) == ("development", 7070, 7071, None)


def test_the_api_of_e2b_has_a_port_of_its_own_and_can_be_left_out(tmp_path: Path) -> None:
    bare = configuration.settings(tmp_path)
    assert (bare.e2b, bare.e2b_host, bare.e2b_port) == (True, "127.0.0.1", 7080)
    # Whoever takes any port for the API gets any for this.
    assert configuration.settings(tmp_path, api_port=0).e2b_port == 0
    assert configuration.settings(tmp_path, api_port=0, e2b_port=7080).e2b_port == 7080
    assert not configuration.settings(tmp_path, e2b=False).e2b
    write(tmp_path, 'api = {port = 0}\n[e2b]\nenabled = false\nsecret_file = "s"\ndata_ca_file = "/ca.pem"\n')
    found = configuration.settings(tmp_path)
    assert (found.e2b, found.e2b_port) == (False, 0)
    assert (found.e2b_secret, found.e2b_data_ca) == (tmp_path / "s", Path("/ca.pem"))
    write(tmp_path, '[e2b]\nhost = "0.0.0.0"\n')
    with pytest.raises(HatchwayError, match="not_loopback"):
        profile.check_listeners(configuration.settings(tmp_path))
    profile.check_listeners(configuration.settings(tmp_path, e2b=False))


def test_a_settings_file_is_found_by_option_environment_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named.toml"
    assert configuration.find(None, tmp_path) is None
    usual = write(tmp_path, "")
    assert configuration.find(None, tmp_path) == usual
    monkeypatch.setenv("HATCHWAY_CONFIG", str(tmp_path / "by-environment.toml"))
    assert configuration.find(None, tmp_path) == tmp_path / "by-environment.toml"
    assert configuration.find(named, tmp_path) == named
    with pytest.raises(Unprocessable) as missing:
        configuration.settings(tmp_path, named)
    assert missing.value.code == "config_unreadable"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile = 'staging'", "profile"),
        ("colour = 1", "colour"),
        ("[api]\nprot = 1", "api.prot"),
        ("[api]\nport = 65536", "api.port"),
        ("[api]\nport = '80'", "api.port"),
        ("[data]\nurl = 'sandboxes.example'", "data.url"),
        ("[limits]\nmemory = 1", "limits.memory"),
        ("uid_base = 0", "uid_base"),
        ("port_domains = ['Ports.example']", "port_domains"),
        ("port_domains = ['-x.example']", "port_domains"),
        ("port_domains = ['ports.example']\n[data]\nurl = 'https://data.ports.example'", "under the domain of ports"),
        ("[api]\ncertificate = 'a.pem'", "without the other"),
        ("[api]\nkey = 'a.key'", "without the other"),
        ("profile = ", "at end of document"),
        ("# \x00", "line 1"),
        ("x = '" + "x" * 300_000 + "'", "octets"),
    ],
)
def test_a_settings_file_with_a_mistake_says_where(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, text)
    with pytest.raises(HatchwayError, match=words) as refused:
        configuration.settings(tmp_path)
    assert refused.value.code == "config_invalid"
    assert refused.value.remedy


def test_a_settings_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.chmod(0o664)
    with pytest.raises(Forbidden) as refused:
        configuration.settings(tmp_path)
    assert refused.value.code == "config_insecure"
    path.unlink()
    path.mkdir()
    with pytest.raises(Forbidden, match="not a file"):
        configuration.settings(tmp_path)


@root
def test_a_settings_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(write(tmp_path, ""), 12345, -1)
    with pytest.raises(Forbidden, match="12345"):
        configuration.settings(tmp_path)


# -- user ids


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(uids, "LOCKS", tmp_path / "locks")
    monkeypatch.delenv("HATCHWAY_UID_BASE", raising=False)
    return tmp_path / "locks"


@root
def test_two_installations_have_ranges_of_their_own(tmp_path: Path, locks: Path) -> None:
    one, other = (uids.claim(Settings(data_dir=tmp_path / name)) for name in ("one", "other"))
    assert one is not None
    assert other is not None
    assert abs(one.base - other.base) >= UID_RANGE
    one.release()
    other.release()
    assert list(locks.iterdir()) == []


@root
@pytest.mark.usefixtures("locks")
def test_an_installation_keeps_its_range_and_no_other_may_run_under_it(tmp_path: Path) -> None:
    first = uids.claim(Settings(data_dir=tmp_path / "one"))
    assert first is not None
    folder.prepare(Settings(data_dir=tmp_path / "one", uid_base=first.base))
    first.release()
    again = uids.claim(Settings(data_dir=tmp_path / "one"))
    assert again is not None
    assert again.base == first.base
    for base in (first.base, first.base + 1000, first.base - 1000):  # ranges that overlap with it
        with pytest.raises(Conflict) as refused:
            uids.claim(Settings(data_dir=tmp_path / "other", uid_base=base))
        assert refused.value.code == "uids_in_use"
    with pytest.raises(Unprocessable) as moved:
        uids.claim(Settings(data_dir=tmp_path / "one", uid_base=first.base + UID_RANGE))
    assert moved.value.code == "uid_base"
    again.release()
    uids.claim(Settings(data_dir=tmp_path / "other", uid_base=first.base)).release()  # type: ignore[union-attr]


@root
@pytest.mark.usefixtures("locks")
def test_ids_that_processes_have_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([1, 1, 2])
    monkeypatch.setattr(uids.random.SystemRandom, "randrange", lambda *_: next(drawn))
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(writing)
        os.setuid(DEFAULT_UID_BASE + UID_RANGE)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        while f"\t{DEFAULT_UID_BASE + UID_RANGE}\t" not in Path(f"/proc/{pid}/status").read_text():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        claim = uids.claim(Settings(data_dir=tmp_path / "data"))
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
    assert claim is not None
    assert claim.base == DEFAULT_UID_BASE + 2 * UID_RANGE
    claim.release()


@root
@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("named", ["", "x", "-1", "0", "99999999999"])
def test_a_range_by_environment_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("HATCHWAY_UID_BASE", named)
    if named == "":
        uids.claim(Settings(data_dir=tmp_path)).release()  # type: ignore[union-attr]
        return
    with pytest.raises(Unprocessable) as refused:
        uids.claim(Settings(data_dir=tmp_path))
    assert refused.value.code == "uid_base"


@root
def test_locks_in_somebody_elses_folder_are_refused(locks: Path, tmp_path: Path) -> None:
    locks.mkdir()
    os.chown(locks, 12345, -1)
    with pytest.raises(Forbidden):
        uids.claim(Settings(data_dir=tmp_path / "data"))


# -- systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@hatchway-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        service_manager.ready("serving")
        assert manager.recv(4096).decode().split("\n")[:2] == ["READY=1", "STATUS=serving"]
        service_manager.alive()  # no watchdog was asked for
        service_manager.stopping()
        assert manager.recv(4096) == b"STOPPING=1"
        assert service_manager.interval_s(60.0) == 60.0
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        service_manager.alive()
        assert manager.recv(4096) == b"WATCHDOG=1"
        assert service_manager.interval_s(60.0) == 10.0
        monkeypatch.setenv("WATCHDOG_PID", "1")  # it is somebody else's
        assert service_manager.interval_s(60.0) == 60.0


@pytest.mark.parametrize("name", [None, "", "relative", "/no/such/socket"])
def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if name is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", name)
    service_manager.ready("serving")
    service_manager.stopping()
