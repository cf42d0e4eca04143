"""The broker of this host, as the control plane speaks with it: a connection for each call, to the process of the right user."""

import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path
from typing import TypeVar

from hatchway.domain.errors import HatchwayError, Unavailable
from hatchway.wire.broker import METHODS
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

T = TypeVar("T")

WITHIN_S = 25.0
"""A broker may have to ask a Vault."""


class Unheard(Unavailable):
    """`broker_unavailable`: the broker was asked, and nobody knows whether it did it."""


class BrokerLink:
    """Calls the broker. It has no state: whatever dies, the next call finds the broker that is there then."""

    def __init__(self, path: Path | None, uid: int | None) -> None:
        self._path = path
        self._uid = os.geteuid() if uid is None else uid

    async def call(self, method: str, params: object, result: type[T]) -> T:
        """Raises what the broker answers, and `Unavailable("broker_unavailable")` when it is not there: `Unheard` where it was asked and did not answer."""
        assert METHODS[method][1] is result
        if self._path is None:
            raise Unavailable(
                "broker_unavailable",
                "This control plane has no broker.",
                "Credentials are kept on the host of the broker.",
            )
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self._call(self._path, method, params, result)
        except TimeoutError:
            raise _unavailable("it does not answer", Unheard) from None
        except OSError as error:
            raise _unavailable(f"it cannot be reached ({type(error).__name__})") from None
        except Unavailable as error:
            if error.code == "peer_lost":
                raise _unavailable("it ended in the middle", Unheard) from None
            raise

    async def _call(self, path: Path, method: str, params: object, result: type[T]) -> T:
        with address(path) as at:
            reader, writer = await asyncio.open_unix_connection(at)
        raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", raw)[1] not in (self._uid, 0):
            writer.close()
            raise _unavailable("another user listens in its place")
        connection = Connection(reader, writer)
        running = asyncio.ensure_future(connection.run())
        try:
            return await connection.call(method, params, result)
        finally:
            await connection.close()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def _unavailable(cause: str, kind: type[Unavailable] = Unavailable) -> HatchwayError:
    return kind(
        "broker_unavailable",
        f"The broker is not there: {cause}.",
        "It is started again by itself; try again in a moment.",
    )
