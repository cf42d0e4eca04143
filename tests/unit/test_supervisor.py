"""The supervisor's parts that need no service: listeners, log files, how a role is started."""

import ctypes
import errno
import io
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.certificates import Authority

from hatchway.domain.egress_settings import EgressSettings
from hatchway.domain.errors import Unavailable, Unprocessable
from hatchway.supervisor import folder, gateways, logs, roles, supervise
from hatchway.supervisor.roles import Role
from hatchway.supervisor.settings import SLOTS, Settings
from hatchway.wire import supervision, tracing

CLONE_NEWPID = 0x20000000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_is_listened_on_once(host: str) -> None:
    with folder.listen_tcp(host, 0) as sock, pytest.raises(Unavailable) as refused:
        folder.listen_tcp(host, sock.getsockname()[1])
    assert refused.value.code == "port_taken"


@pytest.fixture
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_OCTETS", 10)


def contents(file: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in file.parent.iterdir()}


@pytest.mark.usefixtures("short_logs")
def test_a_log_is_moved_on_and_its_writer_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "role.log"
    with file.open("ab", buffering=0) as writer:
        writer.write(b"0123456789")
        logs.keep_bounded(file)
        assert contents(file) == {"role.log": b"0123456789"}
        for round_ in range(5):
            writer.write(b"%d23456789ab" % round_)
            logs.keep_bounded(file)
        writer.write(b"next")
    newest = {f"role.log.{number + 1}": b"23456789ab" for number in range(logs.KEPT)}
    assert contents(file) == {"role.log": b"next", **newest}


@pytest.mark.usefixtures("short_logs")
def test_a_log_that_cannot_be_kept_is_emptied(tmp_path: Path) -> None:
    file = tmp_path / "role.log"
    file.write_bytes(b"x" * 100)
    (tmp_path / "role.log.1").mkdir()
    (tmp_path / "role.log.2").mkdir()
    (tmp_path / "role.log.2" / "full").touch()
    logs.keep_bounded(file)
    assert file.read_bytes() == b""


@pytest.mark.usefixtures("short_logs")
def test_no_other_file_is_cut_in_place_of_a_log(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100)
    (tmp_path / "role.log").symlink_to(other)
    logs.keep_bounded(tmp_path / "role.log")
    logs.keep_bounded(tmp_path / "missing.log")
    assert other.stat().st_size == 100


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, object]]]]:
    """The lines that were logged, as they come out; the process's own logging is as before afterwards."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logs.configure("test")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_says_what_it_belongs_to(written: Callable[[], list[dict[str, object]]]) -> None:
    with tracing.bound({"request_id": "one", "sandbox_id": "a b", "other": "x"}):
        logging.getLogger("hatchway.test").warning("it %s", "happened")
    try:
        raise OSError("the cause")
    except OSError:
        logging.getLogger("hatchway.test").exception("failed")
    first, second = written()
    assert {"role": "test", "event": "it happened", "level": "warning", "request_id": "one"}.items() <= first.items()
    assert "sandbox_id" not in first, "what another process sends is checked"
    assert "timestamp" in first
    assert "OSError: the cause" in str(second["exception"])


def test_what_is_written_has_no_secrets_and_a_bound(written: Callable[[], list[dict[str, object]]]) -> None:
    log = logging.getLogger("hatchway.test")
    secret = "".join(("hw_", "s3c", "ret" * 8))  # so that the line of source in the traceback is not what is found
    log.warning("key hw_%s of %s", "k3y" * 8, "Authorization: Bearer something-secret,")
    log.warning("token %s", "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl")
    try:
        raise ValueError(secret)
    except ValueError:
        log.exception("failed")
    log.warning("a guest said %s", "x" * 1_000_000 + "\n\x1b[31m")
    text = json.dumps(written())
    for hidden in ("k3y", "something-secret", "eyJ", secret):
        assert hidden not in text
    assert len(text) < 2 * logs.MAX_TEXT
    assert len(written()) == 4, "what somebody sends cannot begin a line of its own"


def test_lines_that_come_too_fast_are_counted(
    written: Callable[[], list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now))
    log = logging.getLogger("hatchway.test")
    log.handlers[:] = []
    for handler in logging.getLogger().handlers:
        handler.filters[:] = [logs.Flow()]
    for number in range(1_000):
        log.warning("flood %d", number)
    log.warning("something else")
    lines = written()
    assert len(lines) == logs.BURST_OF_ONE + 1
    assert lines[-1]["event"] == "something else"
    assert lines[-1]["suppressed"] == 1_000 - logs.BURST_OF_ONE
    now = logs.WINDOW_S
    log.warning("flood again")
    assert written()[-1]["event"] == "flood again"
    assert "suppressed" not in written()[-1]


def role(tmp_path: Path, body: Callable[[Callable[[], None]], None]) -> Role:
    return Role("test", os.geteuid(), tmp_path / "test.log", body=body)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives roles users of their own")
def test_a_role_with_a_user_of_its_own_gains_no_privileges(tmp_path: Path) -> None:
    def body(ready: Callable[[], None]) -> None:
        status = Path("/proc/self/status").read_text()
        if "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status and os.getresuid() == (54_321,) * 3:
            ready()

    one = Role("test", 54_321, tmp_path / "test.log", body=body)
    one.start()
    try:
        one.wait_ready()
    finally:
        os.waitpid(one.pid, 0)


def test_a_role_says_that_it_is_ready(tmp_path: Path) -> None:
    def body(ready: Callable[[], None]) -> None:
        ready()
        signal.pause()

    one = role(tmp_path, body)
    one.start()
    one.wait_ready()
    one.ask_to_end()
    assert os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]) == -signal.SIGTERM


def test_a_role_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    def body(_: Callable[[], None]) -> None:
        os.write(2, b"there is no room\n")
        raise OSError

    one = role(tmp_path, body)
    one.start()
    with pytest.raises(Unavailable, match="there is no room"):
        one.wait_ready()
    os.waitpid(one.pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a PID namespace")
def test_a_supervisor_that_is_the_first_process_of_a_container_starts_roles(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            if ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0 and os.fork() == 0:
                one = role(tmp_path, lambda ready: ready())
                one.start()
                one.wait_ready(10.0)
                os.write(writing, b"ready" if os.getpid() == 1 else b"not the first")
            else:
                os.wait()
        finally:
            os._exit(0)  # whatever happens: a second test run must not go on from here
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        assert told.read() == b"ready"
    os.waitpid(pid, 0)


class Reluctant:
    """A role that died, and that the host cannot start at once."""

    name, pid, restarts, last_start, asleep = "node", 0, 0, 0.0, False

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self.starts = 0

    def listen(self) -> None:
        pass

    def hangs(self) -> bool:
        return False

    def is_called(self) -> bool:
        return False

    def start(self) -> None:
        self.starts += 1
        if self.starts < 3:
            raise OSError(errno.EAGAIN, "no process is left")
        # To this thread, which blocks it: the test may run in a process that has others.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def test_a_service_goes_on_where_nothing_can_be_written_and_nothing_be_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "RESTART_PAUSE_S", 0.0)
    told = []

    def report(event: dict[str, object]) -> None:
        told.append(event)
        raise OSError(errno.ENOSPC, "full")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(supervise, "replace_file", full)
    settings = SimpleNamespace(run=tmp_path, supervisor_log=tmp_path / "supervisor.log")
    supervisor = supervise.Supervisor(settings, report)  # type: ignore[arg-type]
    role = Reluctant(tmp_path / "node.log")
    supervisor._roles = [role]  # type: ignore[list-item]
    dead = [[role]]
    monkeypatch.setattr(supervisor, "_reaped", lambda: dead.pop() if dead else [])
    former = signal.pthread_sigmask(signal.SIG_BLOCK, supervise._HANDLED)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGCHLD)
        assert supervisor._supervise() is signal.SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    assert role.starts == 3
    assert told[-1] == {"event": "restarted", "role": "node"}


def test_a_role_that_hangs_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "HUNG_AFTER_S", 0.5)
    monkeypatch.setattr(supervise, "LISTEN_EVERY_S", 0.05)

    def body(alive: Callable[[], None]) -> None:
        while True:
            alive()
            time.sleep(0.02)

    told: list[dict[str, object]] = []
    test = threading.get_ident()

    def report(event: dict[str, object]) -> None:
        told.append(event)
        if event["event"] == "restarted":
            signal.pthread_kill(test, signal.SIGTERM)

    supervisor = supervise.Supervisor(SimpleNamespace(run=tmp_path, supervisor_log=tmp_path / "supervisor.log"), report)  # type: ignore[arg-type]
    one = role(tmp_path, body)
    supervisor._roles = [one]
    former = signal.pthread_sigmask(signal.SIG_BLOCK, supervise._HANDLED)
    try:
        one.start()
        one.wait_ready()
        first = one.pid
        one.ask_to_end(signal.SIGSTOP)
        supervisor._listened_at = time.monotonic()
        assert supervisor._supervise() is signal.SIGTERM
        assert one.pid != first
        one.wait_ready()
        told_of = supervision.read(tmp_path)
    finally:
        one.ask_to_end(signal.SIGKILL)
        os.waitpid(one.pid, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    assert [(event["event"], event["role"]) for event in told] == [("hung", "test"), ("restarted", "test")]
    assert told[0]["pid"] == first
    assert told_of is not None
    assert (told_of.hung, told_of.restarts) == ({"test": 1}, {"test": 1})


def test_a_supervisor_that_was_away_itself_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "HUNG_AFTER_S", 30.0)
    told: list[dict[str, object]] = []
    supervisor = supervise.Supervisor(
        SimpleNamespace(run=tmp_path, supervisor_log=tmp_path / "supervisor.log"), told.append
    )  # type: ignore[arg-type]
    one = role(tmp_path, lambda alive: None)
    one.pid, one.serves, one.heard_at = os.getpid(), True, time.monotonic() - 1_000.0
    supervisor._roles = [one]
    supervisor._listened_at = time.monotonic() - 1_000.0
    supervisor._end_hung()
    assert not told
    assert not one.hangs()


def test_a_role_that_never_serves_hangs_after_a_while(tmp_path: Path) -> None:
    one = role(tmp_path, lambda alive: None)
    one.pid, one.heard_at = os.getpid(), time.monotonic() - roles.HUNG_AFTER_S - 1.0
    assert not one.hangs(), "a start may take longer"
    one.heard_at -= roles.READY_WITHIN_S
    assert one.hangs()


# -- gateways, broker, audit writer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives roles users of their own")
def test_each_role_has_a_user_of_its_own_and_sockets_only_for_its_callers(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data", egress=EgressSettings(shards=2))
    ids = settings.identity
    users = [ids.control, ids.node, ids.audit, ids.broker, *ids.egress]
    assert len(set(users)) == len(users)
    assert not set(users) & set(range(ids.vm_base, ids.vm_base + SLOTS))
    folder.prepare(settings)
    roles = {role.name: role for role in gateways.roles(settings)}
    try:
        assert {name: role.uid for name, role in roles.items()} == {
            "audit": ids.audit,
            "broker": ids.broker,
            "egress-0": ids.egress[0],
            "egress-1": ids.egress[1],
        }
        members = {uid: {uid} for uid in users} | {role.uid: {role.uid, *role.groups} for role in roles.values()}
        for uid in (ids.control, ids.node):
            members[uid] |= {ids.audit, ids.broker}

        def callers(name: str) -> set[int]:
            found = (settings.run / name).stat()
            assert stat.S_IMODE(found.st_mode) in (0o600, 0o660)
            by_group = bool(found.st_mode & 0o060)
            return {uid for uid in users if uid == found.st_uid or (by_group and found.st_gid in members[uid])}

        for shard in range(2):
            assert callers(f"egress-{shard}.sock") == callers(f"egress-{shard}.fds") == {ids.node}
        assert callers("broker.sock") == {ids.broker, ids.control, ids.node}
        assert callers("broker-leg.sock") == {ids.broker, *ids.egress}
        assert callers("audit.sock") == set(users)
        for name, owner in (("audit", ids.audit), ("broker", ids.broker)):
            found = (settings.data_dir / name).stat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (owner, 0o700)
    finally:
        for role in roles.values():
            for sock in role.sockets:
                sock.close()


def test_authorities_that_are_none_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("this is no certificate")
    for file in (wrong, tmp_path / "nowhere.pem"):
        settings = Settings(data_dir=tmp_path, egress=EgressSettings(trusted_ca_files=(str(file),)))
        with pytest.raises(Unprocessable, match="ca_unusable"):
            gateways.publish_trusted(settings)
    good = Authority(tmp_path / "pki", "outside").ca
    settings = Settings(data_dir=tmp_path, egress=EgressSettings(trusted_ca_files=(str(good),)))
    gateways.publish_trusted(settings)
    assert good.read_text() in (tmp_path / "run" / gateways.TRUSTED).read_text()
