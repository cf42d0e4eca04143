"""The gateways of all sandboxes of a node, and the shards that serve them.

A shard keeps nothing: when it is connected anew, each of its sandboxes is handed to it again, with listeners from the launcher, and what it
serves of nobody's is closed. One that cannot be served, although its shard is there, is tried again and again.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError, NotFound, Unavailable
from hatchway.node.egress.drops import Drops
from hatchway.node.egress.gateway import Gateway
from hatchway.node.egress.leases import Leases
from hatchway.node.egress.links import Link
from hatchway.node.vmm import seqpacket
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.wire import broker, egress
from hatchway.wire.audit import Entry
from hatchway.wire.egress import (
    AskAnswer,
    Asked,
    AskEnded,
    AskList,
    FdsAnswer,
    GatewayList,
    GatewayRef,
    GatewayRenewed,
    Listeners,
    ListenersRefused,
    shard_of,
)
from hatchway.wire.message import Empty

AWAY_AFTER_S = 2.0
"""A shard that is started again is there within this; a longer absence is told by its sandboxes."""
AT_ONCE = 8
"""So many sandboxes are handed to a shard at once."""
HAND_OVER_WITHIN_S = 5.0
RETRY_EVERY_S = 0.5
"""How often it is looked who is not served, although its shard is there."""
RETRY_S, RETRY_AT_MOST_S = 1.0, 60.0
"""After this it is tried again to serve a sandbox; doubled each time that it fails."""
MAX_ASKS = 4_096
MAX_DATAGRAM = 4_096

log = logging.getLogger(__name__)
_answers: msgspec.json.Decoder[FdsAnswer] = msgspec.json.Decoder(FdsAnswer)


class Gateways:
    """See the module. `shards` is how many there are: with none no sandbox has a way out."""

    def __init__(self, run_dir: Path, shards: int, launcher: LauncherClient, *, network: bool = True) -> None:
        self._run = run_dir
        self._launcher = launcher
        self.network = network and shards > 0
        """Whether sandboxes can have a way out here."""
        self._shards = [Link(f"egress-{n}", run_dir / egress.SOCKET.format(shard=n)) for n in range(shards)]
        self._none = Link("egress", run_dir / "egress.sock")
        self.leases = Leases(Link("broker", run_dir / broker.SOCKET) if shards else None)
        self.leases.gateways = lambda: self._gateways.values()
        self._gateways: dict[str, Gateway] = {}
        self._asks: dict[str, tuple[Asked, int]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._settled: set[int] = set()
        """Shards that were told everything since they were connected."""
        self._failed: dict[str, tuple[int, float]] = {}
        """Sandboxes that could not be served: how often in a row, and when it is tried again (monotonic)."""
        self._retrying: asyncio.Task[None] | None = None
        self._drops: Drops | None = None
        self._watching: asyncio.Task[None] | None = None
        self.on_asked: Callable[[Asked], None] = lambda asked: None
        self.on_ask_ended: Callable[[AskEnded], None] = lambda ended: None
        for number, link in enumerate(self._shards):
            self._wire(number, link)

    def _wire(self, number: int, link: Link) -> None:
        link.on_up = lambda: self._up(number)
        link.on_down = lambda: self._down(number)
        link.on_event = lambda name, params: self._heard(number, name, params)

    def start(self) -> None:
        """Begins to connect: when those sandboxes are known that may be served still. May be called again."""
        for link in self._shards:
            link.start()
        self.leases.start()
        if self._retrying is None and self.network:
            self._retrying = asyncio.get_running_loop().create_task(self._retry_forever(), name="unserved gateways")

    def record_drops(self, record: Callable[[Entry], None]) -> None:
        """From now on what the slots drop is recorded."""
        self._drops = Drops(self._launcher, record)
        machines = self._drops.run(lambda: [one for one in self._gateways.values() if one.wanted])
        self._watching = asyncio.get_running_loop().create_task(machines)

    async def last_of(self, gateway: Gateway) -> None:
        """The machine of a sandbox ends: what its slot dropped, and is not recorded yet, is."""
        if self._drops is not None:
            await self._drops.last(gateway)

    async def close(self) -> None:
        """Lets go of everything; gateways and their flows go on without us."""
        for timer in self._timers.values():
            timer.cancel()
        for task in (self._watching, self._retrying):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._shards), self.leases.close())

    def of(self, sandbox_id: str, project: str, generation: int, folder: Path) -> Gateway:
        """The gateway of a sandbox that is known from now on."""
        gateway = self._gateways[sandbox_id] = Gateway(self, sandbox_id, project, generation, folder)
        return gateway

    def forget(self, sandbox_id: str) -> None:
        """The sandbox was deleted."""
        self._gateways.pop(sandbox_id, None)
        self._failed.pop(sandbox_id, None)

    def shard_of(self, project: str) -> Link:
        """Whoever serves the sandboxes of a project."""
        return self._shards[shard_of(project, len(self._shards))] if self._shards else self._none

    async def hand_over(self, gateway: Gateway) -> None:
        """Gives a shard the listeners of a sandbox. Raises `LaunchRefused` where it has no network, `VmmError`, `OSError`, `Unavailable`."""
        number = shard_of(gateway.project, len(self._shards))
        fds = await self._launcher.listeners(gateway.sandbox_id, gateway.generation)
        try:
            async with asyncio.timeout(HAND_OVER_WITHIN_S):
                answer = await self._send(number, gateway, fds)
        except TimeoutError:
            raise Unavailable("peer_lost", f"egress-{number} did not take the listeners.", "Try again.") from None
        finally:
            for fd in fds:
                os.close(fd)
        if isinstance(answer, ListenersRefused):
            raise Unavailable("listeners_refused", answer.message, "The log of the gateway process says more.")

    async def _send(self, number: int, gateway: Gateway, fds: Sequence[int]) -> FdsAnswer:
        sock = await seqpacket.connect(self._run / egress.FDS_SOCKET.format(shard=number))
        try:
            message = Listeners(sandbox_id=gateway.sandbox_id, generation=gateway.generation)
            await seqpacket.send(sock, msgspec.json.encode(message), fds)
            octets = await seqpacket.receive(sock, MAX_DATAGRAM)
        finally:
            sock.close()
        try:
            return _answers.decode(octets)
        except msgspec.DecodeError as error:
            raise Unavailable("peer_lost", f"egress-{number} answered nothing: {error}", "Try again.") from error

    # -- asks

    def asks(self) -> tuple[Asked, ...]:
        """Every request that is held now."""
        return tuple(asked for asked, _ in self._asks.values())

    async def answer(self, answer: AskAnswer) -> None:
        """Takes a decision to the request that waits for it; one that is gone is answered the same. Raises `Unavailable("peer_lost")`."""
        gateway = self._gateways.get(answer.sandbox_id)
        if gateway is None:
            raise NotFound("unknown_sandbox", "This node has no such sandbox.", "List the sandboxes.")
        await self.shard_of(gateway.project).call("gateway.answer", answer, Empty)
        self._asks.pop(answer.ask_id, None)

    def _heard(self, number: int, name: str, params: msgspec.Raw) -> None:
        try:
            if name == "gateway.asked":
                self._asked(number, msgspec.msgpack.decode(params, type=Asked))
            elif name == "gateway.ask_ended":
                self._ask_ended(msgspec.msgpack.decode(params, type=AskEnded))
            elif name == "gateway.renewed":
                self._renewed(msgspec.msgpack.decode(params, type=GatewayRenewed))
        except msgspec.MsgspecError as error:
            log.warning("egress-%d sent an event that cannot be read: %s", number, error)

    def _renewed(self, renewed: GatewayRenewed) -> None:
        gateway = self._gateways.get(renewed.sandbox_id)
        if gateway is not None and gateway.generation == renewed.generation:
            gateway.renewed(renewed.ca_certificate)

    def _asked(self, number: int, asked: Asked) -> None:
        gateway = self._gateways.get(asked.sandbox_id)
        if gateway is None or gateway.generation != asked.generation or len(self._asks) >= MAX_ASKS:
            return  # it times out into a denial
        if asked.ask_id not in self._asks:
            self._asks[asked.ask_id] = (asked, number)
            self.on_asked(asked)

    def _ask_ended(self, ended: AskEnded) -> None:
        if self._asks.pop(ended.ask_id, None) is not None:
            self.on_ask_ended(ended)

    def _end_asks(self, number: int, still: frozenset[str] = frozenset()) -> None:
        """Of a shard that ended: what it held is gone with its flows."""
        for ask_id, (asked, shard) in list(self._asks.items()):
            if shard == number and ask_id not in still:
                self._ask_ended(AskEnded(ask_id=ask_id, sandbox_id=asked.sandbox_id, why="closed"))

    # -- shards that come and go

    def _served_by(self, number: int) -> list[Gateway]:
        count = len(self._shards)
        return [one for one in self._gateways.values() if one.wanted and shard_of(one.project, count) == number]

    async def _up(self, number: int) -> None:
        link = self._shards[number]
        while True:  # the end of the connection ends it
            try:
                there = {(one.sandbox_id, one.generation) for one in (await self._list(link))}
                held = (await link.call("gateway.asks", Empty(), AskList)).asks
                break
            except HatchwayError as error:
                log.warning("%s: %s", link.name, error)
            await asyncio.sleep(RETRY_S)
        self._end_asks(number, frozenset(asked.ask_id for asked in held))
        for asked in held:
            self._asked(number, asked)
        for sandbox_id, generation in sorted(there):
            known = self._gateways.get(sandbox_id)
            if known is None or known.generation != generation or not known.wanted:
                log.warning("%s serves %s, which is nobody's; closing it", link.name, sandbox_id)
                ref = GatewayRef(sandbox_id=sandbox_id, generation=generation)
                await self._close_stray(link, ref)
        unserved = [one for one in self._served_by(number) if not one.served]
        for gateway in unserved:
            self._failed.pop(gateway.sandbox_id, None)
        await self._serve(unserved, there)
        self._settled.add(number)

    async def _serve(self, unserved: Sequence[Gateway], there: Set[tuple[str, int]]) -> None:
        turns = asyncio.Semaphore(AT_ONCE)

        async def again(gateway: Gateway) -> None:
            async with turns:
                served = await gateway.serve_again(there=(gateway.sandbox_id, gateway.generation) in there)
            if served:
                self._failed.pop(gateway.sandbox_id, None)
            else:
                times, _ = self._failed.get(gateway.sandbox_id, (0, 0.0))
                pause = min(RETRY_S * 2.0 ** min(times, 16), RETRY_AT_MOST_S)
                self._failed[gateway.sandbox_id] = times + 1, time.monotonic() + pause

        await asyncio.gather(*(again(one) for one in unserved))

    def retry_soon(self, gateway: Gateway) -> None:
        """Something changed of a sandbox that is not served: it may be now."""
        self._failed.pop(gateway.sandbox_id, None)

    async def _retry_forever(self) -> None:
        while True:
            await asyncio.sleep(RETRY_EVERY_S)
            due = [self._serve(self._due(number), frozenset()) for number in sorted(self._settled)]
            for result in await asyncio.gather(*due, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("sandboxes are not served", exc_info=result)

    def _due(self, number: int) -> list[Gateway]:
        """Those of a shard that are not served, and are to be tried now; what a verb has in hand is the verb's."""
        now = time.monotonic()
        unserved = [one for one in self._served_by(number) if not one.served and not one.busy]
        return [one for one in unserved if self._failed.get(one.sandbox_id, (0, 0.0))[1] <= now]

    async def _list(self, link: Link) -> tuple[GatewayRef, ...]:
        return (await link.call("gateway.list", Empty(), GatewayList)).gateways

    async def _close_stray(self, link: Link, ref: GatewayRef) -> None:
        try:
            await link.call("gateway.close", ref, Empty)
        except HatchwayError as error:
            log.warning("%s: %s was not closed: %s", link.name, ref.sandbox_id, error)

    def _down(self, number: int) -> None:
        self._settled.discard(number)
        for gateway in self._served_by(number):
            gateway.lost()
        if (timer := self._timers.pop(number, None)) is not None:
            timer.cancel()
        self._timers[number] = asyncio.get_running_loop().call_later(AWAY_AFTER_S, self._still_away, number)

    def _still_away(self, number: int) -> None:
        for gateway in self._served_by(number):
            gateway.note_away()
