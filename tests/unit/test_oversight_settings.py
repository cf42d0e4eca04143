"""The tables `[audit]` and `[approvals]` of the settings file, and the secret that one of them names."""

from pathlib import Path

import pytest

from hatchway.domain.errors import Forbidden, Unprocessable
from hatchway.supervisor import configuration

WHOLE = """
[audit]
keep_mib = 128
keep_days = 30

[approvals]
webhook = "https://hooks.example/hatchway"
webhook_secret_file = "webhook.secret"
"""


def write(folder: Path, text: str) -> Path:
    file = folder / configuration.NAME
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_they_are_read_and_the_secret_lies_beside_the_file(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    found = configuration.settings(tmp_path)
    assert (found.audit_kept.keep_mib, found.audit_kept.keep_days) == (128, 30)
    assert found.webhook == "https://hooks.example/hatchway"
    assert found.webhook_secret == tmp_path / "webhook.secret"
    usual = configuration.settings(tmp_path / "none")
    assert (usual.webhook, usual.webhook_secret, usual.audit_kept.keep_mib) == (None, None, 4096)


@pytest.mark.parametrize(
    "text",
    [
        '[approvals]\nwebhook = "https://hooks.example/x"',
        '[approvals]\nwebhook_secret_file = "x"',
        '[approvals]\nwebhook = "ftp://hooks.example/x"\nwebhook_secret_file = "x"',
        "[approvals]\nhook = 1",
        "[audit]\nkeep_mib = 1",
        "[audit]\nkeep_days = 0",
    ],
)
def test_half_of_it_or_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(Unprocessable) as caught:
        configuration.settings(tmp_path)
    assert caught.value.code == "config_invalid"
    assert caught.value.remedy


def test_the_secret_is_one_line_that_nobody_else_can_read(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(Unprocessable):
        configuration.read_secret(file)
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(Forbidden) as caught:
        configuration.read_secret(file)
    assert caught.value.code == "config_insecure"
    file.chmod(0o600)
    assert configuration.read_secret(file) == b"0123456789abcdef"
    for content in ("", "\n", "one\ntwo\n", "x" * 5000):
        file.write_text(content)
        with pytest.raises(Unprocessable) as refused:
            configuration.read_secret(file)
        assert refused.value.code == "secret_unusable"
