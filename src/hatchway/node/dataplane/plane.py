"""What all endpoints of the data plane share, and the streams that are open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hatchway.domain.errors import Conflict, Unavailable
from hatchway.domain.lifecycle import State, Verb, verbs_from
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.seam import Guests
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.guest.seam import GuestLink
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.sessions import Sessions


@dataclass
class Plane:
    """One data plane: its parts, its bounds, and the streams that clients read now."""

    sessions: Sessions
    tokens: TokenChecker
    guests: Guests
    limits: PlaneLimits
    closing: bool = False
    streams: dict[Follower, str] = field(default_factory=dict)
    """Open streams, and the id of the token that each was opened with."""

    def __post_init__(self) -> None:
        self.tokens.on_revoked(self.end_revoked)

    @contextmanager
    def following(self, session: Session, token_id: str, stdout: int, stderr: int) -> Iterator[Follower]:
        """A follower of a session, until the block is left. Raises what `Session.follow` does, and `Unavailable("closing")`."""
        if self.closing:
            raise Unavailable("closing", "The node is shutting down.", "Attach again in a moment, at the same offsets.")
        follower = session.follow(stdout, stderr)
        self.streams[follower] = token_id
        try:
            yield follower
        finally:
            self.streams.pop(follower, None)
            follower.close()

    def link(self, session: Session) -> GuestLink:
        """The agent of the session's sandbox. Raises `Conflict("sandbox_not_running")` that names the way out."""
        sandbox_id = session.record.spec.sandbox_id
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

    def end_revoked(self, token_ids: frozenset[str]) -> None:
        """Ends the streams that were opened with these tokens."""
        for follower, token_id in self.streams.items():
            if token_id in token_ids:
                follower.stop("revoked")

    def close(self) -> None:
        """Ends all streams where they are: clients go on elsewhere or later, at their offsets."""
        self.closing = True
        for follower in self.streams:
            follower.stop("shutdown")
