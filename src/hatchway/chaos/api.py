"""The API as the walk uses it: a request whose answer was lost is sent again, with its key, so that it is done once."""

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from hatchway.chaos.model import Divergence

WITHIN_S = 120.0
"""How long the service may be away, and how long an operation may take."""
AGAIN_S = 0.05
_NOT_NOW = frozenset(
    {
        "closing",
        "node_unreachable",
        "peer_lost",
        "node_timeout",
        "database_busy",
        "database_closed",
        "database_unusable",
    }
)
"""Codes with which the service says that it is just being started again."""


@dataclass(frozen=True)
class Answer:
    """What was answered in the end."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.body.get("code", ""))


class Api:
    """One key's view of a service."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=WITHIN_S)
        self.repeated = 0
        """How many requests had to be sent again."""

    async def close(self) -> None:
        """Drops the connections."""
        await self._http.aclose()

    async def get(self, path: str, **parameters: Any) -> Answer:
        """Looks."""
        return await self._ask("GET", path, {}, None, parameters)

    async def post(self, path: str, body: dict[str, Any] | None = None, *, key: str | None = None) -> Answer:
        """Asks for an operation, and waits for its end."""
        return await self._ask("POST", path, {"idempotency-key": key or uuid.uuid4().hex, "prefer": "wait=60"}, body)

    async def delete(self, path: str) -> Answer:
        """Deletes."""
        return await self._ask("DELETE", path, {"prefer": "wait=60"}, None)

    async def ended(self, answer: Answer) -> dict[str, Any]:
        """The operation of an answer, at its end. Raises `Divergence` where it does not end."""
        operation: dict[str, Any] = answer.body["operation"]
        until = time.monotonic() + WITHIN_S
        while operation["status"] in ("pending", "running"):
            if time.monotonic() > until:
                raise Divergence(f"The operation does not end: {operation}")
            headers = {"prefer": "wait=30"}
            operation = (await self._ask("GET", f"/v1/operations/{operation['id']}", headers, None)).body["operation"]
        return operation

    async def all(self, what: str) -> dict[str, dict[str, Any]]:
        """Everything that is listed at `/v1/WHAT`, by id."""
        found: dict[str, dict[str, Any]] = {}
        cursor: str | None = None
        while True:
            more = {} if cursor is None else {"cursor": cursor}
            page = (await self.get(f"/v1/{what}", limit=200, **more)).body
            found.update({one["id"]: one for one in page[what]})
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    async def _ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: dict[str, Any] | None,
        parameters: dict[str, Any] | None = None,
    ) -> Answer:
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                found = await self._http.request(method, path, json=body, headers=headers, params=parameters)
                answer = Answer(found.status_code, found.json())
            except (httpx.TransportError, ValueError) as error:
                why = repr(error)
            else:
                if answer.status < 500 or answer.code not in _NOT_NOW:
                    return answer
                why = answer.code
            if time.monotonic() > until:
                raise Divergence(f"{method} {path} was not answered: {why}")
            self.repeated += 1
            await asyncio.sleep(AGAIN_S)
