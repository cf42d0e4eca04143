"""Command sessions, in the words of control plane and node: the `session.*` methods of `wire.node`."""

from hatchway.wire.message import Struct


class TerminalSize(Struct, frozen=True, kw_only=True):
    """Rows and columns of a pseudo terminal."""

    rows: int = 24
    cols: int = 80


class SessionLimits(Struct, frozen=True, kw_only=True):
    """What the process tree of a session may use; None is the guest agent's default, which leaves room for others."""

    memory_mib: int | None = None
    """Exceeded: the tree is killed (`oom`)."""
    cpu_s: float | None = None
    """CPU time of the whole tree; exceeded: it is killed (`timeout`)."""
    open_files: int | None = None
    """Of one process."""
    processes: int | None = None
    """Processes and threads at one time."""
    file_size_mib: int | None = None
    """The largest file that a process may write."""


class SessionSpec(Struct, frozen=True, kw_only=True):
    """A command session, before its process is started by attaching: `session.create`."""

    session_id: str
    sandbox_id: str
    project: str
    process_id: int
    """The number of the process in its sandbox, given by the control plane: from 1 up, never used twice."""
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    pty: TerminalSize | None = None
    stdin: bool = True
    timeout_s: float | None = None
    """Wall time."""
    timeout_scope: str = "tree"
    """Whom the timeout kills: `tree` or `leader`."""
    linger_s: float | None = None
    """How long after the leader's end a stream that somebody still holds is waited for; None is the node's usual."""
    metadata: dict[str, str] = {}
    limits: SessionLimits | None = None
    retain_s: float = 3600.0
    """How long the output is kept after the process ended."""


class SessionRef(Struct, frozen=True, kw_only=True):
    """Names a session for `session.get|delete`."""

    session_id: str


class SandboxSessions(Struct, frozen=True, kw_only=True):
    """Asks for the sessions of one sandbox: `session.list`."""

    sandbox_id: str


class Usage(Struct, frozen=True, kw_only=True):
    """What a process used: CPU and wall time in seconds, memory in KiB."""

    user_s: float = 0.0
    system_s: float = 0.0
    wall_s: float = 0.0
    max_rss_kib: int = 0


class Exit(Struct, frozen=True, kw_only=True):
    """How a process ended."""

    reason: str
    """`exited signaled timeout oom spawn_failed sandbox_lost rolled_back agent_unresponsive`."""
    code: int | None = None
    signal: int | None = None
    message: str = ""
    usage: Usage = Usage()
    stdout_bytes: int = 0
    stderr_bytes: int = 0


class SessionStatus(Struct, frozen=True, kw_only=True):
    """What the node knows of a session: result of the session methods, and event."""

    session_id: str
    sandbox_id: str
    state: str
    """`created`, `running`, `exited` (the leader ended), `ended` (the streams ended too)."""
    pid: int | None = None
    exit: Exit | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    retain_until: float | None = None


class SessionList(Struct, frozen=True, kw_only=True):
    """Answer to `session.list`."""

    sessions: tuple[SessionStatus, ...]


class BranchedSession(Struct, frozen=True, kw_only=True):
    """A session of a branch: its process runs on from a session of the source, under an id of its own.

    Its output begins where the source's stood; what came before is the source's.
    """

    spec: SessionSpec
    status: SessionStatus
    forked_from: str
    """The session of the source."""


class BranchedSessions(Struct, frozen=True, kw_only=True):
    """Answer to `session.branched`: the sessions that a sandbox made from a full snapshot began with."""

    sessions: tuple[BranchedSession, ...]
