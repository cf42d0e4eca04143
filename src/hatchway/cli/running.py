"""`hatchway run` and `hatchway exec`: a command in a sandbox as if it ran here.

Standard input, output and error are passed through byte for byte, the exit status is the command's, and signals go to it.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hatchway.client import Conflict, Exit, Gap, HatchwayError, Limits, Output, Unavailable

from .front import Front, note
from .interrupts import Interrupted, Interrupts
from .output import write_octets
from .progress import BEING_MADE, patience

if TYPE_CHECKING:
    from hatchway.client import Sandbox, Session

_STDIN_PIECE = 256 * 1024
_CREATE_S = 300.0
_HOME = "/home/user"


@dataclass(frozen=True)
class Command:
    """What to run and how."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    timeout_s: float | None = None
    limits: Limits | None = None


@dataclass(frozen=True)
class Machine:
    """The sandbox to make for a command."""

    template: str
    name: str | None = None
    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    pool: str | None = None
    policy: str | None = None
    """Name of a policy, or the text of a document."""
    timeout_s: float | None = None
    idle_timeout_s: float | None = None
    on_timeout: str | None = None


class Phases:
    """Says with `-v` how long each phase took."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Measures one phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._shown:
                note(f"{what}: {(time.perf_counter() - began) * 1000:.0f} ms")


def run_in_new(
    front: Front, machine: Machine, command: Command, *, copy: Path | None, keep: bool, verbose: bool
) -> int:
    """Makes a sandbox, runs `command` in it, deletes it whatever happened (not with `keep`); returns the exit status."""
    phases = Phases(verbose)
    with Interrupts() as interrupts:
        sandbox: Sandbox | None = None
        try:
            with phases("create"):
                with interrupts.deferred():
                    sandbox = front.client.sandboxes.create(
                        machine.template,
                        name=machine.name,
                        vcpus=machine.vcpus,
                        memory_mib=machine.memory_mib,
                        disk_mib=machine.disk_mib,
                        pool=machine.pool,
                        policy=machine.policy,
                        timeout_s=machine.timeout_s,
                        idle_timeout_s=machine.idle_timeout_s,
                        on_timeout=machine.on_timeout,
                        wait=False,
                    )
                assert sandbox.operation is not None  # a create always has one
                with patience(BEING_MADE):
                    front.client.operations.wait(sandbox.operation.id, timeout=_CREATE_S)
            if copy is not None:
                from .copying import upload_folder

                with phases("copy"):
                    upload_folder(sandbox, copy, command.workdir or _HOME, command.user)
            with phases("command"):
                return _run(sandbox, command, interrupts)
        except Interrupted as error:
            return error.status
        finally:
            if sandbox is not None and keep:
                note(f"kept: {sandbox.id}")
            elif sandbox is not None:
                _delete(sandbox, interrupts, phases)


def run_in_old(front: Front, sandbox_id: str, command: Command, *, verbose: bool) -> int:
    """Runs `command` in a sandbox that is there; returns the exit status."""
    phases = Phases(verbose)
    with Interrupts() as interrupts:
        try:
            sandbox = front.client.sandboxes.get(sandbox_id)
            with phases("command"):
                return _run(sandbox, command, interrupts)
        except Interrupted as error:
            return error.status


def _delete(sandbox: "Sandbox", interrupts: Interrupts, phases: Phases) -> None:
    interrupts.clean_up(f"sandbox {sandbox.id}")
    try:
        with phases("delete"):
            sandbox.delete()
    except (HatchwayError, Interrupted) as error:
        note(f"sandbox {sandbox.id} may be left behind; remove it with: hatchway rm {sandbox.id}")
        if isinstance(error, HatchwayError):
            raise


def _run(sandbox: "Sandbox", command: Command, interrupts: Interrupts) -> int:
    feed = _stdin_to_pass()
    with interrupts.deferred():
        session = sandbox.start(
            command.argv,
            stdin=feed,
            env=command.env or None,
            cwd=command.workdir,
            user=command.user,
            timeout=command.timeout_s,
            limits=command.limits,
        )
    pump = _Pump(session) if feed and session.exit is None else None
    try:
        with interrupts.forwarding(lambda name: _forward(session, name)):
            if pump is not None:
                pump.start()
            for event in session:
                if isinstance(event, Output):
                    write_octets(1 if event.stream == "stdout" else 2, event.data)
                elif isinstance(event, Gap):
                    note(f"output lost: octets {event.from_} to {event.to} of {event.stream} are not kept any more")
                elif isinstance(event, Exit) and pump is not None:
                    pump.over = True
            ended = session.wait()
    except BrokenPipeError:
        session.kill()
        return 128 + signal.SIGPIPE
    except BaseException:
        session.kill()
        raise
    finally:
        session.close()
    if pump is not None and pump.failure is not None:
        raise pump.failure
    return status_of(ended)


def status_of(ended: Exit) -> int:
    """Returns the exit status that the end of a command asks for, and says what was not the command's own doing."""
    if ended.reason == "timeout":
        note("the command ran into its timeout and was killed")
    elif ended.reason == "oom":
        note("the command was killed: out of memory")
    elif ended.reason == "spawn_failed":
        note(f"the command could not be started: {ended.message or 'unknown reason'}")
    elif ended.reason in ("sandbox_lost", "rolled_back"):
        raise Unavailable(
            ended.reason,
            f"The sandbox was lost while the command ran{': ' + ended.message if ended.message else ''}.",
            "See its reason: hatchway get SANDBOX",
        )
    elif ended.reason == "agent_unresponsive":
        raise Unavailable(
            "agent_unresponsive",
            ended.message or "The agent in the sandbox does not answer.",
            "Look whether the sandbox answers at all: hatchway exec SANDBOX -- true; else stop and start it, or delete it.",
        )
    return ended.status


def _forward(session: "Session", name: str) -> None:
    try:
        session.send_signal(name)
    except HatchwayError as error:
        if session.exit is None:
            note(f"the signal could not be delivered: {error.cause}")


def _stdin_to_pass() -> bool:
    """Whether there is an input to pass on: not when it is closed, and not a terminal, which the command would wait for."""
    try:
        os.fstat(0)
    except OSError:
        return False
    return not os.isatty(0)


class _Pump:
    """Passes our standard input on, in a thread of its own, until its end or that of the command."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self.over = False
        self.failure: HatchwayError | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="stdin").start()

    def _run(self) -> None:
        try:
            while not self.over:
                data = _read_stdin()
                self._session.write_stdin(data, eof=not data)
                if not data:
                    return
        except HatchwayError as error:
            if self.over or (isinstance(error, Conflict) and error.code == "process_ended"):
                return
            # The command would take half an input for all of it.
            self.failure = error
            self._session.kill()


def _read_stdin() -> bytes:
    while True:
        try:
            return os.read(0, _STDIN_PIECE)
        except BlockingIOError:
            select.select([0], [], [])
        except OSError:
            return b""
