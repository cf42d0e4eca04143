"""The processes that the supervisor starts: how one is forked or exec'ed, and how it says that it is ready."""

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.domain.errors import Unavailable
from hatchway.supervisor.becoming import nothing_that_draws
from hatchway.supervisor.logs import configure
from hatchway.supervisor.view import open_to_role

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
READY_WITHIN_S = 90.0
F_SETOWN_EX, F_OWNER_TID = 15, 0
"""Of fcntl(2)."""
M_ARENA_MAX = -8
"""Of mallopt(3): threads under one interpreter lock need no heaps of their own, and each would keep what it had at its peak."""
TRIM_EVERY_S = 15.0
"""How often memory that was freed is given back to the host: the library keeps what lies between pieces in use, some MiB after a busy spell."""
HUNG_AFTER_S = 30.0
"""A role that serves, and has not said for so long that it is alive, hangs. They say it every few seconds."""

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Role:
    """One process of ours: what it runs, as whom, with which descriptors."""

    name: str
    uid: int
    log_file: Path
    body: Callable[[Callable[[], None]], None] | None = None
    """Runs in a forked child with a function that says `ready`, and each time that it is called again that the role is alive; None for a
    role that is exec'ed."""
    argv: tuple[str, ...] = ()
    sockets: tuple[socket.socket, ...] = ()
    descriptors: tuple[int, ...] | Callable[[], tuple[int, ...]] = ()
    """Further ones that it keeps; asked for at each start where they may be others by then."""
    needs: tuple[Path, ...] = ()
    """Folders that the role must reach after it dropped its privileges."""
    on_demand: socket.socket | None = None
    """The one of `sockets` whose first connection it is started for; None: it is started with the service."""
    groups: tuple[int, ...] = ()
    """Groups that it is in besides its own: of the sockets of others that it may connect to."""
    asleep: bool = False
    """Whether it waits for its first connection."""
    pid: int = 0
    restarts: int = 0
    last_start: float = 0.0
    heard_at: float = 0.0
    """When it last said that it is alive, or was started (monotonic)."""
    serves: bool = False
    """Whether it has said so since its start."""
    _alive_fd: int = field(default=-1, repr=False)
    """Where it says so."""

    def sleep(self) -> None:
        """Leaves it to the first connection to start it: of that the kernel tells by SIGIO."""
        assert self.on_demand is not None
        self.asleep = True
        # To the thread that waits for it, and no other: it would end a process that does not.
        fcntl.fcntl(self.on_demand, F_SETOWN_EX, struct.pack("ii", F_OWNER_TID, threading.get_native_id()))
        _signal_io(self.on_demand, wanted=True)

    def is_called(self) -> bool:
        """Whether it sleeps and somebody has connected."""
        return self.asleep and self.on_demand is not None and bool(select.select([self.on_demand], [], [], 0)[0])

    def start(self) -> None:
        """Starts the process; `wait_ready` tells when it serves. Raises `OSError` when the host has no process left for it."""
        if self.asleep and self.on_demand is not None:
            self.asleep = False
            _signal_io(self.on_demand, wanted=False)
        if self._alive_fd >= 0:
            os.close(self._alive_fd)
            self._alive_fd = -1
        reading, writing = os.pipe()
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if pid == 0:
            try:
                os.close(reading)
                self._become(writing, supervisor)
            except BaseException:
                logging.getLogger(__name__).exception("%s died", self.name)
                os._exit(1)
            os._exit(0)
        os.close(writing)
        os.set_blocking(reading, False)
        self._alive_fd = reading
        self.pid = pid
        self.heard_at, self.serves = time.monotonic(), False

    def wait_ready(self, within: float = READY_WITHIN_S) -> None:
        """Waits until the role serves. Raises `Unavailable("role_failed")` with the end of its log."""
        select.select([self._alive_fd], [], [], within)
        self.listen()
        if self.serves:
            return
        raise Unavailable(
            "role_failed", f"The {self.name} process did not come up: {self._log_tail()}", f"See {self.log_file}."
        )

    def listen(self) -> None:
        """Takes up what the role has said since the last time."""
        with contextlib.suppress(BlockingIOError):
            if self._alive_fd >= 0 and os.read(self._alive_fd, 65_536):
                self.heard_at, self.serves = time.monotonic(), True

    def hangs(self) -> bool:
        """Whether it lives and has not said so for too long. Call `listen` before."""
        bound = HUNG_AFTER_S if self.serves else READY_WITHIN_S + HUNG_AFTER_S
        return self.pid != 0 and time.monotonic() - self.heard_at > bound

    def _log_tail(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "it wrote no log"
        return lines[-1][-2_000:] if lines else "it wrote no log"

    def _become(self, ready_fd: int, supervisor: int) -> None:
        """The child's side: own log, own user, dies with the supervisor."""
        signal.set_wakeup_fd(-1)
        for ours in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(ours, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.setsid()
        log_fd = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640)
        os.fchown(log_fd, self.uid if os.geteuid() == 0 else -1, -1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        if os.geteuid() == 0 and self.uid != 0:
            open_to_role((Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2], *self.needs))
            os.setgroups(self.groups)
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
            # No program that it starts gets more than it has: whoever takes a role over finds `su` and its like of no use.
            _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:  # it died before
            os._exit(1)
        further = self.descriptors() if callable(self.descriptors) else self.descriptors
        kept = {0, 1, 2, ready_fd, *(sock.fileno() for sock in self.sockets), *further}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                try:
                    os.close(number)
                except OSError:
                    continue  # the descriptor of the listing itself
        if self.body is None:
            for sock in self.sockets:
                sock.set_inheritable(True)
            os.set_inheritable(ready_fd, True)
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HATCHWAY_READY_FD": str(ready_fd)}
            os.execve(self.argv[0], self.argv, environment)
        configure(self.name)
        _libc.mallopt(M_ARENA_MAX, 1)
        os.set_blocking(ready_fd, False)
        trimmed = time.monotonic()

        def say_alive() -> None:
            nonlocal trimmed
            with contextlib.suppress(BlockingIOError):  # the supervisor has not listened for long
                os.write(ready_fd, b"1")
            if time.monotonic() - trimmed > TRIM_EVERY_S:
                trimmed = time.monotonic()
                _libc.malloc_trim(0)

        self.body(say_alive)

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Signals the process, if it lives."""
        if self.pid:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                self.pid = 0


def _signal_io(listener: socket.socket, *, wanted: bool) -> None:
    flags = fcntl.fcntl(listener, fcntl.F_GETFL)
    fcntl.fcntl(listener, fcntl.F_SETFL, flags | os.O_ASYNC if wanted else flags & ~os.O_ASYNC)


def preload() -> None:
    """Imports what the roles need, once, for all; and keeps the collector off what they share.

    Not what E2B's role needs alone: it sleeps until somebody asks for it, and loads that then.
    """
    with nothing_that_draws():
        import hatchway.audit.main
        import hatchway.broker.main
        import hatchway.control.main
        import hatchway.egress.main
        import hatchway.node.main  # noqa: F401
        from hatchway.supervisor.warming import warm

    warm()
    gc.collect()
    _libc.malloc_trim(0)
    gc.freeze()


def python_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """argv for a small role in an interpreter of its own."""
    return (sys.executable, "-I", "-m", module, *arguments)
