"""What the roles are forked from: nothing of the command line in it, and set up what each of them would set up for itself."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from hatchway.control import main
from hatchway.control.config import ControlConfig
from hatchway.storage import migrations
from hatchway.supervisor import becoming, warming
from hatchway.supervisor.roles import Role
from hatchway.supervisor.settings import Settings

WITHIN_S = 30

_LOADED = """
import json, sys
from hatchway.supervisor import __main__ as program
from hatchway.supervisor import becoming
def run(self):
    from hatchway.supervisor import roles
    roles.preload()
    print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
with becoming.nothing_that_draws():
    from hatchway.supervisor import supervise
supervise.Supervisor.run = run
sys.exit(program.main(sys.argv[1:]))
"""


def test_no_command_line_is_in_what_the_roles_are_forked_from(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from hatchway.supervisor import becoming
from hatchway.supervisor.settings import Settings
execv = os.execv
os.execv = lambda path, argv: execv(path, [path, "-c", {_LOADED!r}, *argv[3:]])
becoming.supervisor(Settings(data_dir=Path({str(tmp_path)!r})), "text")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(json.loads(done.stdout))
    assert {"hatchway", "sqlalchemy", "cryptography", "structlog"} <= loaded
    assert not {"typer", "rich", "pygments", "pydantic", "alembic"} & loaded


def test_the_settings_arrive_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path, api_port=0, port_domains=("a.example", "localhost"))
    programs: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: programs.append(argv))
    becoming.supervisor(settings, "json")
    (argv,) = programs
    assert argv[1:3] == ["-m", "hatchway.supervisor"]
    assert argv[4:] == ["json"]
    assert becoming.handed_over(int(argv[3])) == settings


def test_what_is_warmed_works() -> None:
    warming.warm()


def test_a_database_is_brought_up_to_date_by_a_child(tmp_path: Path) -> None:
    config = ControlConfig(folder=tmp_path / "control", ballast_mib=0)
    main._migrate_apart(config)
    with sqlite3.connect(config.database.removeprefix("sqlite:")) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (migrations.HEAD,)


def test_a_role_on_demand_is_called_by_its_first_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        role = Role("x", os.geteuid(), tmp_path / "x.log", sockets=(listener,), on_demand=listener)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
        try:
            role.sleep()
            assert not role.is_called()
            with socket.create_connection(listener.getsockname()):
                assert signal.sigtimedwait([signal.SIGIO], WITHIN_S) is not None
                assert role.is_called()
                role.body = lambda ready: ready()
                role.start()
                assert not role.is_called()
                os.waitpid(role.pid, 0)
        finally:
            signal.sigtimedwait([signal.SIGIO], 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
