"""The Python SDK: `Hatchway` for blocking code, `AsyncHatchway` for asyncio, and what they hand out.

Imports no server code, only httpx, msgspec and the standard library; `cli/` and users call it. The logic of every call is
in flows without I/O (`calls`, `streams`), which the drivers in `transport` and `atransport` carry out; what is not named in `__all__`
here may change.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    BadAnswer,
    CommandFailed,
    Conflict,
    ConnectionFailed,
    Exhausted,
    Forbidden,
    Gone,
    HatchwayError,
    HeadTooLarge,
    HostExhausted,
    Internal,
    InvalidRequest,
    NotFound,
    OperationFailed,
    OutputLimit,
    StreamLost,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unprocessable,
    UnsupportedMedia,
    WaitTimeout,
)
from .events import End, Exit, Gap, Output, SessionEvent, Started, StreamName, Usage
from .models import (
    GuestUsage,
    HostUsage,
    Key,
    NewKey,
    Operation,
    OperationError,
    Result,
    SandboxInfo,
    SandboxMetrics,
    ServiceEvent,
    SessionInfo,
    Template,
)
from .sync import Hatchway, Sandbox, Session

if TYPE_CHECKING:
    from .aio import AsyncHatchway, AsyncSandbox, AsyncSession

__all__ = [
    "AsyncHatchway",
    "AsyncSandbox",
    "AsyncSession",
    "BadAnswer",
    "CommandFailed",
    "Conflict",
    "ConnectionFailed",
    "End",
    "Exhausted",
    "Exit",
    "Forbidden",
    "Gap",
    "Gone",
    "GuestUsage",
    "Hatchway",
    "HatchwayError",
    "HeadTooLarge",
    "HostExhausted",
    "HostUsage",
    "Internal",
    "InvalidRequest",
    "Key",
    "NewKey",
    "NotFound",
    "Operation",
    "OperationError",
    "OperationFailed",
    "Output",
    "OutputLimit",
    "Result",
    "Sandbox",
    "SandboxInfo",
    "SandboxMetrics",
    "ServiceEvent",
    "Session",
    "SessionEvent",
    "SessionInfo",
    "Started",
    "StreamLost",
    "StreamName",
    "Template",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Unprocessable",
    "UnsupportedMedia",
    "Usage",
    "WaitTimeout",
]


def __getattr__(name: str) -> Any:
    # Who does not use the asyncio client does not load asyncio for it.
    if name in ("AsyncHatchway", "AsyncSandbox", "AsyncSession"):
        from . import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
