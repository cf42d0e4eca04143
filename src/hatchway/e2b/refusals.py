"""What the data plane answers instead of a sandbox: JSON in E2B's words, by which its SDKs know what happened, or a page for a person.

SDKs look for `was not found` and `port is not open` in the messages.
"""

import html
from collections.abc import Mapping

from starlette.responses import HTMLResponse, Response

from hatchway.e2b import errors
from hatchway.e2b.errors import E2bError

NAVIGATES = "navigate"
_TITLES = {
    400: "This address is none of a sandbox",
    403: "This sandbox is not open to everybody",
    409: "This sandbox is being changed",
    429: "This sandbox has too many connections",
}


def not_found(sandbox_id: str) -> E2bError:
    """There is no such sandbox, or it does not run and nothing wakes it."""
    return E2bError(502, "The sandbox was not found", retry=False, more={"sandboxId": sandbox_id})


def port_closed(sandbox_id: str, port: int) -> E2bError:
    """Nothing listens there."""
    return E2bError(
        502, "The sandbox is running but port is not open", retry=False, more={"sandboxId": sandbox_id, "port": port}
    )


def broken(sandbox_id: str, port: int, why: str) -> E2bError:
    """The port gave no answer that can be passed on."""
    return E2bError(502, f"The port gave no answer: {why}", retry=False, more={"sandboxId": sandbox_id, "port": port})


def private(sandbox_id: str) -> E2bError:
    """The right to its ports is missing."""
    return E2bError(
        403,
        "The sandbox is not public: send its traffic access token in the header e2b-traffic-access-token",
        retry=False,
        more={"sandboxId": sandbox_id},
    )


def may_not_resume(sandbox_id: str) -> E2bError:
    """It would be resumed by this, for whoever has the right."""
    return E2bError(
        403,
        "The sandbox is paused, and the request has not the right to resume it: send its access token in the header X-Access-Token",
        retry=False,
        more={"sandboxId": sandbox_id},
    )


def in_transition(sandbox_id: str) -> E2bError:
    """What it is in the middle of takes too long to be waited for."""
    return E2bError(409, "The sandbox is still transitioning, try again later", retry=True, more={"sandboxId": sandbox_id})  # fmt: skip


def too_many(sandbox_id: str) -> E2bError:
    """It has as many connections as it may have."""
    return E2bError(429, "Too many connections to the sandbox", retry=True, more={"sandboxId": sandbox_id})


def answer(error: E2bError, headers: Mapping[str, str], method: str = "GET") -> Response:
    """The answer for an error to a request with these headers, whose names are in lower case."""
    if not is_navigation(headers, method):
        return errors.answer(error)
    title = _TITLES.get(error.status, "This sandbox cannot be reached")
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<body style='font-family:sans-serif;max-width:40em;margin:4em auto'><h1>{title}</h1><p>{html.escape(error.message)}</p>"
    )
    for name, value in error.more.items():
        page += f"<p><small>{html.escape(name)}: <code>{html.escape(str(value))}</code></small></p>"
    policy = {"cache-control": "no-store", "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(page, error.status, policy)


def is_navigation(headers: Mapping[str, str], method: str) -> bool:
    """Whether somebody goes to an address with a browser, so that a person will read the answer."""
    if method not in ("GET", "HEAD") or "text/html" not in headers.get("accept", ""):
        return False
    mode = headers.get("sec-fetch-mode")
    return mode == NAVIGATES if mode is not None else headers.get("user-agent", "").startswith("Mozilla/")
