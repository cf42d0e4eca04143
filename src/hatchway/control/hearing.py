"""What follows in this control process from what another one did, on a database that they share."""

import asyncio
import logging
from collections.abc import Coroutine

from hatchway.control.auth import Authenticator
from hatchway.control.claims import MAINTENANCE
from hatchway.control.engine import Engine
from hatchway.control.nodes import Nodes
from hatchway.control.policykeeper import PolicyKeeper
from hatchway.control.reconciler import Reconciler
from hatchway.control.removal import Removal
from hatchway.domain.errors import HatchwayError
from hatchway.storage.rows import EventRow

ENDS = frozenset({"operation.succeeded", "operation.failed", "operation.cancelled"})
REVOKES = frozenset({"key.revoked", "key.rotated", "token.revoked"})

_OF_POLICIES = {"policy", "policy_document", "credentials"}
"""What a change of a sandbox has that changes what may leave it."""

log = logging.getLogger(__name__)


class Hearing:
    """`hear` is given every event of the outbox, `gained` every lease that this process has now."""

    def __init__(
        self,
        engine: Engine,
        reconciler: Reconciler,
        auth: Authenticator,
        nodes: Nodes,
        removal: Removal,
        policies: PolicyKeeper,
    ) -> None:
        self._engine = engine
        self._reconciler = reconciler
        self._auth = auth
        self._nodes = nodes
        self._removal = removal
        self._policies = policies
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, event: EventRow) -> None:
        """Ends waits for operations, gives up what was pre-empted, forgets keys, and tells nodes what was revoked."""
        if event.kind in ENDS:
            operation_id = str(event.data.get("operation", ""))
            if event.kind == "operation.cancelled":
                self._engine.drop(operation_id)
            self._engine.ended(operation_id)
            self._reconciler.released(event.subject)
        elif event.kind in REVOKES:
            self._auth.forget(event.subject)
            # The process that revoked told its nodes; others may be connected here.
            self._begin(self._nodes.configure_all())

        elif event.kind == "policy.changed" or (event.kind == "sandbox.updated" and event.data.keys() & _OF_POLICIES):
            self._policies.look()

    def gained(self, name: str) -> None:
        """Goes on with what the process that led before had begun."""
        if name == MAINTENANCE:
            self._begin(self._removal.start())

    async def close(self) -> None:
        """Gives up what is in hand."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _quietly(work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except HatchwayError as error:
        log.warning("not done yet, the next pass tries again: %s", error)
