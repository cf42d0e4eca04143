"""The host end of the guest channel as the rest of the node sees it.

`GuestLink` (in `link.py`) keeps one connection to one sandbox's agent, reconnects and resynchronises after a loss for as
long as the VM lives, and gives each process's output to its `ProcessSink`. The protocol is docs/protocols/guest-channel.md.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class GuestError(Exception):
    """The agent refused; `errno` is its STATUS."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


class LinkLost(Exception):
    """The VM ended, or the agent does not answer within the bound."""


class ProcessState(enum.IntEnum):
    """STATE of a PROC frame."""

    RUNNING = 1
    EXITED = 2
    CLOSED = 3


class ExitReason(enum.IntEnum):
    """REASON of a PROC frame."""

    EXITED = 1
    SIGNALED = 2
    TIMEOUT = 3
    OOM = 4
    SPAWN_FAILED = 5


@dataclass(frozen=True, slots=True)
class Proc:
    """What the agent says of one process; offsets in octets, times in microseconds."""

    number: int
    key: str
    state: ProcessState
    pid: int | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    reason: ExitReason | None = None
    message: str = ""
    utime_us: int = 0
    stime_us: int = 0
    wall_us: int = 0
    max_rss_kib: int = 0
    stdout_total: int = 0
    stderr_total: int = 0
    stdin_offset: int = 0


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one process tree may use; None is the agent's default. What is exceeded ends the tree or fails the call, as the protocol says."""

    memory_bytes: int | None = None
    cpu_ms: int | None = None
    """CPU time of the whole tree, in milliseconds."""
    nofile: int | None = None
    """Open files of one process."""
    pids: int | None = None
    """Processes and threads of the tree at one time."""
    fsize_bytes: int | None = None
    """The largest file that a process may write."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """One process to start; `number` is the host's (1 ≤ number < 2**30), `key` unique in the sandbox for ever.

    With `builtin`, `argv[0]` names a program inside the agent.
    """

    number: int
    key: str
    argv: Sequence[str | bytes]
    env: Mapping[str, str]
    cwd: str | None = None
    user: str | None = None
    stdin: bool = True
    pty: tuple[int, int] | None = None
    merge_stderr: bool = False
    timeout_ms: int = 0
    timeout_leader: bool = False
    """The timeout kills the leader alone, not its tree."""
    builtin: bool = False
    limits: ProcessLimits | None = None


@dataclass(frozen=True, slots=True)
class GuestMetrics:
    """What a guest says of itself: a hostile guest says what it likes. CPU times are of all CPUs since its boot."""

    uptime_ns: int = 0
    cpus: int = 0
    utime_us: int = 0
    stime_us: int = 0
    load1_milli: int = 0
    processes: int = 0
    memory_total_kib: int = 0
    memory_available_kib: int = 0
    memory_cached_kib: int = 0
    disk_total: int = 0
    disk_free: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a guest is given before its sandbox is reported as running: clock (Unix epoch, nanoseconds), randomness, identity, environment.

    `time_ns` is the time at which this object reaches the link; the link adds what passes until it is sent. `env`, also an
    empty one, replaces the sandbox's environment; None leaves it.
    """

    time_ns: int | None = None
    entropy: bytes = b""
    hostname: str | None = None
    machine_id: str | None = None
    env: Mapping[str, str] | None = None
    boot_id: str | None = None
    """What programs in the guest see as the boot's id, where the kernel's is that of a snapshot."""
    renew_keys: bool = False
    """The host keys of ssh, where there are any, are made anew before the answer."""
    ca: str | None = None
    """Certificates in PEM, at most 16 KiB, that the sandbox trusts beside its template's; none when empty. None leaves them.

    The system's store has them before the answer, and every process that is started then gets the variables that lead to it
    (docs/protocols/guest-channel.md); what runs already reads them with its next look.
    """


@dataclass(frozen=True, slots=True)
class AgentHello:
    """What the agent said when the link came up."""

    boot_id: str
    agent: str
    uptime_ns: int
    processes: tuple[Proc, ...]


class ProcessSink(Protocol):
    """Where the output and the states of one process go. The calls come from the event loop and must not block long."""

    def stored(self) -> tuple[int, int]:
        """Offsets up to which stdout and stderr are stored: where the agent goes on after a resynchronisation."""

    def output(self, fd: int, offset: int, data: memoryview) -> None:
        """Stores output before it returns (the link acknowledges it then). `fd` is 1 or 2. An offset beyond what was stored is a gap."""

    def changed(self, proc: Proc) -> None:
        """The process's state changed; may repeat what is known."""

    def gone(self, reason: str) -> None:
        """The process is lost with its VM, or the agent knows nothing of it (a cold boot in between): no more calls come."""


class GuestStream(Protocol):
    """Octets to and from one builtin program or one connection in a guest; lives in this process of the node only.

    At most a window of octets that nobody read waits on the host for each direction of output: who does not read holds up
    the program or the peer, and nobody else. Reads and writes raise `LinkLost` once the sandbox is gone or the stream was
    closed. One reader of each output and one writer at a time.
    """

    async def read(self) -> bytes:
        """Returns octets of fd 1, or what the peer sent; b"" at its end."""

    async def read_error(self) -> bytes:
        """Returns octets of a builtin's fd 2; b"" at its end."""

    async def write(self, data: bytes) -> None:
        """Gives octets; returns when all but a window of what was written were taken. Raises `GuestError(EPIPE)` when nobody takes any more.

        Also what a cancelled call was given is on its way.
        """

    async def write_eof(self) -> None:
        """Nothing more will be written; of a connection, the direction to the peer is shut down. Returns when all was taken."""

    async def wait(self) -> Proc:
        """Waits for the end (`ProcessState.CLOSED`): the program and its outputs, or both directions of the connection."""

    async def terminate(self) -> None:
        """Asks a program to end and to leave nothing half done; `wait` tells when it has. That it has ended already is no error."""

    async def close(self) -> None:
        """Kills the program or resets the connection, if it is still there, and forgets it. Idempotent; does not wait for the guest."""


class GuestLink(Protocol):
    """One sandbox's agent. All calls wait through a reconnection, raise `LinkLost` when the VM is gone and `GuestError` when refused."""

    @property
    def hello(self) -> AgentHello:
        """What the agent said when the link last came up."""

    async def setup(
        self,
        *,
        time_ns: int | None = None,
        entropy: bytes = b"",
        hostname: str | None = None,
        machine_id: str | None = None,
        env: Mapping[str, str] | None = None,
        ca: str | None = None,
    ) -> None:
        """Gives the guest its clock, randomness, identity, environment and authorities, in one request."""

    async def ping(self) -> int:
        """Round trip; returns the guest's wall clock in nanoseconds."""

    async def spawn(self, spawn: Spawn, sink: ProcessSink) -> int | None:
        """Starts a process and connects its sink; returns its pid, None when the record is EXITED with spawn_failed (the sink hears why).

        The sink may be called before this returns. A cancelled call leaves the process as it is, started or not: `close_process` it.
        Raises `ValueError` for what the protocol cannot carry.
        """

    def attach(self, number: int, sink: ProcessSink) -> bool:
        """Connects a sink to a process that the agent already has (after a restart of the node); False when it does not know it.

        The sink hears the present state (`changed`) before this returns.
        """

    async def send_input(self, number: int, offset: int, data: bytes, *, eof: bool = False) -> int:
        """Gives stdin octets at `offset`; waits for credit; returns the next offset once the process took them (or nobody can any more).

        Octets below what the process took are skipped. Raises `GuestError`: ESRCH for an unknown process, EBADF for one without a stdin, EINVAL when `offset` leaves
        a gap behind what was given before.
        """

    async def signal(self, number: int, signal: int, *, leader_only: bool = False) -> None:
        """Signals the whole tree, or the leader."""

    async def resize(self, number: int, rows: int, cols: int) -> None:
        """Resizes the process's terminal."""

    async def close_process(self, number: int, *, if_over: bool = False) -> None:
        """Kills what is left of its tree and forgets it and its output.

        With `if_over` nothing is killed: raises `GuestError` with EBUSY when something of its tree lives.
        """

    async def open_builtin(
        self, argv: Sequence[str | bytes], *, user: str | None = None, cwd: str | None = None, stdin: bool = False
    ) -> GuestStream:
        """Starts a program of the agent's own. A call that is cancelled leaves nothing behind.

        Raises `GuestError`: EAGAIN when too many streams of this sandbox are open, ENOENT for an unknown program, ENOEXEC for a start
        that failed in the guest (its message begins with `no such user` where that is why).
        """

    async def dial(self, port: int, host: str | None = None) -> GuestStream:
        """Connects to a TCP port in the guest, without `host` on its loopback. A call that is cancelled leaves nothing behind.

        `host` is a literal loopback or own address of the guest. Raises `GuestError`: ECONNREFUSED, ETIMEDOUT, EAGAIN (too many are
        open) and whatever `connect` says there; `ValueError` for no port.
        """

    async def metrics(self) -> GuestMetrics:
        """Asks the guest what it uses."""

    async def sync(self) -> None:
        """Flushes the guest's disks."""

    async def freeze(self, within_ms: int) -> None:
        """Flushes the writable file system and lets nothing more be written to it, until `thaw` or for that time, at most a minute of the guest's."""

    async def thaw(self) -> None:
        """Lets writes go on. Idempotent."""

    async def resize_disk(self, device_mib: int) -> int:
        """Grows the file system to its device, once the guest's kernel knows that it has `device_mib`; returns its size in octets.

        Raises `GuestError`: ETIMEDOUT when the kernel did not learn of that size within 5 s, EBUSY while it is frozen.
        """

    async def shutdown(self) -> None:
        """Asks for power-off; returns when the agent accepted."""

    def paused(self, stopped: bool) -> None:
        """Says that the virtual CPUs stopped, or go on: a guest that stands still is not taken for dead. Idempotent."""

    def ran(self) -> float:
        """Seconds, by the host's clock, that the guest ran since the link was made: those in which it stood still (`paused`) do not count."""

    async def close(self) -> None:
        """Drops the connection; the agent keeps everything for the next one."""
