"""What a flow asks its driver to do.

A *flow* is a generator that holds the whole logic of one call (requests, retries, waiting, decoding) and does no I/O: it
yields steps and is sent their outcomes. The sync and the async driver in `transport` carry them out, so that both clients
share every decision. A step that cannot be done because nobody answers is thrown into the flow as `ConnectionFailed`.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from .bodies import Body

T = TypeVar("T")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `body` is empty for a stream that was opened with success: `Read` gives it piece by piece."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """Do one HTTP request; the outcome is a `Reply`, whatever its status.

    `url` is absolute, or a path of the API. `token` replaces the API key; `timeout_s` bounds each wait for octets.
    """

    method: str
    url: str
    json: object = None
    content: bytes | Body | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    token: str | None = None
    timeout_s: float | None = None
    repeatable: bool = True
    """Whether doing it twice is the same as doing it once."""


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream, instead of one that is open. The outcome is a `Reply`, with a body only for a status >= 400."""

    request: Request


@dataclass(frozen=True, slots=True)
class Read:
    """Wait for the next piece of the open stream; the outcome is the octets, none at its end."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit(Generic[E]):
    """Hand an item to whoever iterates; comes back when the next one is asked for."""

    item: E


Flow: TypeAlias = Generator[Request | Pause, Any, T]
"""One call that returns a `T`."""

Stream: TypeAlias = Generator[Request | Pause | Open | Read | Emit[E], Any, None]
"""One iteration over items `E`."""
