"""The service's secrets on their way to the roles: what is refused, what is left behind, and what reaches them."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificates import Authority

from hatchway.domain.errors import Forbidden, HatchwayError, Unprocessable
from hatchway.supervisor import secrets
from hatchway.supervisor.settings import Settings, Tls
from hatchway.supervisor.supervise import Supervisor
from hatchway.wire import handed

READ = """
import sys
sys.path[:0] = sys.argv[2:]
from hatchway.wire import handed
fds = handed.hand_over({"FIRST": ["A", "B"], "SECOND": ["C", "NEVER"], "THIRD": ["NEVER"]})
found = [handed.value(fds[name], one) for name, one in (("FIRST", "A"), ("FIRST", "B"), ("SECOND", "C"), ("SECOND", "A"))]
import os
print(found, sorted(fds), [name for name in "ABC" if name in os.environ], sys.argv[1])
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """With a secret of every kind."""

    def secret(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text + "\n")
        (tmp_path / name).chmod(0o600)
        return tmp_path / name

    certificate, key = Authority(tmp_path / "ca", "roles").issue("127.0.0.1")
    key.chmod(0o600)
    return Settings(
        data_dir=tmp_path,
        api_tls=Tls(certificate, key),
        database_password_file=secret("database", "päss word"),
        webhook_secret=secret("webhook", "0123456789abcdef"),
        e2b_secret=secret("e2b", "fedcba9876543210" * 2),
        metrics_token=secret("metrics", "a-token-of-the-metrics"),
    )


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_role_gets_what_was_in_the_files_when_they_were_taken_in(settings: Settings) -> None:
    before = open_files()
    taken = secrets.take(settings)
    for path in (settings.database_password_file, settings.webhook_secret, settings.e2b_secret):
        assert path is not None
        path.write_text("changed\n")
    assert taken.database_password(settings) == "päss word"
    assert taken.webhook_secret(settings) == b"0123456789abcdef"
    assert taken.secret_of_e2b(settings) == b"fedcba9876543210" * 2
    assert taken.api is not None
    assert taken.api.context().minimum_version >= 0x0303
    assert taken.metrics.token_hash is not None
    assert len(taken.descriptors("api", "data", "webhook")) == 3
    with pytest.raises(PermissionError):
        os.write(taken.descriptors("webhook")[0], b"x")
    taken.close()
    assert open_files() == before


@pytest.mark.parametrize("what", ["database", "webhook", "e2b", "ca/127.0.0.1.key", "metrics"])
@pytest.mark.parametrize("how", ["gone", "open", "empty", "large"])
def test_a_file_that_cannot_be_used_is_told_and_a_service_keeps_what_it_has(
    settings: Settings, tmp_path: Path, what: str, how: str
) -> None:
    told: list[dict[str, object]] = []
    service = Supervisor(settings, told.append)
    service._take_secrets()
    kept, before, file = service._secrets, open_files(), tmp_path / what
    match how:
        case "gone":
            file.unlink()
        case "open":
            file.chmod(0o644)
        case "empty":
            file.write_bytes(b"")
        case "large":
            file.write_bytes(b"x\n" * handed.MAX_OCTETS)
    with pytest.raises(Forbidden if how == "open" else Unprocessable) as refused:
        secrets.take(settings)
    assert str(file) in refused.value.cause or what.startswith("ca/")
    assert refused.value.remedy
    service._reload_secrets()
    assert refused.value.code in str(told[-1]["message"])
    assert service._secrets is kept
    assert service._secrets.webhook_secret(settings) == b"0123456789abcdef"
    assert open_files() == before
    kept.close()


def test_without_any_there_are_none(tmp_path: Path) -> None:
    taken = secrets.take(Settings(data_dir=tmp_path))
    assert taken.descriptors("api", "data", "e2b", "database", "webhook", "e2b_secret") == ()
    assert taken.webhook_secret(Settings(data_dir=tmp_path)) == b""
    assert taken.database_password(Settings(data_dir=tmp_path)) is None


def test_a_check_that_ends_in_the_middle_is_an_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hatchway.supervisor.profile.load_metrics", lambda _: os._exit(1))
    before = open_files()
    with pytest.raises(HatchwayError, match="secrets_unchecked"):
        secrets.take(settings)
    assert open_files() == before


def test_variables_of_several_roles_are_handed_over_apart(tmp_path: Path) -> None:
    environment = {**os.environ, "A": "first", "B": "", "C": "third"}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.execve(sys.executable, [sys.executable, "-c", READ, "argument", *sys.path], environment)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    assert said.strip() == "[b'first', b'', b'third', None] ['FIRST', 'SECOND'] [] argument"


def test_the_password_of_the_environment_is_ours_before_that_of_libpq(settings: Settings) -> None:
    fd = os.memfd_create("test")
    os.write(fd, b"PGPASSWORD=theirs\0HATCHWAY_DATABASE_PASSWORD=ours\0")
    without = replace(settings, database_password_file=None, database_environment=fd)
    assert secrets.Secrets().database_password(without) == "ours"
    os.close(fd)
