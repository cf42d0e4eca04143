"""Several control processes on one database: who lives, who leads, and who takes up what a dead one left.

Each renews a lease on its life. An operation belongs to the process that accepted it, for as long as that one lives; then any that
reaches the sandbox's node claims it. What only one may do at a time (to write down what a node says, to clean up) is led by whoever
holds that lease. A process whose lease may have run out does nothing more until it has renewed it: another one may have taken over.

On a database that no other process can share all of this holds by itself, and nothing is written.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from hatchway.domain.errors import HatchwayError
from hatchway.storage import claims, leases
from hatchway.storage.database import Connection, Database
from hatchway.storage.rows import OperationRow, SandboxRow

RENEWALS = 5
"""How often a lease is renewed in its time."""

log = logging.getLogger(__name__)

MAINTENANCE = "maintenance"


def of_node(node_id: str) -> str:
    """The lease on writing down what a node says."""
    return f"node/{node_id}"


class Claims:
    """See the module. `start` renews for the first time."""

    def __init__(self, database: Database, controller: str, *, lease_s: float, bound_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._bound_s = bound_s
        self._wanted: set[str] = {MAINTENANCE}
        self._held: frozenset[str] = frozenset()
        self._renewed_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self.controller = controller
        self.alone = True
        """Whether no other control process was there when that was last looked at."""
        self.nodes: Callable[[], list[str]] = list
        """The ids of the nodes that are connected here."""
        self.on_claimed: Callable[[OperationRow, SandboxRow], None] = lambda operation, sandbox: None
        self.on_gained: list[Callable[[str], None]] = []
        """Told of every lease that this process has now and had not before."""
        self.on_lapsed: Callable[[], None] = lambda: None
        """Told when this process could not renew in time: others may do now what it is doing."""
        self.on_regained: Callable[[], None] = lambda: None
        """Told when it has renewed after that. What nobody took over is still this process's, and given up: it is to be taken up."""

    @property
    def shared(self) -> bool:
        """Whether other control processes may be there."""
        return self._database.shared

    @property
    def valid(self) -> bool:
        """Whether nobody can have taken over from this process."""
        return not self.shared or time.monotonic() - self._renewed_at < self._lease_s

    def leads(self, name: str) -> bool:
        """Whether this process is the one that does what the lease is for."""
        return not self.shared or (name in self._held and self.valid)

    async def lead(self, name: str) -> bool:
        """Asks for a lease, now and from now on; tells whether this process has it."""
        if self.shared and name not in self._wanted:
            self._wanted.add(name)
            await self._renew()
        return self.leads(name)

    async def start(self) -> None:
        """Begins to live. Raises `HatchwayError` when the database cannot be written."""
        if self.shared:
            await self._renew()
            self._task = asyncio.get_running_loop().create_task(self._renew_forever(), name="leases")

    async def close(self) -> None:
        """Lets the others have everything, at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._database.write(claims.give_back_all, self.controller)
        except HatchwayError as error:
            log.warning("operations not given back; others wait until the lease runs out: %s", error)

    async def holds(self, operation_id: str) -> bool:
        """Whether an operation that is executed here is still to be."""
        if not self.shared:
            return True
        return self.valid and await self._database.read(claims.holds, self.controller, operation_id)

    async def elsewhere(self, operation_id: str) -> bool:
        """Whether another process that lives has an operation in hand."""
        return self.shared and await self._database.read(claims.claimed_by_another, self.controller, operation_id)

    async def give_back(self, operation_id: str, phase: str) -> None:
        """Lets a process have an operation that reaches its node."""
        await self._database.write(claims.give_back, self.controller, operation_id, phase)

    async def _renew_forever(self) -> None:
        lapsed = False
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            try:
                # Bounded, so that a server that hangs is found out in time.
                async with asyncio.timeout(self._lease_s):
                    await self._renew()
                    await self._claim()
            except (HatchwayError, TimeoutError) as error:
                log.warning("leases not renewed: %s", str(error) or "the database did not answer in time")
            except Exception:
                log.exception("leases not renewed")
            if not self.valid:
                self._held, lapsed = frozenset(), True
                self.on_lapsed()
            elif lapsed:
                lapsed = False
                self.on_regained()

    async def _renew(self) -> None:
        began = time.monotonic()
        held, living = await self._database.write(_renew, self.controller, sorted(self._wanted), self._lease_s)
        self._renewed_at = began
        self.alone = living <= {self.controller}
        gained, self._held = held - self._held, held
        for name in sorted(gained):
            for listener in self.on_gained:
                listener(name)

    async def _claim(self) -> None:
        claimed = await self._database.write(
            claims.claim, self.controller, self.nodes(), accepted_by=time.time() - self._bound_s
        )
        for operation, sandbox in claimed:
            log.info("%s of %s is taken over", operation.kind, sandbox.id, extra={"operation_id": operation.id})
            self.on_claimed(operation, sandbox)


def _renew(
    connection: Connection, controller: str, names: list[str], lease_s: float
) -> tuple[frozenset[str], frozenset[str]]:
    return leases.take(connection, controller, names, lease_s), leases.living(connection)
