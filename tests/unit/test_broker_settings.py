"""The table `[broker]` of the settings file: what the documentation shows is read, and a mistake in it is told."""

import re
from pathlib import Path

import pytest

from hatchway.domain.errors import HatchwayError
from hatchway.supervisor import configuration

SHOWN = re.search(r"```toml\n(\[broker.*?)```", (Path(__file__).parents[2] / "docs/credentials.md").read_text(), re.S)
LENT = 'projects = ["default"]\nhosts = ["api.example"]\n'


def settings_of(folder: Path, text: str) -> configuration.Settings:
    (folder / "hatchway.toml").write_text(text)
    (folder / "hatchway.toml").chmod(0o600)
    return configuration.settings(folder)


def test_what_the_documentation_shows(tmp_path: Path) -> None:
    assert SHOWN is not None
    lending = settings_of(tmp_path, SHOWN[1]).lending
    assert lending.taken == ("TEAM_TOKEN",)
    assert lending.variables["TEAM_TOKEN"].hosts == ("api.example",)
    assert lending.files["deploy-key"].projects == ("*",)
    vault = lending.vaults["main"]
    assert vault.paths == {"default": ("secret/team",)}
    assert vault.role_id_file == "/var/lib/hatchway/broker/vault-role"
    assert vault.token_file is None


def test_paths_are_from_the_settings_file_on(tmp_path: Path) -> None:
    lending = settings_of(tmp_path, '[broker]\nmaster_key_file = "keys"\nmaster_key_variable = "KEY"\n').lending
    assert lending.master_key_file == str(tmp_path / "keys")
    assert lending.taken == ("KEY",)


@pytest.mark.parametrize(
    "text",
    [
        "[broker]\nkey = 1\n",
        "[broker.variables.A]\n" + LENT + "more = 1\n",
        '[broker.variables.A]\nprojects = []\nhosts = ["a.example"]\n',
        '[broker.variables.A]\nprojects = ["*"]\n',
        '[broker.variables."A B"]\n' + LENT,
        '[broker.files."../x"]\n' + LENT,
        '[broker.vaults.main]\naddress = "https://v.example"\nhosts = ["a.example"]\n',
        '[broker.vaults.main]\naddress = "vault"\nhosts = ["a.example"]\npaths = { a = ["x"] }\n',
    ],
)
def test_a_mistake_is_told_at_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(HatchwayError, match="config_invalid"):
        settings_of(tmp_path, text)
