"""Secrets from a HashiCorp Vault, against a server that answers as its documentation says."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.broker_world import server_context
from tests.support.certificates import Authority
from tests.support.vault_server import VaultServer as Server

from hatchway.broker import vault
from hatchway.broker.config import VaultServer
from hatchway.broker.vault import Vault, check_path
from hatchway.domain.errors import Unavailable, Unprocessable
from hatchway.wire.broker import VaultPath

PATH = VaultPath(server="main", mount="secret", path="team/api", field="token")
VALUE = "c4n4ry-from-the-vault"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    made.secrets["/secret/team/api"] = {"token": VALUE, "number": 7}
    await made.start()
    yield made
    await made.stop()


def private(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content)
    path.chmod(0o600)
    return path


def vault_of(server: Server, folder: Path, **changes: Any) -> Vault:
    given: dict[str, Any] = {"token_file": private(folder, "token", "root-token\n"), **changes}
    return Vault(
        "main",
        VaultServer(address=server.address, paths={"*": ("secret",)}, hosts=("api.example",), within_s=5.0, **given),
    )


def with_role(folder: Path) -> dict[str, Any]:
    return {
        "token_file": None,
        "role_id_file": private(folder, "role", "role\n"),
        "secret_id_file": private(folder, "secret", "secret-id\n"),
    }


async def test_a_field_by_a_token(server: Server, tmp_path: Path) -> None:
    assert await vault_of(server, tmp_path).read(PATH) == VALUE.encode()
    assert "GET /v1/secret/data/team/api" in server.requests


async def test_a_token_file_that_changes_is_read_again(server: Server, tmp_path: Path) -> None:
    one = vault_of(server, tmp_path)
    await one.read(PATH)
    del server.tokens["root-token"]
    server.tokens["next"] = 0.0
    with pytest.raises(Unavailable, match="vault_denied"):
        await one.read(PATH)
    private(tmp_path, "token", "next")
    assert await one.read(PATH) == VALUE.encode()


async def test_a_namespace(server: Server, tmp_path: Path) -> None:
    server.secrets["team-a/secret/team/api"] = {"token": "of the namespace"}
    assert await vault_of(server, tmp_path, namespace="team-a").read(PATH) == b"of the namespace"


async def test_approle_logs_in_once_renews_and_logs_in_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = vault_of(server, tmp_path, **with_role(tmp_path))
    for _ in range(3):
        assert await one.read(PATH) == VALUE.encode()
    assert server.requests.count("POST /v1/auth/approle/login") == 1
    began = vault.time.monotonic()
    monkeypatch.setattr(vault.time, "monotonic", lambda: began + 3000)  # beyond two thirds of its life
    await one.read(PATH)
    assert server.requests.count("POST /v1/auth/token/renew-self") == 1
    monkeypatch.setattr(vault.time, "monotonic", lambda: began + 9000)  # beyond the renewed life
    await one.read(PATH)
    assert server.requests.count("POST /v1/auth/approle/login") == 2
    server.tokens.clear()  # revoked there
    assert await one.read(PATH) == VALUE.encode()
    assert server.requests.count("POST /v1/auth/approle/login") == 3


async def test_over_tls_the_server_is_verified(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "Vault authority")
    server = Server(server_context(authority, "127.0.0.1"))
    server.secrets["/secret/team/api"] = {"token": VALUE}
    await server.start()
    assert await vault_of(server, tmp_path, ca_file=authority.ca).read(PATH) == VALUE.encode()
    before = len(server.requests)
    with pytest.raises(Unavailable, match="vault_unreachable"):
        await vault_of(server, tmp_path).read(PATH)
    assert len(server.requests) == before
    await server.stop()


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"sealed": True}, "vault_sealed"),
        ({"secrets": {}}, "vault_no_secret"),
        ({"secrets": {"/secret/team/api": None}}, "vault_no_secret"),
        ({"secrets": {"/secret/team/api": {"other": "x"}}}, "vault_no_secret"),
        ({"secrets": {"/secret/team/api": {"token": 7}}}, "vault_no_secret"),
        ({"forbidden": {"/secret/team/api"}}, "vault_denied"),
        ({"tokens": {}}, "vault_denied"),
        ({"secrets": {"/secret/team/api": {"token": "x" * (2 << 20)}}}, "vault_unreachable"),
    ],
)
async def test_every_failure_says_what_it_is(
    server: Server, tmp_path: Path, state: dict[str, Any], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for name, value in state.items():
        setattr(server, name, value)
    with pytest.raises(Unavailable) as error:
        await vault_of(server, tmp_path).read(PATH)
    assert error.value.code == code
    assert error.value.remedy
    assert "root-token" not in str(error.value.as_dict()) + caplog.text


async def test_a_wrong_role_is_told(server: Server, tmp_path: Path) -> None:
    one = vault_of(server, tmp_path, **with_role(tmp_path))
    server.roles.clear()
    with pytest.raises(Unavailable, match="vault_denied"):
        await one.read(PATH)


async def test_a_standby_leads_nowhere(server: Server, tmp_path: Path) -> None:
    """The token would be sent to whoever a redirect names."""
    other = Server()
    other.secrets = dict(server.secrets)
    await other.start()
    server.standby = other.address
    with pytest.raises(Unavailable, match="vault_unreachable"):
        await vault_of(server, tmp_path).read(PATH)
    assert other.requests == []
    await other.stop()


async def test_one_that_is_silent_or_away(server: Server, tmp_path: Path) -> None:
    server.silent = True
    given = {"token_file": private(tmp_path, "token", "root-token"), "paths": {}, "hosts": ("api.example",)}
    slow = Vault("main", VaultServer(address=server.address, within_s=0.2, **given))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="vault_unreachable"):
        await slow.read(PATH)
    away = Vault("main", VaultServer(address="http://127.0.0.1:1", within_s=5.0, **given))  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="vault_unreachable"):
        await away.read(PATH)


async def test_a_token_that_others_can_read_is_not_used(server: Server, tmp_path: Path) -> None:
    one = vault_of(server, tmp_path)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(Unavailable, match="unsafe_file"):
        await one.read(PATH)
    assert server.requests == []


@pytest.mark.parametrize(
    "address", ["http://vault.example:8200", "ftp://127.0.0.1", "https://", "https://v.example/path", "vault.example"]
)
def test_addresses_that_are_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(Unprocessable, match="vault_address"):
        Vault("main", VaultServer(address=address, paths={}, hosts=(), token_file=tmp_path / "t"))


def test_a_server_without_a_way_to_log_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unprocessable, match="vault_address"):
        Vault("main", VaultServer(address="https://vault.example", paths={}, hosts=(), role_id_file=tmp_path / "r"))


@pytest.mark.parametrize(
    ("mount", "path", "field"),
    [
        ("..", "x", "f"),
        ("a", "../sys", "f"),
        ("a", "b//c", "f"),
        ("a", "b?version=1", "f"),
        ("a", "", "f"),
        ("a", "b", ""),
        ("a", "b#c", "f"),
        ("a", "b\r\nc", "f"),
        ("a", "%2e%2e", "f"),
    ],
)
def test_c18_paths_that_name_something_else(mount: str, path: str, field: str) -> None:
    with pytest.raises(Unprocessable, match="vault_path"):
        check_path(VaultPath(server="main", mount=mount, path=path, field=field))


def test_c18_a_project_reads_only_what_it_is_lent() -> None:
    server = VaultServer(
        address="https://v.example", hosts=(), paths={"a": ("secret/team-a", "kv"), "*": ("shared/all",)}
    )
    assert server.lends("a", "secret", "team-a/x")
    assert server.lends("a", "kv", "anything/deep")
    assert server.lends("b", "shared", "all/x")
    assert not server.lends("b", "secret", "team-a/x")
    assert not server.lends("a", "secret", "team-ab/x")
    assert not server.lends("a", "secret", "x")
    assert not server.lends("a", "shared", "alle")
