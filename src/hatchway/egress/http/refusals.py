"""What a client in the sandbox is answered when its request does not go on: in a form that it shows to its user.

The reason stands in the status line (pip, requests, httpx, npm show it), in `error` of the JSON body (npm), in the body as JSON (curl, programs),
and as one line of text for git and for clients that want text. Nothing of it comes from the outside.
"""

import json
import re
from dataclasses import dataclass

import msgspec

from hatchway.domain import problems
from hatchway.domain.errors import BadGateway, Exhausted, Forbidden, HatchwayError, InvalidRequest, TooSlow, Unavailable
from hatchway.egress.http.heads import Fields, RequestHead
from hatchway.egress.http.seam import FlowError

REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
_TITLES = {
    403: "Not allowed by the policy of this sandbox",
    421: "Another host than the connection is for",
    502: "The host cannot be used",
    503: "Not possible now",
}
_MAX_REASON = 200
_UNPRINTABLE = re.compile(r"[^ -~]+")


@dataclass(frozen=True, slots=True)
class Refused:
    """An answer of ours."""

    status: int
    reason: str
    """For the status line: what RFC 9110 calls the status, and why."""
    fields: Fields
    body: bytes


def answer(error: HatchwayError, *, accept: str = "", agent: str = "", text: bool = False) -> Refused:
    """The answer that says this error to a client, which takes `accept` and calls itself `agent`. `text`: it shows only text (git)."""
    cause = _printable(error.cause)
    status = getattr(error, "answered", error.status)
    line = f"{cause} {_printable(error.remedy)}".strip()
    reason = f"{REASONS.get(status, 'Error')} - Hatchway: {error.code}: {cause}"
    if len(reason) > _MAX_REASON:
        reason = reason[: _MAX_REASON - 3] + "..."
    if text or agent.startswith("git/") or _wants_text(accept):
        kind, body = "text/plain; charset=utf-8", f"Hatchway: {error.code}: {line}\n".encode()
    else:
        document = problems.document(error)
        document |= {
            "status": status,
            "title": _TITLES.get(status, str(document["title"])),
            "error": f"{error.code}: {line}",
        }
        kind, body = problems.MEDIA_TYPE, json.dumps(document, ensure_ascii=True, default=str).encode() + b"\n"
    fields = [
        ("content-type", kind),
        ("content-length", str(len(body))),
        ("cache-control", "no-store"),
        ("x-hatchway-reason", error.code),
    ]
    fields += [
        (name, value)
        for name, value in problems.headers(error).items()
        if name not in ("connection", "www-authenticate")
    ]
    return Refused(status, reason, fields, body)


def answer_to(head: RequestHead, error: HatchwayError, *, text: bool = False) -> Refused:
    """The answer that tells the client of this request about an error. `text`: as the policy wants it."""
    accept = agent = ""
    for name, value in head.fields:
        if name == "accept":
            accept = value
        elif name == "user-agent":
            agent = value
    return answer(error, accept=accept, agent=agent, text=text)


_KINDS: dict[int, type[HatchwayError]] = {
    400: InvalidRequest,
    403: Forbidden,
    408: TooSlow,
    429: Exhausted,
    502: BadGateway,
    503: Unavailable,
}


def error_of(error: FlowError) -> HatchwayError:
    """What the gateway says about the other side of a flow, as an error for the client."""
    if error.reason == "policy_changed":
        return Forbidden("policy_changed", error.explanation, "Send it again: it is judged under the policy of then.")
    kind = _KINDS.get(error.status, BadGateway)
    usual = "Look at the policy of this sandbox, and whether the host answers."
    return kind(error.reason, error.explanation, error.remedy or usual)


class _Problem(msgspec.Struct):
    cause: str = ""
    remedy: str = ""


def of_broker(code: str, status: int, said: bytes) -> HatchwayError:
    """What the broker refused in its problem document `said`, as an error for the client."""
    try:
        problem = msgspec.json.decode(said, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = _Problem()
    kind = _KINDS.get(status, BadGateway)
    cause = problem.cause or "The broker of credentials refused the request."
    return kind(code, cause, problem.remedy or "Look at the policy of this sandbox.")


def _wants_text(accept: str) -> bool:
    """Whether a client names text and neither JSON nor everything."""
    lower = accept.lower()
    return "text/plain" in lower and "json" not in lower


def _printable(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)[:1_000]
