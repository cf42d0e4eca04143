"""How E2B says that something went wrong: `{"code", "message"}`, and nothing but that, whatever the status.

SDKs read this body before they look at the status: any other one is an exception of the wrong kind at the user's.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours

RETRY_S = "1"
_HEADERS = {"cache-control": "no-store"}


class E2bError(Exception):
    """An error as E2B shows it. `error_code` is its word for programs, where it has one; `retry` whether a client may repeat the request by itself.

    `more` are further members of the body: answers of the data plane name the sandbox and the port.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_code: str | None = None,
        retry: bool | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.more = dict(more or {})
        self.status = status
        self.message = message
        self.error_code = error_code
        self.retry = retry


def answer(error: E2bError, more: Mapping[str, str] | None = None) -> Response:
    """The answer for an error."""
    headers = {**_HEADERS, **(more or {})}
    if error.retry is not None:
        headers["should-retry"] = "true" if error.retry else "false"
        if error.retry:
            headers["retry-after"] = RETRY_S
    return Response(msgspec.json.encode(shown(error)), error.status, headers, "application/json")


def shown(error: E2bError) -> dict[str, Any]:
    """An error as it is shown: alone, or as a member of an answer."""
    body: dict[str, Any] = {**error.more, "code": error.status, "message": error.message}
    if error.error_code is not None:
        body["error_code"] = error.error_code
    return body


def of_client(error: ours.HatchwayError) -> E2bError:
    """What API v1 refused, or that it was not there, in E2B's words. A client may repeat by itself what was surely not done."""
    text = f"{error.cause} {error.remedy}".strip()
    match error:
        case ours.Unauthenticated():
            return E2bError(401, f"{text} An API key of E2B's form is made with `hatchway keys create NAME --e2b`.")
        case ours.Gone():
            return E2bError(404, text)
        case ours.Unprocessable() | ours.TooLarge() | ours.UnsupportedMedia():
            return E2bError(400, text)
        case ours.Exhausted():
            return E2bError(429, text, retry=True)
        case ours.ConnectionFailed() | ours.Unavailable():
            return E2bError(503, text, retry=True)
        case ours.OperationFailed():
            return E2bError(500, text, error_code=error.code, retry=False)
        case ours.WaitTimeout():
            return E2bError(504, text, retry=False)
        case ours.HostExhausted():
            return E2bError(503, text, retry=False)
        case ours.BadAnswer():
            return E2bError(502, text, retry=False)
    if error.code == "too_many_connections":
        return E2bError(503, text, retry=True)
    status = error.status if 400 <= error.status < 600 else 500
    return E2bError(status, text)
