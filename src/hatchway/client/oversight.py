"""What happened, for blocking code: `Hatchway.audit`. `aoversight` has the same for asyncio."""

from collections.abc import Iterator, Sequence

from . import oversightcalls
from .models import AuditHead, AuditRecord
from .records import all_of
from .transport import SyncDriver


class Audit:
    """The audit journal: with a key of a project that project's records, with the scope `installation` all."""

    def __init__(self, driver: SyncDriver) -> None:
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
    ) -> Iterator[AuditRecord]:
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
    ) -> Iterator[bytes]:
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
    ) -> Iterator[AuditRecord]:
        """Iterates over what is recorded, for ever; from behind the record `after`, else from now on."""
        wanted = oversightcalls.filters(project, sandbox, kinds, decision, None, None)
        return self._driver.stream(oversightcalls.follow(wanted, after))

    def head(self) -> AuditHead:
        """Tells where the journal is: what to note elsewhere, with the public key, so that a check can be pinned to it."""
        return self._driver.run(oversightcalls.audit_head())
