"""/v1/approvals: what waits for somebody's consent, and the answers to it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.approval_view import Approval, show
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.checking import invalid_field
from hatchway.storage import approvals

MAX_TTL_S = 24 * 3600.0
STATES = (approvals.PENDING, approvals.ALLOWED, approvals.DENIED, approvals.ENDED)


class ListApprovals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters."""

    state: Annotated[str, Meta(description="One state, or several with commas between them.")] | None = None
    sandbox: str | None = None
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


class AnswerApproval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision. `once`: this request alone; `session`: all with the same key until the sandbox stops or its policy changes; `ttl`: for `ttl_s` seconds."""

    decision: Literal["allow", "deny"]
    scope: Literal["once", "session", "ttl"] = "once"
    ttl_s: Annotated[float, Meta(ge=1, le=MAX_TTL_S)] | None = None
    note: Annotated[str, Meta(max_length=500)] = ""


class ApprovalAnswer(views.View, frozen=True, kw_only=True):
    """One approval."""

    approval: Approval


class ApprovalPage(views.View, frozen=True, kw_only=True):
    """Approvals, newest first."""

    approvals: tuple[Approval, ...]
    next_cursor: str | None


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's approvals."""
    query: ListApprovals = call.query
    states = tuple(filter(None, (query.state or "").split(",")))
    for state in states:
        if state not in STATES:
            raise invalid_field("state", f"there is no state {state[:64]!r}.", list(STATES))
    rows = await call.plane.database.read(
        approvals.list_page,
        call.project,
        states=states,
        sandbox_id=query.sandbox,
        before=requests.decode_cursor(query.cursor),
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit)
    return answer(ApprovalPage(approvals=tuple(show(row) for row in rows), next_cursor=cursor))


async def get(call: Call[NoBody]) -> Response:
    """Shows one approval."""
    row = await call.plane.database.read(approvals.get, call.project, call.path["id"][:64])
    return answer(ApprovalAnswer(approval=show(row)))


async def decide(call: Call[AnswerApproval]) -> Response:
    """Answers; returns when who asked has the answer, or could not be reached: it is sent again then."""
    body = call.body
    if (body.scope == "ttl") != (body.ttl_s is not None):
        raise invalid_field("ttl_s", "it belongs to the scope `ttl`, and to no other.", "`ttl_s` with `scope: ttl`")
    plane, approval_id = call.plane, call.path["id"][:64]
    row = await plane.database.read(approvals.get, call.project, approval_id)
    if row.kind == approvals.OPERATION and body.scope != "once":
        raise invalid_field("scope", "an operation is allowed or denied by itself.", ["once"])
    given = approvals.Answer(
        allow=body.decision == "allow", scope=body.scope, ttl_s=body.ttl_s, note=body.note, approver=call.key.id
    )
    row = await plane.database.write(approvals.answer, call.project, approval_id, given)
    if await plane.approving.deliver(row):
        row = msgspec.structs.replace(row, delivered=True)
    return answer(ApprovalAnswer(approval=show(row)))


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/approvals",
        list_,
        "List what waits for consent, or did",
        {200: ApprovalPage},
        "approvals",
        query=ListApprovals,
    ),
    Endpoint(
        "GET",
        "/v1/approvals/{id}",
        get,
        "Show an approval",
        {200: ApprovalAnswer},
        "approvals",
        errors=(404,),
    ),
    Endpoint(
        "POST",
        "/v1/approvals/{id}/answer",
        decide,
        "Allow or deny what is asked",
        {200: ApprovalAnswer},
        "approvals",
        scope="admin",
        body=AnswerApproval,
        errors=(404, 409),
    ),
)
