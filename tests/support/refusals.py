"""How every refusal of the API looks."""

from typing import Any

import httpx


def check(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document, after a look at its form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body["code"] == code, body
    assert body["title"]
    assert body["detail"] == body["cause"] != ""
    assert body["remedy"]
    assert body["type"].endswith(code)
    return body
