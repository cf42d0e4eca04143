"""All command sessions of one node: the host that the node's core and the data plane speak to."""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec

from hatchway.domain.errors import Conflict, Exhausted, HostExhausted, NotFound, Unprocessable
from hatchway.domain.ids import is_id, new_id
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions import record as records
from hatchway.node.sessions.deadline import Timer
from hatchway.node.sessions.record import FILE, Record
from hatchway.node.sessions.seam import Standing
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.spool import STDERR, STDOUT, Budget, Spool
from hatchway.node.sessions.surroundings import Limits, Surroundings
from hatchway.wire.node import BranchedSession, SessionSpec, SessionStatus

log = logging.getLogger(__name__)

_DELETE_WAIT_S = 5.0


class Sessions:
    """Implements `SessionHost`. All methods belong to the event loop's thread.

    `folder` is ours alone (mode 0700): `folder/SANDBOX/SESSION/`. `on_status` hears of every change, after it was written.
    Call `load` once before serving and `sweep` now and then (`run_sweeper`).
    """

    def __init__(
        self,
        folder: Path,
        on_status: Callable[[SessionStatus], None],
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = time.time,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self._folder = folder
        self._on_status = on_status
        self._limits = limits or Limits()
        self._now = now
        self._sessions: dict[str, Session] = {}
        self._by_sandbox: dict[str, dict[str, Session]] = {}
        self._budgets: dict[str, Budget] = {}
        self._links: dict[str, GuestLink] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._around = Surroundings(
            limits=self._limits,
            now=now,
            later=later or (lambda delay, action: asyncio.get_running_loop().call_later(delay, action)),
            soon=lambda action: asyncio.get_running_loop().call_soon(action),
            link_of=self._links.get,
            crowded=self._make_room,
            published=self._published,
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def load(self) -> None:
        """Reads back what a former process left; folders without a record (half made, half removed) go away."""
        found: list[Session] = []
        for sandbox_folder in self._folder.iterdir():
            if not sandbox_folder.is_dir():
                continue
            for folder in sandbox_folder.iterdir():
                try:
                    session = self._load_one(folder)
                except OSError as error:  # one that cannot be read must not keep the others from being found
                    log.error("session %s cannot be read; it is left alone: %s", folder, error)
                    continue
                if session is not None:
                    found.append(session)
            with contextlib.suppress(OSError):
                sandbox_folder.rmdir()
        for session in sorted(found, key=lambda one: one.record.created_at):
            self._add(session)

    # -- SessionHost

    async def create(self, spec: SessionSpec) -> SessionStatus:
        """See `SessionHost`. Raises `Conflict("session_exists")`, `Exhausted("too_many_sessions")`, `HostExhausted`, `Unprocessable`."""
        known = self._sessions.get(spec.session_id)
        if known is not None:
            if known.record.spec != spec or known.record.hidden:
                raise Conflict("session_exists", "There is another session of this id.", "Use a new id.")
            return known.status()
        if not is_id(spec.session_id) or not is_id(spec.sandbox_id):
            raise Unprocessable("invalid_id", "Ids have 20 characters of [a-z0-9].")
        if not spec.argv or not 1 <= spec.process_id < 2**31:
            raise Unprocessable("invalid_session", "A session needs a command and a process number from 1 up.")
        if len(self._by_sandbox.get(spec.sandbox_id, ())) >= self._limits.per_sandbox:
            self._give_up_oldest(spec.sandbox_id)
        now = self._now()
        record = Record(spec=spec, created_at=now, retain_until=now + max(spec.retain_s, self._limits.unstarted_s))
        session = self._begin(record)
        self._add(session)
        return session.status()

    def _begin(self, record: Record) -> Session:
        """Records a new session. Raises `HostExhausted`."""
        folder = self._folder / record.spec.sandbox_id / record.spec.session_id
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            records.create(folder, record)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise HostExhausted(
                "host_disk_full", f"The session cannot be recorded: {error}", "Free disk space."
            ) from error
        spool = Spool(folder, self._limits.spool, self._budget(record.spec.sandbox_id))
        _begin_at(spool, record.forked_at)
        return Session(folder, record, spool, self._around)

    def get(self, session_id: str) -> SessionStatus:
        """See `SessionHost`."""
        return self.session(session_id).status()

    def session(self, session_id: str) -> Session:
        """The session itself, for the data plane. Raises `NotFound("unknown_session")`."""
        session = self._sessions.get(session_id)
        if session is None or session.record.hidden:
            raise unknown_session()
        return session

    def of_sandbox(self, sandbox_id: str) -> tuple[SessionStatus, ...]:
        """See `SessionHost`."""
        sessions = self._by_sandbox.get(sandbox_id, {}).values()
        return tuple(session.status() for session in sessions if not session.record.hidden)

    def sandboxes(self) -> frozenset[str]:
        """The sandboxes that have sessions here: what a core that starts compares with those that it knows."""
        return frozenset(self._by_sandbox)

    async def delete(self, session_id: str) -> None:
        """See `SessionHost`. Where the guest cannot be asked now (paused), it is killed as soon as it can; nobody waits for that."""
        session = self._sessions.get(session_id)
        if session is None or session.record.hidden == "deleted":
            return
        session.record.hidden = "deleted"
        session.save()
        session.end_deleted()
        killing = session.forgetting()
        if killing is not None:
            await asyncio.wait({killing}, timeout=_DELETE_WAIT_S)
        await self._remove_output(session)
        self._published(session)

    async def link_up(self, sandbox_id: str, link: GuestLink) -> None:
        """See `SessionHost`. Idempotent."""
        self._links[sandbox_id] = link
        for session in list(self._by_sandbox.get(sandbox_id, {}).values()):
            session.connect(link)

    def standing(self, sandbox_id: str) -> tuple[Standing, ...]:
        """See `SessionHost`."""
        sessions = self._by_sandbox.get(sandbox_id, {}).values()
        return tuple(session.standing() for session in sessions if session.living and not session.record.hidden)

    async def branch(self, sandbox_id: str, project: str, standing: Sequence[Standing]) -> tuple[BranchedSession, ...]:
        """See `SessionHost`. Those that there are already are left as they are."""
        others = self._by_sandbox.get(sandbox_id, {}).values()
        known = {one.record.spec.process_id for one in others if one.living}
        now = self._now()
        for one in standing:
            if one.spec.process_id in known:
                continue
            spec = msgspec.structs.replace(one.spec, session_id=new_id(), sandbox_id=sandbox_id, project=project)
            record = Record(
                spec=spec,
                created_at=now,
                forked_from=one.spec.session_id,
                forked_at=(one.stdout, one.stderr),
                state="running",
                boot_id=one.boot_id,
                pid=one.pid,
                started_at=one.started_at,
                stdin_offset=one.stdin,
                stdin_eof=one.stdin_eof,
                agent_open=True,
            )
            self._add(self._begin(record))
        return self.branched(sandbox_id)

    def branched(self, sandbox_id: str) -> tuple[BranchedSession, ...]:
        """See `SessionHost`."""
        return tuple(
            BranchedSession(spec=one.record.spec, status=one.status(), forked_from=one.record.forked_from)
            for one in self._by_sandbox.get(sandbox_id, {}).values()
            if one.record.forked_from is not None and not one.record.hidden
        )

    def rolled_back(self, sandbox_id: str) -> None:
        """See `SessionHost`."""
        self._links.pop(sandbox_id, None)
        for session in list(self._by_sandbox.get(sandbox_id, {}).values()):
            session.gone("The sandbox was rolled back to a snapshot.", "rolled_back")

    def link_down(self, sandbox_id: str) -> None:
        """See `SessionHost`. Idempotent."""
        self._links.pop(sandbox_id, None)
        for session in self._by_sandbox.get(sandbox_id, {}).values():
            session.stands_by()

    def sandbox_lost(self, sandbox_id: str, reason: str) -> None:
        """See `SessionHost`."""
        self._links.pop(sandbox_id, None)
        for session in list(self._by_sandbox.get(sandbox_id, {}).values()):
            session.gone(reason)

    async def sandbox_deleted(self, sandbox_id: str) -> None:
        """See `SessionHost`."""
        self.sandbox_lost(sandbox_id, "The sandbox was deleted.")
        for session in list(self._by_sandbox.get(sandbox_id, {}).values()):
            await self.delete(session.id)
        for session in list(self._by_sandbox.get(sandbox_id, {}).values()):
            self._drop(session)
        await asyncio.to_thread(shutil.rmtree, self._folder / sandbox_id, ignore_errors=True)

    def kept(self) -> tuple[int, int]:
        """How many sessions there are, and how many octets of output are kept of them on disk."""
        return len(self._sessions), sum(session.spool.kept for session in self._sessions.values())

    # -- retention

    def sweep(self) -> None:
        """Removes sessions whose retention passed, and tries again what failed before: writing records, closing processes."""
        now = self._now()
        for session in list(self._sessions.values()):
            if session.unsaved:
                session.save()
            session.resume_closing()
            record = session.record
            over = record.retain_until is not None and record.retain_until <= now
            if over and not record.hidden and record.state in ("created", "ended"):
                self._begin_expiry(session)

    def _begin_expiry(self, session: Session) -> None:
        session.record.hidden = "expired"
        session.save()
        session.stop_followers("expired")
        self._chore(self._expire(session))

    def _give_up_oldest(self, sandbox_id: str) -> None:
        """Makes room for one more session by expiring the oldest that ended, one that nobody reads if there is one.

        Raises `Exhausted("too_many_sessions")` when none has ended.
        """
        ended = [one for one in self._by_sandbox[sandbox_id].values() if one.ended and not one.record.hidden]
        if not ended:
            raise Exhausted(
                "too_many_sessions",
                f"The sandbox has {self._limits.per_sandbox} sessions that have not ended.",
                "Delete some of them.",
            )
        self._begin_expiry(next((one for one in ended if not one.followed), ended[0]))

    def _make_room(self, session: Session) -> None:
        """Brings the kept output of a sandbox back under its budget: the oldest of ended sessions goes first, then that of the largest.

        What goes is a gap for whoever reads it later. A sixteenth more goes than must, so that this is not done for each octet.
        """
        siblings = self._by_sandbox.get(session.record.spec.sandbox_id, {}).values()
        budget = self._budget(session.record.spec.sandbox_id)
        enough = budget.limit - budget.limit // 16
        for one in siblings:
            while one.ended and budget.used > enough and one.spool.drop_oldest():
                continue
            if budget.used <= enough:
                return
        while budget.used > enough:
            largest = max(siblings, key=lambda one: one.spool.kept)
            if not largest.spool.drop_oldest():
                return

    def _budget(self, sandbox_id: str) -> Budget:
        return self._budgets.setdefault(sandbox_id, Budget(self._limits.kept_per_sandbox))

    async def run_sweeper(self, period_s: float = 10.0) -> None:
        """Sweeps until cancelled."""
        while True:
            await asyncio.sleep(period_s)
            try:
                self.sweep()
            except Exception:  # a sweep that ended for good would keep every output for good
                log.exception("sweeping the sessions failed")

    async def close(self) -> None:
        """Lets go of everything in memory; what is on disk stays for the next process."""
        for task in list(self._chores):
            task.cancel()
        for session in self._sessions.values():
            if session.unsaved:
                session.save()
            session.dispose()

    # -- inside

    def _add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._by_sandbox.setdefault(session.record.spec.sandbox_id, {})[session.id] = session

    def _load_one(self, folder: Path) -> Session | None:
        record = records.load(folder)
        if record is None:
            if records.is_complete(folder):
                log.error("the record of session %s cannot be understood; it is left alone", folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            return None
        if record.hidden and not record.agent_open:
            _remove(folder)
            return None
        return self._revive(folder, record)

    def _revive(self, folder: Path, record: Record) -> Session:
        spool = Spool.open(folder, self._limits.spool, self._budget(record.spec.sandbox_id))
        _begin_at(spool, record.forked_at)
        if record.state == "ended":
            spool.streams[STDOUT].advance(record.stdout_end, "lost")
            spool.streams[STDERR].advance(record.stderr_end, "lost")
            spool.seal()
        return Session(folder, record, spool, self._around)

    def _published(self, session: Session) -> None:
        record = session.record
        if not record.hidden:
            self._on_status(session.status())
        elif not record.agent_open and session.id in self._sessions:
            self._drop(session)
            self._chore(self._remove_folder(session))

    def _drop(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        siblings = self._by_sandbox.get(session.record.spec.sandbox_id, {})
        siblings.pop(session.id, None)
        if not siblings:
            self._by_sandbox.pop(session.record.spec.sandbox_id, None)
            self._budgets.pop(session.record.spec.sandbox_id, None)
        session.spool.forget()
        session.dispose()

    async def _expire(self, session: Session) -> None:
        await self._remove_output(session)
        self._published(session)

    async def _remove_output(self, session: Session) -> None:
        """Removes all but the record."""
        session.spool.seal()
        session.spool.forget()
        paths = list(session.folder.glob("std*.*")) if session.folder.exists() else []
        await asyncio.to_thread(_unlink, paths)

    async def _remove_folder(self, session: Session) -> None:
        await asyncio.to_thread(_remove, session.folder)
        with contextlib.suppress(OSError):
            session.folder.parent.rmdir()

    def _chore(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def unknown_session() -> NotFound:
    """The error of a session that is not here, or that whoever asks has no part in."""
    return NotFound("unknown_session", "There is no such session.", "List the sandbox's sessions.")


def _begin_at(spool: Spool, offsets: tuple[int, int]) -> None:
    for fd, offset in zip((STDOUT, STDERR), offsets, strict=True):
        spool.streams[fd].advance(offset, "forked")


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)  # first: a folder without it is known to be on its way out
    shutil.rmtree(folder, ignore_errors=True)
