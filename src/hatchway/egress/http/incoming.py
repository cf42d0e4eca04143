"""What a request is to whoever carries it, in whatever version of HTTP it came."""

from typing import Protocol

from hatchway.egress.http.heads import Fields, RequestHead
from hatchway.egress.http.refusals import Refused
from hatchway.egress.http.waiting import Alarm


class Over(Exception):
    """The exchange ended in the middle, and the client's side of it with it: nothing more can be said."""


class Incoming(Protocol):
    """A request as one version of HTTP brings it, and the way back to its client."""

    @property
    def head(self) -> RequestHead:
        """What it asks."""
        ...

    @property
    def alarm(self) -> Alarm:
        """Of the task that carries the request."""
        ...

    @property
    def begun(self) -> bool:
        """The answer began: nothing else can be said any more."""
        ...

    def body_here(self) -> bytes | None:
        """The whole body, when it is here and small; None: it is still to be read by `piece`. Raises `HatchwayError` for a bad one."""
        ...

    async def piece(self, alarm: Alarm) -> bytes:
        """The next octets of the body; `b""` at its end. `alarm` is of the task that calls. Raises `HatchwayError` for a bad or slow one, `StreamLost`."""
        ...

    def go_on(self) -> None:
        """The client may send the body, if it waits to be told."""
        ...

    def begin(self, status: int, reason: str, answered: Fields, length: int | None, *, bodiless: bool) -> None:
        """The answer begins; `length` of its body, None: unknown. `bodiless`: none follows, whatever the fields say."""
        ...

    async def send(self, piece: bytes) -> None:
        """Octets of the answer's body. Raises `StreamLost` and `TimeoutError` when the client does not take them."""
        ...

    async def finish(self) -> None:
        """The answer is whole."""
        ...

    async def refuse(self, answer: Refused) -> None:
        """An answer of ours instead."""
        ...

    def break_off(self) -> None:
        """Ends it in the middle, in a way that nobody takes for an end."""
        ...
