"""Answers for errors."""

import msgspec
from starlette.responses import Response

from hatchway.domain import problems
from hatchway.domain.errors import HatchwayError


def problem(error: HatchwayError) -> Response:
    """The answer for an error: its problem document, its status and the headers that belong to it."""
    body = msgspec.json.encode(problems.document(error))
    return Response(body, error.status, problems.headers(error), problems.MEDIA_TYPE)
