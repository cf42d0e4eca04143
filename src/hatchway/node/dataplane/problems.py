"""Errors as problem documents (RFC 9457)."""

import http

import msgspec
from starlette.responses import Response

from hatchway.domain.errors import HatchwayError

MEDIA_TYPE = "application/problem+json"


def problem(error: HatchwayError, *, status: int | None = None) -> Response:
    """Returns the answer for an error: its status (or another one), code, cause, remedy and further members."""
    status = status or error.status
    body: dict[str, object] = {
        "type": "about:blank",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "detail": error.cause,
        **error.as_dict(),
    }
    headers = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        headers["retry-after"] = "1"
    return Response(msgspec.json.encode(body), status, headers, MEDIA_TYPE)
