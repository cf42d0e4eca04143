"""What happened, and what waits for consent, for asyncio: `AsyncHatchway.audit`, `AsyncHatchway.approvals`. `oversight` has the same for blocking code."""

from collections.abc import AsyncIterator, Sequence

from . import oversightcalls
from .arecords import all_of
from .atransport import AsyncDriver
from .models import Approval, AuditHead, AuditRecord


class AsyncAudit:
    """The audit journal: with a key of a project that project's records, with the scope `installation` all."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    def list(
        self,
        *,
        project: str | None = None,
        sandbox: str | None = None,
        kinds: Sequence[str] = (),
        decision: str | None = None,
        since: float | None = None,
        until: float | None = None,
        newest: bool = False,
    ) -> AsyncIterator[AuditRecord]:
        """Iterates over records, oldest first or `newest` first, page by page. `kinds` are kinds or their beginnings; times are Unix seconds."""
        wanted = oversightcalls.filters(project, sandbox, kinds, decision, since, until)
        return all_of(self._driver, oversightcalls.records(wanted, newest=newest))

    def export(
        self,
        *,
        project: str | None = None,
        sandbox: str | None = None,
        kinds: Sequence[str] = (),
        decision: str | None = None,
        since: float | None = None,
        until: float | None = None,
        after: int = 0,
    ) -> AsyncIterator[bytes]:
        """Iterates over the lines of the journal as they are, which is what a check needs, from behind the record `after` to the end."""
        wanted = oversightcalls.filters(project, sandbox, kinds, decision, since, until)
        return self._driver.stream(oversightcalls.lines(wanted, after))

    def follow(
        self,
        *,
        project: str | None = None,
        sandbox: str | None = None,
        kinds: Sequence[str] = (),
        decision: str | None = None,
        after: int | None = None,
    ) -> AsyncIterator[AuditRecord]:
        """Iterates over what is recorded, for ever; from behind the record `after`, else from now on."""
        wanted = oversightcalls.filters(project, sandbox, kinds, decision, None, None)
        return self._driver.stream(oversightcalls.follow(wanted, after))

    async def head(self) -> AuditHead:
        """Tells where the journal is: what to note elsewhere, with the public key, so that a check can be pinned to it."""
        return await self._driver.run(oversightcalls.audit_head())


class AsyncApprovals:
    """What waits for somebody's consent: requests that a policy asks about, and operations that the project lets nobody do alone."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    def list(self, *, states: Sequence[str] = (), sandbox: str | None = None) -> AsyncIterator[Approval]:
        """Iterates over approvals, newest first, page by page. `states`: of `pending allowed denied ended`, without it all."""
        return all_of(self._driver, oversightcalls.approvals(states, sandbox))

    async def get(self, approval_id: str) -> Approval:
        """Returns the approval with this id; raises `NotFound`."""
        return await self._driver.run(oversightcalls.get_approval(approval_id))

    async def allow(
        self, approval_id: str, *, scope: str = "once", ttl: float | None = None, note: str = ""
    ) -> Approval:
        """Lets it go on: this once, for the `session` (until the sandbox stops or its policy changes), or with the scope `ttl` for so many seconds.

        Raises `Conflict` (`already_answered approval_over`).
        """
        return await self._driver.run(oversightcalls.answer_approval(approval_id, "allow", scope, ttl, note))

    async def deny(self, approval_id: str, *, note: str = "") -> Approval:
        """Refuses it. Raises `Conflict` (`already_answered approval_over`)."""
        return await self._driver.run(oversightcalls.answer_approval(approval_id, "deny", "once", None, note))
