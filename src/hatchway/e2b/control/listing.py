"""GET /sandboxes and /v2/sandboxes."""

import asyncio
import re
from datetime import UTC, datetime
from urllib.parse import unquote, urlencode

import msgspec
from starlette.responses import Response

from hatchway.domain.ids import is_id
from hatchway.e2b import settings as kept
from hatchway.e2b.control import views
from hatchway.e2b.control.calls import Call, answer
from hatchway.e2b.control.templates import canonical
from hatchway.e2b.errors import E2bError
from hatchway.wire.behalf import ANNOTATION

STATES = {"running": ("running",), "paused": views.PAUSED}
RUNNING = {"state": "running"}
"""What API v1 is asked for where those that run are meant."""
MAX_LIMIT = 100
MOST_AT_ONCE = 500
"""Sandboxes that API v1 is asked for at once where all are wanted."""

_LIMIT = re.compile(r"[0-9]{1,9}")


class Page(msgspec.Struct):
    """What API v1 answers, as far as it is needed; the sandboxes are decoded where they are shown."""

    sandboxes: tuple[msgspec.Raw, ...]
    next_cursor: str | None = None
    total: int = 0


async def list_(call: Call) -> Response:
    """One page, newest first unless it is said; `x-next-token` where there is another."""
    filters = {"annotated": ANNOTATION, **_metadata(call.query("metadata"))}
    states = _states(call.query("state"))
    order = call.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise E2bError(400, f"Invalid order {order[:40]!r}: asc or desc.")
    if (after := call.query("startedAfter")) is not None:
        filters["created_after"] = repr(_instant(after))
    if (template := call.query("template")) is not None:
        filters[f"annotation.{ANNOTATION}.template"] = _template(template)
    paged = {**filters, "state": ",".join(states), "order": order, "limit": str(_limit(call.query("limit")))}
    if (token := call.query("nextToken")) is not None:
        paged["cursor"] = token
    page, running = await asyncio.gather(
        _page(call, {**paged, "annotations": "true"}),
        _page(call, {**filters, **RUNNING, "limit": "1", "total": "true"}),
    )
    headers = {"x-total-running": str(running.total)}
    if page.next_cursor is not None:
        headers["x-next-token"] = page.next_cursor
    return answer(_shown(page), headers=headers)


async def list_v1(call: Call) -> Response:
    """All that run, at once."""
    asked = {"annotated": ANNOTATION, **_metadata(call.query("metadata")), **RUNNING}
    asked |= {"annotations": "true", "limit": str(MOST_AT_ONCE)}
    found = []
    while True:
        page = await _page(call, asked)
        found += _shown(page)
        if page.next_cursor is None:
            return answer(found)
        asked["cursor"] = page.next_cursor


async def count(call: Call, **filters: str) -> int:
    """How many sandboxes of the project there are."""
    return (await _page(call, {"annotated": ANNOTATION, "limit": "1", "total": "true", **filters})).total


async def _page(call: Call, filters: dict[str, str]) -> Page:
    from hatchway.client.calls import decode, exchange
    from hatchway.client.steps import Request

    reply = await call.run(exchange(Request("GET", f"/v1/sandboxes?{urlencode(filters)}")))
    return decode(reply.body, Page)


def _shown(page: Page) -> list[dict[str, object]]:
    from hatchway.client.models import SandboxInfo

    found: list[dict[str, object]] = []
    for raw in page.sandboxes:
        info: SandboxInfo = msgspec.json.decode(raw, type=SandboxInfo)
        settings = kept.of(info.annotations)
        if settings is not None and info.desired != "deleted":  # else it is being killed
            found.append(views.listed(info, settings))
    return found


def _states(given: str | None) -> tuple[str, ...]:
    wanted = tuple(filter(None, (given or "").split(","))) or tuple(STATES)
    for state in wanted:
        if state not in STATES:
            raise E2bError(400, f"Invalid state {state[:40]!r}: running, paused.")
    return tuple(ours for state in wanted for ours in STATES[state])


def _limit(given: str | None) -> int:
    if given is None:
        return MAX_LIMIT
    if not _LIMIT.fullmatch(given) or not 1 <= int(given) <= MAX_LIMIT:
        raise E2bError(400, f"Invalid limit {given[:40]!r}: 1 to {MAX_LIMIT}.")
    return int(given)


def _instant(given: str) -> float:
    try:
        # A plus sign that was not encoded arrives as a space.
        found = datetime.fromisoformat(given.replace(" ", "+") if given.count(" ") == 1 and "T" in given else given)
    except ValueError:
        raise E2bError(400, f"Invalid startedAfter {given[:40]!r}: a time like 2026-01-31T12:00:00Z.") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _template(given: str) -> str:
    """The template as it is kept with its sandboxes. A tag is not looked for, but that of snapshots is a part of their ids."""
    name, _, tag = given.partition(":")
    if is_id(name) and tag in ("", views.TAG):
        return views.snapshot_id(name)
    if tag:
        raise E2bError(400, "Invalid template: an id or a name, without a tag.")
    return canonical(name)


def _metadata(given: str | None) -> dict[str, str]:
    """Filters of API v1 for E2B's, whose keys and values are encoded, put together and encoded twice more."""
    if not given:
        return {}
    found: dict[str, str] = {}
    for pair in unquote(given).split("&"):
        name, equals, value = pair.partition("=")
        if not equals:
            raise E2bError(400, "Invalid metadata: pairs of key=value.")
        found[f"metadata.{unquote(name)}"] = unquote(value)
    return found
