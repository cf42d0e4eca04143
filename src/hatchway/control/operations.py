"""/v1/operations: how far requests are, and how they ended."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import NotFound
from hatchway.domain.lifecycle import Verb
from hatchway.storage import operations
from hatchway.storage.rows import OperationRow

STATUSES = ("pending", "running", "succeeded", "failed", "cancelled")


class ListOperations(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters. `target` is a sandbox's id."""

    target: str | None = None
    status: Annotated[str, Meta(description="One status, or several with commas between them.")] | None = None
    kind: Verb | None = None
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's operations."""
    query: ListOperations = call.query
    statuses = tuple(filter(None, (query.status or "").split(",")))
    for status in statuses:
        if status not in STATUSES:
            raise invalid_field("status", f"there is no status {status[:64]!r}.", list(STATUSES))
    # An operation that has begun may still be stored as pending: how far it is, is written now and then.
    stored = tuple({*statuses, *(("pending", "running") if {"pending", "running"} & set(statuses) else ())})
    rows = await call.plane.database.read(
        operations.list_page,
        call.project,
        target=query.target,
        statuses=stored,
        kind=query.kind,
        before=requests.decode_cursor(query.cursor),
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit)
    shown = tuple(show(call, row) for row in rows)
    if statuses:
        shown = tuple(one for one in shown if one.status in statuses)
    return answer(views.OperationPage(operations=shown, next_cursor=cursor))


async def get(call: Call[NoBody]) -> Response:
    """Shows one operation; waits for its end where the client prefers that."""
    row = await call.plane.database.read(operations.get, call.project, _id(call))
    headers: dict[str, str] = {}
    wait = requests.prefer_wait(call.request)
    if wait is not None:
        headers["preference-applied"] = f"wait={wait}"
        if wait > 0 and row.finished_at is None:
            await call.plane.engine.wait(row.id, wait)
            row = await call.plane.database.read(operations.get, call.project, row.id)
    return answer(views.OperationAnswer(operation=show(call, row)), headers=headers)


async def cancel(call: Call[NoBody]) -> Response:
    """Ends an operation that has not begun."""
    finished = await call.plane.engine.cancel(call.project, _id(call))
    return answer(views.OperationAnswer(operation=views.operation(finished.operation)))


def show(call: Call[Any], row: OperationRow) -> views.Operation:
    """An operation, with what the engine knows of it."""
    return views.operation(row, call.plane.engine.live.get(row.id))


def _id(call: Call[Any]) -> str:
    return requests.check_id(call.path["id"], "operation", NotFound)


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/operations",
        list_,
        "List operations",
        {200: views.OperationPage},
        "operations",
        query=ListOperations,
    ),
    Endpoint(
        "GET",
        "/v1/operations/{id}",
        get,
        "Show an operation",
        {200: views.OperationAnswer},
        "operations",
        errors=(404,),
        waits=True,
    ),
    Endpoint(
        "POST",
        "/v1/operations/{id}/cancel",
        cancel,
        "Cancel an operation that has not begun",
        {200: views.OperationAnswer},
        "operations",
        scope="write",
        body=NoBody,
        errors=(404, 409),
    ),
)
