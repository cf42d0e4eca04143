"""Connections to ports in guests, within bounds, and what a client is told when there is none."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator

from hatchway.domain.errors import BadGateway, Exhausted, HatchwayError, Unavailable
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.ports.names import Port
from hatchway.node.guest.seam import GuestError, GuestStream, LinkLost


class Dialler:
    """Connects, and counts what is open."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._open = 0
        self._of_sandbox: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def connection(self, port: Port) -> AsyncIterator[GuestStream]:
        """A connection to a port, until the block is left.

        Raises `Conflict("sandbox_not_running")`, `BadGateway` (`port_closed port_unreachable`), `Exhausted("too_many_port_connections")`
        and `Unavailable("sandbox_unreachable")`.
        """
        limits, sandbox_id = self._plane.limits, port.sandbox_id
        await self._plane.ready(sandbox_id)
        link = self._plane.link_of(sandbox_id)
        of_sandbox = self._of_sandbox.get(sandbox_id, 0)
        if of_sandbox >= limits.port_connections_per_sandbox or self._open >= limits.port_connections:
            raise _too_many(
                f"{max(of_sandbox, 1)} connections to ports of the sandbox, {self._open} of the node, are open."
            )
        self._open += 1
        self._of_sandbox[sandbox_id] = of_sandbox + 1
        try:
            try:
                async with asyncio.timeout(limits.port_dial_s):
                    stream = await link.dial(port.number)
            except (GuestError, TimeoutError) as error:
                raise _not_connected(port, error) from error
            except LinkLost as error:
                raise unreachable(error) from error
            try:
                yield stream
            finally:
                await stream.close()
        finally:
            self._open -= 1
            self._of_sandbox[sandbox_id] -= 1
            if not self._of_sandbox[sandbox_id]:
                del self._of_sandbox[sandbox_id]


async def broken(stream: GuestStream) -> str:
    """At the end of what a peer sent: why the connection broke there; "" when it was the peer's orderly end. Raises `LinkLost`."""
    ending = asyncio.ensure_future(stream.wait())
    try:
        await asyncio.sleep(0)
        if not ending.done():
            return ""
        proc = ending.result()
        return (proc.message or "it was reset") if proc.exit_code else ""
    finally:
        ending.cancel()


def unreachable(error: LinkLost) -> Unavailable:
    """The error of a sandbox that is gone, or does not answer."""
    return Unavailable(
        "sandbox_unreachable",
        f"The sandbox does not answer: {error}",
        "Look at its state; start it again if it stopped.",
    )


def _not_connected(port: Port, error: GuestError | TimeoutError) -> HatchwayError:
    number = error.errno if isinstance(error, GuestError) else errno.ETIMEDOUT
    if number == errno.EAGAIN:
        return _too_many(str(error))
    if number == errno.ECONNREFUSED:
        return BadGateway(
            "port_closed",
            f"Nothing in the sandbox listens on port {port.number}.",
            "Start the server in the sandbox; any of its addresses will do, 127.0.0.1 too.",
            port=port.number,
        )
    why = "it did not take the connection in time" if number == errno.ETIMEDOUT else str(error)
    return BadGateway(
        "port_unreachable",
        f"Port {port.number} of the sandbox cannot be connected to: {why}.",
        "Look at the server in the sandbox.",
        port=port.number,
    )


def _too_many(cause: str) -> Exhausted:
    return Exhausted("too_many_port_connections", cause, "Close some, or try again later.")
