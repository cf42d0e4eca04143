"""Errors as RFC 9457 problem documents, and the texts of those that arise in the HTTP layer itself."""

from typing import Any

import msgspec

from hatchway.domain.errors import HatchwayError, InvalidRequest, TooLarge

MEDIA_TYPE = "application/problem+json"

TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    422: "Invalid content",
    429: "Too many",
    500: "Internal error",
    503: "Unavailable",
    507: "Host exhausted",
}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What every error answers. Further members depend on `code`, for example `operation`, `state`, `verbs`, `field`, `allowed`."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    cause: str
    remedy: str


class MethodNotAllowed(HatchwayError):
    """The path exists, the method does not."""

    status = 405


def render(error: HatchwayError) -> bytes:
    """Returns the problem document of an error."""
    body: dict[str, Any] = {
        **error.extra,
        "type": f"https://hatchway.example/problems/{error.code}",
        "title": TITLES.get(error.status, "Error"),
        "status": error.status,
        "code": error.code,
        "detail": error.cause,
        "cause": error.cause,
        "remedy": error.remedy,
    }
    return msgspec.json.encode(body)


def invalid_json(detail: str) -> HatchwayError:
    """The body cannot be read as JSON at all."""
    return InvalidRequest("invalid_json", f"The body is not valid JSON: {detail}", "Send one JSON object in UTF-8.")


def too_large(limit: int) -> HatchwayError:
    """The body has more octets than the bound."""
    return TooLarge(
        "body_too_large", f"The body is larger than {limit} octets.", f"Send at most {limit} octets.", limit=limit
    )
