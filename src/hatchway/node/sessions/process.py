"""What a session asks of its process through the guest link, with the link's errors as those that a client is told."""

import errno

from hatchway.domain.errors import Conflict, Exhausted, HatchwayError, Unavailable, Unprocessable
from hatchway.node.guest.seam import GuestError, GuestLink, LinkLost, ProcessLimits, ProcessSink, Spawn
from hatchway.wire.node import Exit, SessionLimits, SessionSpec


async def spawn(link: GuestLink, spec: SessionSpec, sink: ProcessSink) -> int | None:
    """Starts the process; see `GuestLink.spawn`.

    Raises `Exhausted("too_many_processes")` and `Unprocessable("spawn_refused")`: nothing was started; and
    `Unavailable("sandbox_unreachable")`: nobody knows.
    """
    try:
        return await link.spawn(
            Spawn(
                number=spec.process_id,
                key=spec.session_id,
                argv=spec.argv,
                env=spec.env,
                cwd=spec.cwd,
                user=spec.user,
                stdin=spec.stdin,
                pty=None if spec.pty is None else (spec.pty.rows, spec.pty.cols),
                timeout_ms=0 if spec.timeout_s is None else max(1, round(spec.timeout_s * 1000)),
                timeout_leader=spec.timeout_scope == "leader",
                limits=None if spec.limits is None else _limits(spec.limits),
            ),
            sink,
        )
    except GuestError as error:
        if error.errno == errno.EAGAIN:
            raise Exhausted(
                "too_many_processes", str(error), "Delete sessions whose processes still run, then attach again."
            ) from error
        raise Unprocessable("spawn_refused", str(error), "Change the command or its environment.") from error
    except ValueError as error:
        raise Unprocessable("spawn_refused", str(error), "Change the command or its environment.") from error
    except LinkLost as error:
        raise _unreachable(error) from error


async def give_input(link: GuestLink, number: int, offset: int, data: bytes, *, eof: bool) -> int:
    """Feeds stdin; returns the next offset. Raises `Conflict("stdin_refused")`, `Unavailable("sandbox_unreachable")`."""
    try:
        return await link.send_input(number, offset, data, eof=eof)
    except GuestError as error:
        raise Conflict("stdin_refused", str(error), "Look at the session's state.") from error
    except LinkLost as error:
        raise _unreachable(error) from error


async def send_signal(link: GuestLink, number: int, signal: int, *, leader_only: bool) -> bool:
    """Signals the tree or the leader; tells whether there was anything to signal. Raises `Unprocessable("signal_refused")`, `Unavailable`."""
    try:
        await link.signal(number, signal, leader_only=leader_only)
    except GuestError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT):
            return False
        raise Unprocessable("signal_refused", str(error), "Use a signal number from 1 to 64.") from error
    except LinkLost as error:
        raise _unreachable(error) from error
    return True


async def resize(link: GuestLink, number: int, rows: int, cols: int) -> None:
    """Resizes the terminal. Raises `Conflict("resize_refused")`, `Unavailable("sandbox_unreachable")`."""
    try:
        await link.resize(number, rows, cols)
    except GuestError as error:
        raise Conflict("resize_refused", str(error), "Look at the session's state.") from error
    except LinkLost as error:
        raise _unreachable(error) from error


def with_totals(exit_: Exit, stdout: int, stderr: int) -> Exit:
    """Returns the same end with the streams' final lengths."""
    return Exit(
        reason=exit_.reason,
        code=exit_.code,
        signal=exit_.signal,
        message=exit_.message,
        usage=exit_.usage,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
    )


def _limits(limits: SessionLimits) -> ProcessLimits:
    return ProcessLimits(
        memory_bytes=None if limits.memory_mib is None else limits.memory_mib * 2**20,
        cpu_ms=None if limits.cpu_s is None else max(1, round(limits.cpu_s * 1000)),
        nofile=limits.open_files,
        pids=limits.processes,
        fsize_bytes=None if limits.file_size_mib is None else limits.file_size_mib * 2**20,
    )


def _unreachable(error: LinkLost) -> HatchwayError:
    return Unavailable(
        "sandbox_unreachable",
        f"The sandbox does not answer: {error}",
        "Look at its state; start it again if it stopped.",
    )
