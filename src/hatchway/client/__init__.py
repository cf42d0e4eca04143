"""The Python SDK: `Hatchway` for blocking code, `AsyncHatchway` for asyncio, and what they hand out.

Imports no server code, only httpx, msgspec, websockets and the standard library; `cli/` and users call it. The logic of every call is
in flows without I/O (`calls`, `streams`, `filecalls`, `wires`), which the drivers in `transport` and `atransport` carry out; what is
not named in `__all__` here may change.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    BadAnswer,
    BadGateway,
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
    Misdirected,
    NotFound,
    OperationFailed,
    OutputLimit,
    RangeUnsatisfiable,
    StreamLost,
    TooLarge,
    TooSlow,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    Unprocessable,
    UnsafeArchive,
    UnsupportedMedia,
    WaitTimeout,
)
from .events import End, Exit, Gap, Output, SessionEvent, Started, StreamName, Usage
from .models import (
    Approval,
    AuditHead,
    AuditRecord,
    Credential,
    EffectivePolicy,
    Export,
    FileChange,
    FileEntry,
    GuestUsage,
    HostUsage,
    Key,
    LeadsTo,
    Limits,
    MasterKey,
    NewKey,
    Operation,
    OperationError,
    Policy,
    Pool,
    Project,
    Result,
    SandboxInfo,
    SandboxMetrics,
    SandboxToken,
    ServiceEvent,
    SessionInfo,
    Snapshot,
    Template,
    Token,
    Transfer,
)
from .sync import Hatchway, Sandbox, Session

if TYPE_CHECKING:
    from .afiles import AsyncFiles
    from .aio import AsyncHatchway, AsyncSandbox, AsyncSession
    from .aterminal import AsyncTerminal
    from .filecalls import FileHead
    from .files import Files
    from .forwarding import AsyncForward, Forward
    from .terminal import Terminal

__all__ = [
    "Approval",
    "AsyncFiles",
    "AsyncForward",
    "AsyncHatchway",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncTerminal",
    "AuditHead",
    "AuditRecord",
    "BadAnswer",
    "BadGateway",
    "CommandFailed",
    "Conflict",
    "ConnectionFailed",
    "Credential",
    "EffectivePolicy",
    "End",
    "Exhausted",
    "Exit",
    "Export",
    "FileChange",
    "FileEntry",
    "FileHead",
    "Files",
    "Forbidden",
    "Forward",
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
    "LeadsTo",
    "Limits",
    "MasterKey",
    "Misdirected",
    "NewKey",
    "NotFound",
    "Operation",
    "OperationError",
    "OperationFailed",
    "Output",
    "OutputLimit",
    "Policy",
    "Pool",
    "Project",
    "RangeUnsatisfiable",
    "Result",
    "Sandbox",
    "SandboxInfo",
    "SandboxMetrics",
    "SandboxToken",
    "ServiceEvent",
    "Session",
    "SessionEvent",
    "SessionInfo",
    "Snapshot",
    "Started",
    "StreamLost",
    "StreamName",
    "Template",
    "Terminal",
    "Token",
    "TooLarge",
    "TooSlow",
    "Transfer",
    "TransferFailed",
    "Unauthenticated",
    "Unavailable",
    "Unprocessable",
    "UnsafeArchive",
    "UnsupportedMedia",
    "Usage",
    "WaitTimeout",
]

_LATER = {
    "AsyncFiles": "afiles",
    "AsyncForward": "forwarding",
    "AsyncHatchway": "aio",
    "AsyncSandbox": "aio",
    "AsyncSession": "aio",
    "AsyncTerminal": "aterminal",
    "FileHead": "filecalls",
    "Files": "files",
    "Forward": "forwarding",
    "Terminal": "terminal",
}
"""Who does not use asyncio, files or terminals does not load them."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
