"""How many connections the wrapper's listener has: who asks nothing gives way to who comes, and who comes when all are busy is told so.

A client needs no key to connect and say nothing, and SDKs keep connections for later; so that neither can take the way in from others, a
connection without a request in hand is closed when its place is wanted, the one first that has waited longest.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import Any, cast

import msgspec
from starlette.types import Receive, Scope, Send

from hatchway.domain.errors import HatchwayError
from hatchway.e2b import errors
from hatchway.e2b.errors import E2bError
from hatchway.wire.http_head import BoundedHead, closing_octets

MOST = 16_384
"""Connections that are open, four times as many as requests to sandboxes (`places`). One takes at most four descriptors."""
BEYOND = 256
"""More of them that may wait for their refusal: it is an answer, and needs a request."""
TELL_EVERY_S = 60.0

log = logging.getLogger(__name__)


class Room:
    """The connections of one listener. `most` have a place; `beyond` more are let in to hear that there is none."""

    def __init__(self, most: int = MOST, beyond: int = BEYOND) -> None:
        self.most = most
        self._most_beyond = beyond
        self._idle: OrderedDict[Head, None] = OrderedDict()
        """Those with a place and no request in hand; who has waited longest is the first."""
        self._beyond: set[Head] = set()
        self._told = float("-inf")

    def enters(self, head: "Head") -> None:
        """It was opened."""
        if self._placed(head) <= self.most or self._one_gives_way():
            self._idle[head] = None
        elif len(self._beyond) < self._most_beyond:
            self._beyond.add(head)
        else:
            self._tell("%d connections are open, all with requests in hand: more are cut off", self.most)
            head.transport.abort()

    def leaves(self, head: "Head") -> None:
        """It is closed."""
        self._idle.pop(head, None)
        self._beyond.discard(head)

    def begins(self, head: "Head") -> bool:
        """Whether a request that came over it may be served."""
        self._idle.pop(head, None)
        if head not in self._beyond:
            return True
        if self._placed(head) < self.most or self._one_gives_way():
            self._beyond.discard(head)
            return True
        self._tell("%d connections are open, all with requests in hand: more are refused", self.most)
        return False

    def rests(self, head: "Head") -> None:
        """It has no request in hand any more."""
        if head not in self._beyond:
            self._idle[head] = None

    def _placed(self, head: "Head") -> int:
        return len(head.connections) - len(self._beyond)

    def _one_gives_way(self) -> bool:
        # Who has not taken its answer yet is none that waits.
        oldest = next((one for one in self._idle if not one.transport.get_write_buffer_size()), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        oldest.transport.abort()
        self._tell("%d connections are open: those that have been idle longest are closed", self.most)
        return True

    def _tell(self, text: str, *values: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._told >= TELL_EVERY_S:
            self._told = now
            log.warning(text, *values)


class Head(BoundedHead):
    """One connection. Errors of HTTP itself have E2B's form too: SDKs read it before they look at the status."""

    room: Room

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """A client is there."""
        super().connection_made(transport)
        self.room.enters(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.room.leaves(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        if not self.room.begins(self):
            self.app = cast(Any, _Refusing(self.room.most))
            self.ws_protocol_class = None
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """It is another's from now on, who keeps the place."""
        self.room.leaves(self)
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self.room.rests(self)

    def error_octets(self, error: HatchwayError) -> bytes:
        """An error of HTTP itself."""
        body = msgspec.json.encode(errors.shown(E2bError(error.status, f"{error.cause} {error.remedy}".strip())))
        return closing_octets(error.status, {"content-type": "application/json"}, body)


class _Refusing:
    """Answers instead of the application."""

    def __init__(self, most: int) -> None:
        self._error = E2bError(
            503, f"There are {most} connections here, all with requests in hand. Try again in a moment.", retry=True
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await errors.answer(self._error, {"connection": "close"})(scope, receive, send)


def heads_in(room: Room) -> type[Head]:
    """The protocol of a listener with this room."""
    return type("HeadInRoom", (Head,), {"room": room})
