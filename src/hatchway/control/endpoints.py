"""What an endpoint is: a handler and everything that must be said of it, for routing, checking and OpenAPI alike.

FastAPI would do this from annotations, at 14 MiB more (docs/decisions/0011-an-http-layer-without-fastapi.md).
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hatchway.control.plane import Plane
from hatchway.domain.problems import MEDIA_TYPE
from hatchway.storage.idempotency import Answered, IdempotencyKey
from hatchway.storage.rows import KeyRow

B = TypeVar("B")

_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing, or an empty object."""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No query parameters."""


@dataclass(frozen=True)
class Call(Generic[B]):
    """One request, checked: who asks, what the path names, what body and query say."""

    plane: Plane
    request: Request
    key: KeyRow
    path: Mapping[str, str]
    body: B
    query: Any
    idempotency: IdempotencyKey | None

    @property
    def project(self) -> str:
        """The project of the key: everything that the call sees and makes is in it."""
        return self.key.project


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. `answers` maps statuses to what is answered; `errors` lists the statuses of problem documents."""

    method: str
    path: str
    handler: Callable[[Call[Any]], Awaitable[Response]]
    summary: str
    answers: Mapping[int, type[msgspec.Struct] | None]
    tag: str
    scope: str | None = "read"
    """Scope that the key must have; None for what anyone may ask."""
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] = NoQuery
    query_prefixes: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    repeated: Callable[[Call[Any], Answered], Awaitable[Response]] | None = None
    """Answers a repetition, by what was kept of the first; what takes an `Idempotency-Key` has it. No handler sees a repetition."""
    waits: bool = False
    """Takes `Prefer: wait=N`."""
    stream: bool = False
    """Answers server-sent events."""
    description: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further request headers: name and description."""

    @property
    def idempotent(self) -> bool:
        """Takes an `Idempotency-Key`."""
        return self.repeated is not None


def answer(body: msgspec.Struct | None, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; nothing in it may be cached."""
    if body is None:
        return Response(None, status, {**_HEADERS, **(headers or {})})
    return Response(msgspec.json.encode(body), status, {**_HEADERS, **(headers or {})}, "application/json")


def problem(body: bytes, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """A problem document."""
    return Response(body, status, {**_HEADERS, **(headers or {})}, MEDIA_TYPE)
