"""One request to the API: who asks, what the path names, what the body says; and the few things that every handler does."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from hatchway.e2b.errors import E2bError
from hatchway.e2b.held import Full, Held
from hatchway.e2b.wrapper import Wrapper

if TYPE_CHECKING:
    from hatchway.client.atransport import AsyncDriver
    from hatchway.client.steps import Flow

T = TypeVar("T")

MAX_BODY = 1024 * 1024
BODY_WITHIN_S = 30.0
MAX_HELD = 64 * 1024 * 1024
"""Octets of bodies that are in memory at once: nobody has shown a good key when they are read."""
WITHIN_S = 55.0
"""How long a request may take in all: SDKs wait 60 s for an answer."""

_held = Held(MAX_HELD, MAX_HELD, MAX_HELD)
_background: set[asyncio.Task[Any]] = set()


@dataclass(frozen=True)
class Call:
    """One request; what it asks of API v1 is done with the caller's key."""

    wrapper: Wrapper
    request: Request
    path: Mapping[str, str]
    driver: "AsyncDriver"
    until: float
    """When it has to be answered, in the loop's time."""

    async def run(self, flow: "Flow[T]") -> T:
        """Asks API v1. Raises the client's errors."""
        return await self.driver.run(flow)

    @property
    def left_s(self) -> float:
        """How much time there is."""
        return max(0.0, self.until - asyncio.get_running_loop().time())

    async def body(self, kind: type[T]) -> T:
        """The body, an object of JSON; nothing at all is one without members. Raises `E2bError` 400, 413."""
        raw = await _read(self.request)
        try:
            return msgspec.json.decode(raw or b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise E2bError(400, f"The body is not what it should be: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise E2bError(400, f"The body is no JSON: {error}") from None

    def query(self, name: str) -> str | None:
        """A parameter of the query, None without it."""
        return self.request.query_params.get(name)


Handler = Callable[[Call], Awaitable[Response]]


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(
        msgspec.json.encode(body), status, {"cache-control": "no-store", **(headers or {})}, "application/json"
    )


def nothing() -> Response:
    """204."""
    return Response(None, 204)


def later(work: Coroutine[Any, Any, Any]) -> None:
    """Does something that nobody waits for."""
    task = asyncio.get_running_loop().create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        with _held.share("", "") as share:
            async with asyncio.timeout(BODY_WITHIN_S):
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_BODY:
                        raise E2bError(413, f"The body is larger than {MAX_BODY} octets.")
                    share.hold(size)
                    parts.append(part)
    except Full:
        raise E2bError(503, "Too much is being sent at once.", retry=True) from None
    except ClientDisconnect:
        raise E2bError(400, "The connection ended in the middle of the body.") from None
    except TimeoutError:
        raise E2bError(408, f"The body did not come within {BODY_WITHIN_S:g} seconds.") from None
    return b"".join(parts)
