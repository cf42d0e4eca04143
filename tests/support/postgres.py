"""A real PostgreSQL server for tests: one per test process, on a Unix socket, made from the system's package and ended with it.

The server refuses root, so it runs as the package's user, or as `nobody`. Its folder is made once into the test cache and copied.
Nothing of it is durable: a test that kills a server itself asks for one that is.
"""

import atexit
import contextlib
import ctypes
import fcntl
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from hatchway.storage import migrations
from hatchway.storage.tables import metadata

WITHIN = 60.0
TEMPLATE = "hatchway_template"
_ROOT = Path(__file__).parents[2]
_PREFIX = "hwpg-"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


class PostgresServer:
    """A server that runs. `url(name)` is what `Database.open` takes."""

    def __init__(self, *, durable: bool = False) -> None:
        _sweep()
        # A socket's path ends at 108 octets.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        self._durable = durable
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._user = _unprivileged()
        _give(self.folder, self._user)
        self.folder.chmod(0o711)  # other users reach the socket
        data = self.folder / "data"
        _run(["cp", "-a", str(_initialised(self._user)), str(data)], self._user)

    def start(self) -> None:
        """Starts it; returns when it answers."""
        fast = (
            [] if self._durable else ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off"]
        )
        settings = [
            "-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}", "-c", "max_connections=200",
            "-c", "shared_buffers=32MB", "-c", "autovacuum=off", "-c", "logging_collector=off", *fast,
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", str(self.folder / "data"), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=_group(self._user),
                extra_groups=[] if os.geteuid() == 0 else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + WITHIN
        while True:
            try:
                psycopg.connect(self.conninfo("postgres")).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:]) from None
                time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Ends it: at once with what is in hand undone; SIGQUIT is a crash."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(WITHIN)

    def close(self) -> None:
        """Ends it and removes what it kept. Not in a child of the process that made it."""
        if os.getpid() == self._owner:
            self.stop(signal.SIGQUIT)
            shutil.rmtree(self.folder, ignore_errors=True)

    def conninfo(self, name: str) -> str:
        """How psycopg and the server's own programs reach a database."""
        return f"host={self.folder} user=hatchway dbname={name}"

    def url(self, name: str) -> str:
        """The URL of a database."""
        return f"postgresql://hatchway@/{name}?host={self.folder}"

    def make(self, template: str | None = None) -> str:
        """A new database; returns its name."""
        name = f"test_{next(_numbers)}"
        source = "" if template is None else f" TEMPLATE {template}"
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}{source}")
        return name

    def answers(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def clear(self, name: str) -> bool:
        """Removes every row of a database and whoever is still connected to it; much faster than to make a new one.

        Tells whether it can be used again.
        """
        with psycopg.connect(self.conninfo(name), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            stands_at = connection.execute("SELECT version_num FROM alembic_version").fetchall()
            if stands_at != [(migrations.HEAD,)]:
                return False
            with connection.transaction():
                for table in reversed(metadata.sorted_tables):
                    connection.execute(f"DELETE FROM {table.name}")
                connection.execute("ALTER SEQUENCE events_sequence_seq RESTART")
        return True


_emptied: list[str] = []
_server: PostgresServer | None = None
_has_template = False


def server() -> PostgresServer:
    """The server of this test process; ended when the process ends."""
    global _server
    if _server is None:
        _server = PostgresServer()
        atexit.register(_server.close)
        _server.start()
    return _server


@contextlib.contextmanager
def database_url(*, empty: bool = False) -> Iterator[str]:
    """The URL of a database without rows: migrated, or `empty`, without tables. Nobody else has it until the end."""
    global _has_template
    running = server()
    if empty:
        name = running.make()
    else:
        if not _has_template:
            _migrate(running)
            _has_template = True
        name = _emptied.pop() if _emptied else running.make(TEMPLATE)
    try:
        yield running.url(name)
    finally:
        if not empty and running.answers() and running.clear(name):
            _emptied.append(name)


def _migrate(running: PostgresServer) -> None:
    from hatchway.storage.server import Server, address

    with psycopg.connect(running.conninfo("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE}")
    one = Server(address(running.url(TEMPLATE), None), controller=None, writers=1, readers=1)
    one.open()
    one.close()


def _initialised(user: int | None) -> Path:
    """A folder as `initdb` leaves it, made once."""
    cache = Path(os.environ.get("HATCHWAY_TEST_CACHE", str(_ROOT / "build" / "test-cache"))).absolute() / "postgres"
    cache.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([program("postgres"), "-V"], capture_output=True, text=True, check=True).stdout.split()[2]
    made = cache / f"{version}-{user if user is not None else os.geteuid()}"
    with (cache / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            # Where the user of the server may write, and then beside the others: the cache's parents may be closed to him.
            with tempfile.TemporaryDirectory(prefix="hwpg-", dir="/tmp") as name:
                _give(Path(name), user)
                data = f"{name}/data"
                options = ["-U", "hatchway", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "-D", data]
                _run([program("initdb"), *options], user)
                subprocess.run(["cp", "-a", data, f"{made}.part"], check=True)
                Path(f"{made}.part").rename(made)
    # The server's user may not be able to reach the cache; root can, and hands it a copy.
    return made


def _run(command: list[str], user: int | None) -> None:
    if command[0] == "cp":
        subprocess.run(command, check=True, capture_output=True)
        return
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        cwd="/tmp",
        user=user,
        group=_group(user),
        extra_groups=[] if user else None,
    )


def _die_with_parent() -> None:
    """In the child, after it has its user: a test process that is killed leaves no server."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _sweep() -> None:
    """Removes what test processes left that were killed; their servers ended with them."""
    for left in Path("/tmp").glob(f"{_PREFIX}*-*"):
        number = left.name.removeprefix(_PREFIX).partition("-")[0]
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _give(folder: Path, user: int | None) -> None:
    if user is not None:
        os.chown(folder, user, _group(user) or 0)


def _unprivileged() -> int | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_uid
    raise RuntimeError("there is no user to run PostgreSQL as")


def _group(user: int | None) -> int | None:
    return None if user is None else pwd.getpwuid(user).pw_gid


def program(name: str) -> str:
    """Debian keeps the server's programs out of PATH, by version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    path = str(found[-1]) if found else shutil.which(name)
    if path is None:
        raise RuntimeError(f"{name} is missing; scripts/setup-system installs it")
    return path
