"""What the audit journal keeps of a request: no header's value but the client's name, no query but its length."""

from typing import Any

from hatchway.domain.policy.verdicts import Request
from hatchway.egress.http.heads import RequestHead

MAX_TEXT = 1_024
"""Characters of a path at most."""


def recorded(request: Request) -> dict[str, Any]:
    """Of one that was read."""
    agent = next((value for name, value in request.headers if name == "user-agent"), "")
    data: dict[str, Any] = {
        "host": request.host,
        "port": request.port,
        "tls": request.tls,
        "version": request.version,
        "method": request.method,
        "path": request.path[:MAX_TEXT],
        "query_octets": len(request.query),
        "agent": agent[:200],
    }
    if request.websocket:
        data["websocket"] = True
    return data


def unread(head: RequestHead) -> dict[str, Any]:
    """Of one that never got so far."""
    return {
        "version": head.version,
        "method": head.method,
        "target": head.target[:MAX_TEXT],
        "host": (head.host or "")[:255],
    }
