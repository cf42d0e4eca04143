"""A service whose control plane works on a PostgreSQL server, from `hatchway up` to a command in a sandbox."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.acceptance.conftest import ROOT, UP_WITHIN_S, WITHIN_S
from tests.support import baked, postgres

SECRET = "tell-nobody-of-it"


def hatchway(data_dir: Path, *arguments: str, within: float = WITHIN_S) -> "subprocess.CompletedProcess[str]":
    cache = os.environ.get("HATCHWAY_TEST_CACHE", str(ROOT / "build" / "test-cache"))
    environ = {name: value for name, value in os.environ.items() if name not in ("HATCHWAY_URL", "HATCHWAY_API_KEY")}
    environ.setdefault("HATCHWAY_IMAGES_DIR", str(Path(cache).absolute() / "images"))
    return subprocess.run(
        [sys.executable, "-m", "hatchway.cli.main", *arguments],
        env={**environ, "HATCHWAY_DATA_DIR": str(data_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )


def everything_of_processes() -> str:
    """The command lines of all processes that can be seen."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # it ended
    return "\n".join(found)


@pytest.mark.vm
def test_a_service_on_a_server_runs_commands_and_tells_nobody_the_password(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    data = tmp_path / "data"
    (tmp_path / "password").write_text(f"{SECRET}\n")
    (tmp_path / "password").chmod(0o600)
    (tmp_path / "hatchway.toml").write_text('database_password_file = "password"\n')
    with postgres.database_url() as url:
        ports = ("--api-port", "0", "--data-port", "0")
        settings = ("--config", str(tmp_path / "hatchway.toml"), "--database-url", url)
        try:
            up = hatchway(data, "up", "--detach", "--no-bake", *ports, *settings, within=UP_WITHIN_S)
            assert up.returncode == 0, up.stderr
            baked.lend(data)
            done = hatchway(data, "run", "--", "echo", "from a sandbox")
            assert (done.returncode, done.stdout) == (0, "from a sandbox\n"), done.stderr
            assert not (data / "control" / "hatchway.db").exists()
            assert SECRET not in everything_of_processes()
            for log in (data / "log").iterdir():
                assert SECRET not in log.read_text(errors="replace")
            copied = hatchway(
                data, "backup", str(tmp_path / "copy"), "--json", "--config", str(tmp_path / "hatchway.toml")
            )
            assert copied.returncode != 0
            assert "no_database" in copied.stdout + copied.stderr
        finally:
            down = hatchway(data, "down")
        assert down.returncode == 0, down.stderr


def test_a_password_on_the_command_line_is_refused(tmp_path: Path) -> None:
    refused = hatchway(tmp_path / "data", "up", "--json", "--database-url", f"postgresql://a:{SECRET}@db.example/x")
    assert refused.returncode != 0
    assert "database_url_invalid" in refused.stdout + refused.stderr
    assert SECRET not in refused.stdout + refused.stderr
