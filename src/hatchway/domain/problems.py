"""What an error looks like over HTTP: a problem document (RFC 9457). The same on the control plane and on every node."""

import math

from hatchway.domain.errors import HatchwayError

MEDIA_TYPE = "application/problem+json"
TYPE = "https://hatchway.example/problems/"

TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    416: "Range not satisfiable",
    421: "Misdirected",
    422: "Invalid content",
    429: "Too many",
    431: "Head too large",
    500: "Internal error",
    502: "Bad answer from the sandbox",
    503: "Unavailable",
    507: "Host exhausted",
}


def document(error: HatchwayError) -> dict[str, object]:
    """The members of an error's problem document; those that its code brings along come first and hide none of the others."""
    return {
        **error.extra,
        "type": TYPE + error.code,
        "title": TITLES.get(error.status, "Error"),
        "status": error.status,
        "detail": error.cause,
        "code": error.code,
        "cause": error.cause,
        "remedy": error.remedy,
    }


def headers(error: HatchwayError) -> dict[str, str]:
    """The headers that belong to an error's status."""
    match error.status:
        case 401:
            return {"www-authenticate": "Bearer"}
        case 405:
            allowed = error.extra.get("allow", ())
            return {"allow": ", ".join(map(str, allowed))} if isinstance(allowed, list | tuple) else {}
        case 413 | 431:  # the rest is not read
            return {"connection": "close"}
        case 416:
            return {"content-range": f"bytes */{error.extra.get('size', '*')}"}
        case 429 | 503:
            wait = error.extra.get("retry_after_s", 1)
            return {"retry-after": str(max(1, math.ceil(wait)) if isinstance(wait, int | float) else 1)}
    return {}
