"""Errors as problem documents (RFC 9457)."""

import http

import msgspec
from starlette.responses import Response

from hatchway.domain.errors import HatchwayError

MEDIA_TYPE = "application/problem+json"


def problem(error: HatchwayError) -> Response:
    """Returns the answer for an error: its status, code, cause, remedy and further members."""
    body: dict[str, object] = {
        "type": "about:blank",
        "title": http.HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.cause,
        **error.as_dict(),
    }
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    return Response(msgspec.json.encode(body), error.status, headers, MEDIA_TYPE)
