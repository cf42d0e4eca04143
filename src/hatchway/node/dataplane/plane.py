"""What all endpoints of the data plane share, and the streams that are open."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hatchway.domain.errors import Conflict, Unavailable
from hatchway.domain.lifecycle import State, Verb, verbs_from
from hatchway.node.activity import Uses
from hatchway.node.dataplane.accesses import Accesses
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.seam import Guests
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.waking import Waker
from hatchway.wire.tokens import Claims


@dataclass(eq=False, slots=True)
class Opened:
    """Something that a client holds open, and the right that it was opened with."""

    claims: Claims
    stop: Callable[[str], None]
    """Ends it; called at most once, with why: `revoked superseded expired shutdown`."""
    stopped: bool = False

    def end(self, why: str) -> None:
        """Ends it, once."""
        if not self.stopped:
            self.stopped = True
            self.stop(why)


@dataclass
class Plane:
    """One data plane: its parts, its bounds, and the streams that clients hold open now."""

    sessions: Sessions
    tokens: TokenChecker
    guests: Guests
    limits: PlaneLimits
    uses: Uses = field(default_factory=Uses)
    waker: Waker | None = None
    accesses: Accesses = field(default_factory=Accesses)
    closing: bool = False
    streams: set[Opened] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens.on_revoked(self._end_revoked)
        self.tokens.on_generation(self._end_superseded)

    @contextmanager
    def opened(self, claims: Claims, stop: Callable[[str], None]) -> Iterator[None]:
        """Has `stop` called with the reason as soon as what was opened with `claims` must end, until the block is left. Raises `Unavailable("closing")`."""
        if self.closing:
            raise Unavailable(
                "closing", "The node is shutting down.", "Try again in a moment; attach at the same offsets."
            )
        stream = Opened(claims, stop)
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(max(0.0, claims.expires_at - time.time()), stream.end, "expired")
        self.streams.add(stream)
        try:
            with self.uses.during(claims.sandbox_id):
                yield
        finally:
            self.streams.discard(stream)
            expiry.cancel()

    @contextmanager
    def following(
        self, session: Session, claims: Claims, stdout: int, stderr: int, *, stop: Callable[[str], None] | None = None
    ) -> Iterator[Follower]:
        """A follower of a session, until the block is left; `stop` is told when it must be, by default the follower itself.

        Raises what `Session.follow` and `opened` do.
        """
        follower = session.follow(stdout, stderr)
        try:
            with self.opened(claims, stop or follower.stop):
                yield follower
        finally:
            follower.close()

    async def ready(self, sandbox_id: str) -> None:
        """Somebody wants something of the sandbox: waits until it runs, where it is woken by that. Raises `Conflict("wake_failed")`,
        `Unavailable("wake_timeout")`."""
        self.uses.note(sandbox_id)
        if self.waker is not None:
            await self.waker.awake(sandbox_id)

    async def ready_for(self, session: Session) -> None:
        """Like `ready`, for what is asked of a session: of one that has ended nothing is asked any more."""
        if session.living or not session.started:
            await self.ready(session.record.spec.sandbox_id)

    def link(self, session: Session) -> GuestLink:
        """The agent of the session's sandbox; see `link_of`."""
        return self.link_of(session.record.spec.sandbox_id)

    def link_of(self, sandbox_id: str) -> GuestLink:
        """The agent of a sandbox. Raises `Conflict("sandbox_not_running")` that names the way out."""
        link = self.guests.link_of(sandbox_id)
        if link is not None:
            return link
        state = self.guests.state_of(sandbox_id)
        ways: tuple[Verb, ...] = ()
        if state is not None and state in State.__members__.values():
            wanted = (Verb.RESUME, Verb.START, Verb.WAKE)
            ways = tuple(verb for verb in verbs_from(State(state)) if verb in wanted)
        remedy = (
            f"POST /v1/sandboxes/{sandbox_id}/{ways[0]}, then try again."
            if ways and state != State.RUNNING
            else "Try again when the sandbox is running."
        )
        raise Conflict(
            "sandbox_not_running",
            f"The sandbox is {state or 'not on this node'}.",
            remedy,
            state=state,
        )

    def close(self) -> None:
        """Ends all streams where they are: clients go on elsewhere or later, at their offsets."""
        self.closing = True
        self._end(lambda claims: True, "shutdown")

    def _end_revoked(self) -> None:
        self._end(self.tokens.is_revoked, "revoked")

    def _end_superseded(self, sandbox_id: str, generation: int) -> None:
        self._end(lambda claims: claims.sandbox_id == sandbox_id and claims.generation < generation, "superseded")

    def _end(self, which: Callable[[Claims], bool], why: str) -> None:
        for stream in list(self.streams):
            if which(stream.claims):
                stream.end(why)
