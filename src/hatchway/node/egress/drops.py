"""What the rules of the network slots dropped, as records for the audit journal: by sandbox and reason, with how many packets.

The kernel counts, and keeps its counts while anything of ours is away; how far they were recorded is kept beside the sandbox. So
each packet is in one record, however often processes are restarted; a node that dies between a record and its note of it records
those few once more.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from hatchway.domain.errors import Unavailable
from hatchway.node.vmm.seam import LaunchRefused, VmmError
from hatchway.wire.audit import Entry
from hatchway.wire.launcher import Dropped
from hatchway.wire.small_files import replace_file

NAME = "drops.json"
EVERY_S = 15.0
LAST_WITHIN_S = 1.0
MAX_FILE = 4_096

log = logging.getLogger(__name__)


class Launcher(Protocol):
    """Who knows the counts: `node.vmm.launcher.LauncherClient`."""

    async def dropped(self, sandbox_id: str) -> Dropped:
        """See there."""


class Machine(Protocol):
    """A sandbox whose machine is there."""

    sandbox_id: str
    project: str
    generation: int
    folder: Path
    wanted: bool
    """Its machine is there. Of one that ended the launcher still tells counts, which were recorded at its end."""


class _Noted(msgspec.Struct, frozen=True):
    """How far the counts of a slot were recorded."""

    packets: dict[str, int] = {}
    restored: int = 0


class Drops:
    """Records what was dropped. `record` takes a record or raises `Unavailable`: then the counts are recorded the next time."""

    def __init__(self, launcher: Launcher, record: Callable[[Entry], None]) -> None:
        self._launcher = launcher
        self._record = record
        self._turn = asyncio.Lock()

    async def run(self, machines: Callable[[], Iterable[Machine]]) -> None:
        """Looks at every machine's counts every `EVERY_S`, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            for machine in list(machines()):
                await self.look(machine)

    async def last(self, machine: Machine) -> None:
        """The machine ends: what was not recorded yet is, and its slot is not looked at again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WITHIN_S), self._turn:
                await self._look(machine)
        with contextlib.suppress(OSError):
            (machine.folder / NAME).unlink()

    async def look(self, machine: Machine) -> None:
        """Records what was dropped since the last look, unless its machine has ended."""
        async with self._turn:
            if machine.wanted:
                await self._look(machine)

    async def _look(self, machine: Machine) -> None:
        try:
            found = await self._launcher.dropped(machine.sandbox_id)
        except (LaunchRefused, VmmError):
            return  # it has no network, or has ended and was forgotten
        noted = self._noted(machine)
        new = noted
        try:
            for recorded in self._since(machine, noted, found):
                new = recorded
        except Unavailable as error:
            log.warning("%s: what was dropped is recorded later: %s", machine.sandbox_id, error)
        try:
            if new != noted:  # what was recorded is noted, also where the journal was full in the middle
                replace_file(machine.folder / NAME, msgspec.json.encode(new), durable=False)
        except OSError as error:
            log.warning("%s: how far its drops are recorded was not noted: %s", machine.sandbox_id, error)

    def _since(self, machine: Machine, noted: _Noted, found: Dropped) -> Iterator[_Noted]:
        """Records the difference, piece by piece, and yields what is to be noted after each.

        Rules that were put back began to count anew; so did those of a count that is lower than before. How often they were put back is
        counted anew by a launcher that was started again.
        """
        packets, restored = dict(noted.packets), noted.restored
        put_back = found.restored - restored if found.restored >= restored else found.restored
        if put_back:
            self._tell(machine, "egress.rules", "failed", "rules_changed", put_back)
            packets = {}
        restored = found.restored
        yield _Noted(packets, restored)
        for reason, count in sorted(found.packets.items()):
            before = packets.get(reason, 0)
            if fresh := count - before if count >= before else count:
                self._tell(machine, "egress.frames", "denied", reason, fresh)
                packets = {**packets, reason: count}
                yield _Noted(packets, restored)

    def _tell(self, machine: Machine, kind: str, decision: str, reason: str, count: int) -> None:
        self._record(
            Entry(
                kind=kind,
                time=time.time(),
                project=machine.project,
                sandbox_id=machine.sandbox_id,
                generation=machine.generation,
                actor="sandbox" if decision == "denied" else "launcher",
                decision=decision,
                reason=reason,
                count=count,
            )
        )

    def _noted(self, machine: Machine) -> _Noted:
        try:
            with open(machine.folder / NAME, "rb") as file:
                return msgspec.json.decode(file.read(MAX_FILE), type=_Noted)
        except (OSError, msgspec.MsgspecError):
            return _Noted()
