"""`GET /v1/sessions/{id}/output`: the raw octets of one stream."""

import asyncio

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Gone
from hatchway.node.dataplane import requests
from hatchway.node.dataplane.plane import Plane
from hatchway.node.sessions.follower import Follower
from hatchway.node.sessions.session import Session
from hatchway.node.sessions.spool import STDERR, STDOUT, Gap

_STREAMS = {"stdout": STDOUT, "stderr": STDERR}
_GAPS = ("fail", "skip")


class Output:
    """The endpoint; an ASGI application.

    Parameters: `stream` (stdout), `from` (0), `follow` (1: until the session ended), `gaps` (`fail` or `skip`). Raw octets
    cannot say that some are missing: a gap at the start is an error or, with `skip`, moves the start, which the header
    `Hatchway-Offset` tells; a gap further on cuts the answer off (no last chunk), and the next request meets it at its start.
    """

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        plane = self._plane
        session, claims = requests.session_of(scope, plane.tokens, plane.sessions)
        request = Request(scope)
        name = request.query_params.get("stream", "stdout")
        gaps = request.query_params.get("gaps", "fail")
        if name not in _STREAMS:
            raise invalid_field("stream", f"it is {name[:40]!r}.", list(_STREAMS))
        if gaps not in _GAPS:
            raise invalid_field("gaps", f"it is {gaps[:40]!r}.", list(_GAPS))
        follow = requests.flag(request, "follow", default=True)
        fd = _STREAMS[name]
        at = {STDOUT: 0, STDERR: 0, fd: requests.offset(request, "from") or 0}
        with plane.following(session, claims, at[STDOUT], at[STDERR]) as follower:
            cursor = follower.cursors[fd]
            while isinstance(missing := cursor.peek(1), Gap):
                if gaps == "fail":
                    raise Gone(
                        "output_dropped",
                        f"Octets {missing.start} to {missing.end} of {name} are not kept ({missing.cause}).",
                        f"Go on from {missing.end}, or use gaps=skip.",
                        stream=name,
                        **{"from": missing.start, "to": missing.end},
                    )
                cursor.position = missing.end
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"cache-control", b"no-store"),
                (b"hatchway-offset", b"%d" % cursor.position),
            ]
            departure = requests.Departure(receive, lambda: follower.stop("disconnected"))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                if await self._stream(session, follower, fd, send, follow=follow):
                    await send({"type": "http.response.body", "body": b""})
            finally:
                departure.close()

    async def _stream(self, session: Session, follower: Follower, fd: int, send: Send, *, follow: bool) -> bool:
        """Returns whether the octets are complete; an answer that is not completed is cut off."""
        cursor = follower.cursors[fd]
        while not follower.stopped:
            chunk = cursor.peek(self._plane.limits.raw_octets)
            if isinstance(chunk, Gap):
                return False
            if chunk is not None:
                cursor.position += len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                # To a client that is gone, send never waits: without a turn for the loop nobody would hear that it is.
                await asyncio.sleep(0)
            elif session.ended or not follow:
                return True
            else:
                await follower.wait(self._plane.limits.ping_s)
        return False
