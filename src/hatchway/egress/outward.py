"""The connections of one flow to the outside: where each went, and whether it may still be there."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from hatchway.domain.policy.addresses import Address, parse_address
from hatchway.domain.policy.verdicts import Verdict
from hatchway.egress.http.seam import FlowError, Stream
from hatchway.egress.streams import TcpStream
from hatchway.egress.upstream import Dialled

if TYPE_CHECKING:
    from hatchway.egress.flows import Flow


def policy_changed() -> FlowError:
    """The error of what was allowed when it began, and is not any more now that it could go."""
    return FlowError(
        "policy_changed", "the policy was changed meanwhile, and does not let it pass as it was begun", 403
    )


class Outward:
    """See the module. `counted` gets the octets that came and went."""

    def __init__(self, flow: "Flow", counted: Callable[[int, int], None]) -> None:
        self._flow = flow
        self._counted = counted
        self._ended = False
        self._scarce: list[Callable[[], None]] = []
        self.streams: set[TcpStream] = set()
        self._places: dict[Stream, tuple[Address, int]] = {}
        """Where the open ones lead that this process dialled to an address, or the broker did; and the epoch in which that was last let pass."""
        self.told: dict[str, str] = {}
        """For the record: where the last one went."""

    async def dial(
        self, verdict: Verdict, alpn: tuple[str, ...], *, tls: bool, judge: Callable[[], None] = lambda: None
    ) -> tuple[Stream, str]:
        """Connects for what `verdict` lets pass; returns the stream, and what ALPN agreed on. `judge` is called before the first octet of TLS, and
        raises where it may not go on. Raises `FlowError`."""
        gateway = self._flow.gateway
        epoch = gateway.epoch
        under: list[TcpStream] = []

        async with self._place_outside() as taken:

            def made(stream: TcpStream) -> None:
                under.append(stream)
                taken(stream)
                self._made(stream)
                judge()

            dialled = await gateway.dialler.dial(
                gateway.target(self._flow, verdict, tls=tls),
                gateway.resolver,
                alpn=alpn,
                counted=self._counted,
                made=made,
                turn=gateway.shares.handshake,
            )
        self._note(dialled)
        self._place(dialled.stream, under[0], dialled.address, epoch)
        return dialled.stream, dialled.alpn

    async def leg(self, verdict: Verdict, credential: str, *, judge: Callable[[], None] = lambda: None) -> Stream:
        """A stream to the broker, which connects for what `verdict` lets pass. `judge`: before the broker is asked. Raises `FlowError`."""
        gateway = self._flow.gateway
        epoch = gateway.epoch
        async with self._place_outside() as taken:

            def made(stream: TcpStream) -> None:
                taken(stream)
                self._made(stream)

            leg = await gateway.leg(self._flow, verdict, credential)
            judge()
            stream, answer = await gateway.dialler.leg(leg, counted=self._counted, made=made)
        self._place(stream, stream, answer.peer_address, epoch)
        return stream

    def refused(self, verdict: Verdict, stream: Stream | None = None) -> bool:
        """Whether one of them (or this one) leads to where `verdict` may not, under the policy of now."""
        gateway = self._flow.gateway
        for one in list(self._places) if stream is None else [stream]:
            address, epoch = self._places.get(one, (None, 0))
            if address is None or epoch == gateway.epoch:
                continue
            if gateway.dialler.refused(gateway.target(self._flow, verdict, tls=self._flow.tls), address) is not None:
                return True
            self._places[one] = address, gateway.epoch
        return False

    def abort(self) -> None:
        """Resets all of them, and those that are made later."""
        self._ended = True
        for stream in list(self.streams):
            stream.abort()

    @asynccontextmanager
    async def _place_outside(self) -> AsyncIterator[Callable[[TcpStream], None]]:
        """One of the connections to the outside that a sandbox may have, which it gives back itself once it is made. Raises `FlowError("limit")`."""
        gateway = self._flow.gateway
        await gateway.shares.turns.take()
        await gateway.take_outside()
        places = [gateway.give_outside]
        try:
            yield lambda stream: stream.when_lost(places.pop())
        finally:
            if places:
                places.pop()()

    def when_scarce(self, callback: Callable[[], None]) -> None:
        """See `http.seam.BoundFlow`."""
        self._scarce.append(callback)

    def spare(self) -> None:
        """Closes what is kept for later."""
        for callback in self._scarce:
            callback()

    def _made(self, stream: TcpStream) -> None:
        if self._ended:
            stream.abort()
            return
        stream.give_room(self._flow.gateway.room)
        self.streams.add(stream)
        stream.when_lost(lambda: self.streams.discard(stream))

    def _place(self, stream: Stream, under: TcpStream, address: str, epoch: int) -> None:
        try:
            place = parse_address(address)
        except ValueError:
            return  # an upstream proxy resolved the name
        if under in self.streams:
            self._places[stream] = place, epoch
            under.when_lost(lambda: self._forget(stream))

    def _forget(self, stream: Stream) -> None:
        self._places.pop(stream, None)

    def _note(self, dialled: Dialled) -> None:
        self.told = {"upstream": dialled.address}
        if dialled.chain:
            self.told["chain"] = ", ".join(dialled.chain)
        if dialled.certificate_sha256:
            self.told["certificate_sha256"] = dialled.certificate_sha256
