"""What the host asked the agent and has no answer to yet.

Every request is idempotent and stays here until it is answered, over as many connections as it takes: after each
resynchronisation all of them are sent again, under the ids they have.
"""

import asyncio
import errno
import secrets
from collections import deque
from collections.abc import Callable, Iterator

from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.wire.channel import MAX_REQUESTS
from hatchway.wire.channel_fields import Fields, Tag

MAX_WAITING = 1024
"""Requests that wait behind the `MAX_REQUESTS` that the agent takes at once."""
MESSAGE_LENGTH = 1024
"""What is kept of a text that the guest sent for people, in characters."""


def readable(text: str | None) -> str:
    """What the guest said for people: cut, and without what a terminal or a reader of logs would take for more than text."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in (text or "")[:MESSAGE_LENGTH]
    )


class Request:
    """One request. `encode` gives its octets anew for every sending, so that what ages (a clock) can be brought up to date."""

    __slots__ = ("age", "answer", "encode", "number", "sent", "what")

    def __init__(self, number: int, what: str, encode: Callable[[], bytes]) -> None:
        self.number = number
        self.what = what
        self.encode = encode
        self.answer: asyncio.Future[Fields] = asyncio.get_running_loop().create_future()
        self.age = 0
        """Seconds that it waits, counted by the link's ticks: time in which the guest stood still does not count."""
        self.sent = False
        """Whether it went out on the present connection."""

    def refuse(self, error: Exception) -> None:
        """Fails it, unless it is answered or nobody waits for it any more."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it may be asked for later than the loop complains of


class Requests:
    """All unanswered requests of one link."""

    def __init__(self) -> None:
        # A random beginning: an answer that was meant for a node that ended cannot be taken for one of ours.
        self._next = secrets.randbelow(2**31)
        self._sent: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent or self._waiting)

    def number(self) -> int:
        """Returns an id that is not in use."""
        self._next = (self._next + 1) % 2**32
        return self._next

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. Raises `GuestError(EAGAIN)` when `MAX_WAITING` wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise GuestError(
                errno.EAGAIN, f"{MAX_WAITING} requests wait for the sandbox's agent already; try again later"
            )
        self._waiting.append(request)

    def due(self) -> Iterator[Request]:
        """Gives the requests that may be sent now, marked as sent."""
        while self._waiting and len(self._sent) < MAX_REQUESTS:
            request = self._waiting.popleft()
            if request.answer.done():  # its caller was cancelled before it went out
                continue
            request.sent = True
            self._sent[request.number] = request
            yield request

    def connection_lost(self) -> None:
        """All that was sent is to be sent again, before anything newer."""
        for request in reversed(self._sent.values()):
            request.sent = False
            if not request.answer.done():
                self._waiting.appendleft(request)
        self._sent.clear()

    def answered(self, number: int, fields: Fields) -> bool:
        """Takes the answer to a request; False when there is no such request."""
        status = fields.number(Tag.STATUS)
        request = self._sent.pop(number, None)
        if request is None:
            return False
        if request.answer.done():
            return True
        if status == 0:
            request.answer.set_result(fields)
        else:
            message = readable(fields.get_text(Tag.MESSAGE))
            request.refuse(GuestError(status, message or f"{request.what}: error {status}"))
        return True

    def grow_older(self, bound: int) -> None:
        """One second passed: what waits longer than `bound` seconds fails with `LinkLost`."""
        for request in (*self._sent.values(), *self._waiting):
            request.age += 1
            if request.age > bound:
                request.refuse(LinkLost(f"the agent did not answer to {request.what} within {bound} s"))
        for request in [request for request in self._waiting if request.answer.done()]:
            self._waiting.remove(request)

    def fail(self, error: LinkLost) -> None:
        """Nothing will ever be answered."""
        for request in (*self._sent.values(), *self._waiting):
            request.refuse(LinkLost(str(error)))
        self._sent.clear()
        self._waiting.clear()
