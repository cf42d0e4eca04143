"""Which database an installation has: what the settings may say, and that its password is nowhere to be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from hatchway.domain.errors import Forbidden, HatchwayError, Unprocessable
from hatchway.supervisor import configuration, database
from hatchway.supervisor.settings import Settings

URL = "postgresql://hatchway@db.example:5432/hatchway"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", database_url=URL)


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "postgres://hatchway@db.example/hatchway?sslmode=require",
        "postgresql://hatchway@/hatchway?host=/run/postgresql",
        "postgresql:///hatchway",
    ],
)
def test_urls_of_postgresql_are_taken(settings: Settings, url: str) -> None:
    database.check(replace(settings, database_url=url))


@pytest.mark.parametrize(
    "url",
    ["mysql://a@b/c", "postgresql://db.example", "postgresql://a@b:port/c", "postgresql://[", "hatchway.db", "x" * 9],
)
def test_others_are_refused(settings: Settings, url: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        database.check(replace(settings, database_url=url))
    assert refused.value.code == "database_url_invalid"


@pytest.mark.parametrize("url", ["postgresql://a:hidden@b/c", "postgresql://a@b/c?password=hidden"])
def test_a_password_in_the_url_is_refused_and_not_repeated(settings: Settings, url: str) -> None:
    with pytest.raises(Unprocessable) as refused:
        database.check(replace(settings, database_url=url))
    assert refused.value.code == "database_url_invalid"
    assert "hidden" not in f"{refused.value} {refused.value.remedy}"


@pytest.mark.parametrize("sslmode", ["", "?sslmode=require", "?sslmode=disable", "?host=/run/x,db.example"])
def test_production_reaches_no_other_host_unchecked(settings: Settings, sslmode: str) -> None:
    there = replace(settings, database_url=URL + sslmode)
    database.check(there)
    with pytest.raises(Forbidden) as refused:
        database.check(replace(there, profile="production"))
    assert refused.value.code == "database_unprotected"


@pytest.mark.parametrize(
    "url",
    [
        f"{URL}?sslmode=verify-full",
        "postgresql://a@127.0.0.1/c",
        "postgresql://a@localhost/c",
        "postgresql://a@[::1]/c",
        "postgresql://a@/c?host=/run/postgresql",
    ],
)
def test_production_takes_what_is_checked_or_on_this_host(settings: Settings, url: str) -> None:
    database.check(replace(settings, database_url=url, profile="production"))


def test_the_password_comes_from_a_private_file_or_the_environment(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database.password(settings) is None
    monkeypatch.setenv("HATCHWAY_DATABASE_PASSWORD", "from the environment")
    assert database.password(settings) == "from the environment"
    file = tmp_path / "password"
    named = replace(settings, database_password_file=file)
    for content, code in (
        (None, "database_password_unusable"),
        (b"", "database_password_unusable"),
        (b"two\nlines\n", "database_password_unusable"),
        (b"\xff\xfe", "database_password_unusable"),
        (b"x" * 5000, "database_password_unusable"),
    ):
        if content is not None:
            file.write_bytes(content)
            file.chmod(0o600)
        with pytest.raises(Unprocessable) as refused:
            database.password(named)
        assert refused.value.code == code
    file.write_bytes(b"p\xc3\xa4ss word\n")
    assert database.password(named) == "päss word"
    file.chmod(0o640)
    with pytest.raises(Forbidden) as open_to_others:
        database.password(named)
    assert open_to_others.value.code == "config_insecure"


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hatchway.toml").write_text(f'database_url = "{URL}"\ndatabase_password_file = "db.password"\n')
    found = configuration.settings(tmp_path)
    assert (found.database_url, found.database_password_file) == (URL, tmp_path / "db.password")
    monkeypatch.setenv("HATCHWAY_DATABASE_URL", "postgresql:///from_environment")
    assert configuration.settings(tmp_path).database_url == "postgresql:///from_environment"
    assert configuration.settings(tmp_path, database_url="postgresql:///named").database_url == "postgresql:///named"


def test_a_password_is_in_no_text_of_the_configuration() -> None:
    from hatchway.control.config import ControlConfig

    assert "hidden" not in repr(ControlConfig(folder=Path("x"), database_password="hidden"))


def test_every_refusal_has_a_remedy(settings: Settings) -> None:
    with pytest.raises(HatchwayError) as refused:
        database.check(replace(settings, database_url="x://"))
    assert refused.value.remedy
