"""The bench of E2B's SDK says what it lacks."""

from pathlib import Path

import pytest

from hatchway.bench import e2b
from hatchway.bench.options import Options
from hatchway.domain.errors import NotFound, Unavailable


def test_without_the_sdk_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(e2b.PYTHON, str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="no_e2b_sdk") as refused:
        e2b.e2b(Options(tmp_path))
    assert "scripts/setup-e2b-sdks" in refused.value.remedy


def test_without_a_service_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(e2b.PYTHON, "/bin/true")
    with pytest.raises(NotFound, match="not_up"):
        e2b.e2b(Options(tmp_path))
