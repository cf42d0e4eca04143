"""/v1/sandboxes: look, change, and the lifecycle verbs; `creation` is what makes one."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import policies, requests, timing, views
from hatchway.control.accepted import proceed, repeat, sandbox_id, show
from hatchway.control.creation import CreateSandbox, create
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.fields import (
    ANNOTATION_KEY,
    Annotations,
    Name,
    check_annotations,
    check_env,
    check_metadata,
    metadata_filters,
)
from hatchway.domain.checking import invalid_field
from hatchway.domain.lifecycle import State, Verb
from hatchway.storage import accepting, automatic, branches, sandboxes
from hatchway.storage import policies as stored_policies
from hatchway.storage.database import Connection
from hatchway.storage.rows import SandboxRow

_MEMBER = re.compile(r"[A-Za-z0-9_-]{1,63}")


class WakeSandbox(NoBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long it has from when it runs again; where it runs already, how long it goes on at least."""

    timeout_s: timing.Seconds | UnsetType = UNSET


class ForkSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many branches, and what of them is not as the source."""

    count: Annotated[int, Meta(ge=1, le=branches.MAX_BRANCHES)] = 1
    name: Name | None = None
    metadata: dict[str, str] | None = None
    env: dict[str, str] | None = None
    annotations: Annotations | None = None
    timeout_s: timing.Seconds | UnsetType | None = UNSET


class ChangeSandbox(policies.WithPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a sandbox can be changed; `metadata` replaces the whole of it, `name: null` takes the name away. Of `annotations` each
    entry replaces the one of its name, and null takes it away.

    `timeout_s` counts from now on. A deadline that would come earlier by it is an error without `shorten`.
    """

    name: Name | UnsetType | None = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    annotations: Annotations | UnsetType = UNSET
    shorten: bool = False


class ShowSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is shown besides."""

    annotations: Annotated[bool, Meta(description="Show `annotations` too.")] = False


class ListSandboxes(ShowSandbox, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters; also `metadata.KEY=VALUE`, any number of them, and `annotation.ENTRY.MEMBER=TEXT`. Deleted sandboxes are listed only where `state` asks for them."""

    state: Annotated[str, Meta(description="One state, or several with commas between them.")] | None = None
    name: str | None = None
    template: Annotated[str, Meta(description="Reference, its name without the tag, or digest.")] | None = None
    annotated: Annotated[str, Meta(description="Those that have this entry of annotations.")] | None = None
    created_after: Annotated[float, Meta(ge=0, description="Made at this time or later, in Unix seconds.")] | None = (
        None
    )
    order: Annotated[Literal["asc", "desc"], Meta(description="By the time that they were made.")] = "desc"
    total: Annotated[bool, Meta(description="Say how many there are on all pages.")] = False
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def fork(call: Call[ForkSandbox]) -> Response:
    """Accepts a fork; `operation.result.branches` names the new sandboxes."""
    body = call.body
    if body.env is not None:
        check_env(body.env, "env")
    if body.metadata is not None:
        check_metadata(body.metadata)
    if body.annotations is not None:
        check_annotations(body.annotations)
    await call.plane.database.require_room()
    timeout_s = body.timeout_s
    if timeout_s is not UNSET:
        bounds = await call.plane.database.read(automatic.bounds, call.project)
        timeout_s = timing.bounded(timeout_s, bounds, given=True)
    wanted = branches.NewBranches(
        count=body.count,
        name=body.name,
        metadata=body.metadata,
        env=body.env,
        annotations=body.annotations,
        timeout_s=timeout_s,
    )
    accepted = await call.plane.database.write(
        branches.accept, call.project, sandbox_id(call), wanted, call.idempotency
    )
    return await proceed(call, accepted)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's sandboxes."""
    query: ListSandboxes = call.query
    wanted, ascending = _filter(call, query), query.order == "asc"
    database = call.plane.database
    rows = await database.read(
        sandboxes.list_page,
        call.project,
        wanted,
        behind=requests.decode_cursor(query.cursor, ascending=ascending),
        ascending=ascending,
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit, ascending=ascending)
    shown = tuple(show(call, row, query.annotations) for row in rows)
    total = await database.read(sandboxes.count, call.project, wanted) if query.total else UNSET
    return answer(views.SandboxPage(sandboxes=shown, next_cursor=cursor, total=total))


def _filter(call: Call[NoBody], query: ListSandboxes) -> sandboxes.Filter:
    """What the query asks for. Raises `invalid_field`."""
    states = tuple(filter(None, (query.state or "").split(",")))
    for state in states:
        if state not in set(State):
            raise invalid_field("state", f"there is no state {state[:64]!r}.", [str(one) for one in State])
    annotations: dict[str, tuple[str, str] | None] = {}
    for name, value in call.request.query_params.multi_items():
        if name.startswith("annotation."):
            entry, _, member = name.removeprefix("annotation.").rpartition(".")
            if not ANNOTATION_KEY.fullmatch(entry) or not _MEMBER.fullmatch(member) or len(annotations) >= 4:
                raise invalid_field(name[:80], "this is no entry with a member.", "`annotation.ENTRY.MEMBER`")
            annotations[entry] = (member, value)
    if query.annotated is not None:
        if not ANNOTATION_KEY.fullmatch(query.annotated):
            raise invalid_field("annotated", "this is no entry.", {"pattern": ANNOTATION_KEY.pattern})
        annotations.setdefault(query.annotated, None)
    return sandboxes.Filter(
        states=states,
        name=query.name,
        template=query.template,
        metadata=metadata_filters(call.request),
        annotations=annotations,
        created_after=query.created_after,
    )


async def get(call: Call[NoBody]) -> Response:
    """Shows one sandbox; a deleted one for as long as it is kept."""
    query: ShowSandbox = call.query
    row = await call.plane.database.read(sandboxes.get, call.project, sandbox_id(call))
    return answer(views.SandboxAnswer(sandbox=show(call, row, query.annotations)))


async def change(call: Call[ChangeSandbox]) -> Response:
    """Changes name, metadata, lifetime, schedule and policy."""
    changes: dict[str, Any] = {}
    if call.body.name is not UNSET:
        changes["name"] = call.body.name
    if call.body.metadata is not UNSET:
        check_metadata(call.body.metadata)
        changes["metadata"] = call.body.metadata
    if call.body.annotations is not UNSET:
        check_annotations(call.body.annotations)
    bounds = await call.plane.database.read(automatic.bounds, call.project)
    timed, given = timing.change(call.body, call.body.shorten, bounds), policies.assignment(call.body)

    def more(connection: Connection, row: SandboxRow) -> dict[str, Any]:
        assigned = stored_policies.assign(connection, row, given) if given else {}
        if call.body.annotations is not UNSET:
            assigned["annotations"] = _annotated(row, call.body.annotations)
        return {**assigned, **(timed(connection, row) if timed is not None else {})}

    row = await call.plane.database.write(sandboxes.change, call.project, sandbox_id(call), changes, more)
    if given:
        call.plane.policies.look()
    return answer(views.SandboxAnswer(sandbox=show(call, row)))


def _annotated(row: SandboxRow, given: dict[str, Any]) -> dict[str, Any] | None:
    """The annotations with those that were given in the place of theirs. Raises `invalid_field` where all together are too many."""
    kept = {name: value for name, value in {**(row.annotations or {}), **given}.items() if value is not None}
    check_annotations(kept)
    return kept or None


async def extend(call: Call[timing.Extend]) -> Response:
    """Puts the deadline off. Never shortens it, and gives none to a sandbox that has none."""
    bounds = await call.plane.database.read(automatic.bounds, call.project)
    more = timing.extension(call.body, bounds)
    row = await call.plane.database.write(sandboxes.change, call.project, sandbox_id(call), {}, more)
    return answer(views.SandboxAnswer(sandbox=show(call, row)))


async def do(call: Call[NoBody], verb: Verb) -> Response:
    """Accepts a lifecycle verb."""
    accepted = await call.plane.database.write(
        accepting.accept_verb, call.project, sandbox_id(call), verb, call.idempotency, gated=True
    )
    return await proceed(call, accepted)


async def wake(call: Call[WakeSandbox]) -> Response:
    """Accepts to make a sandbox run, by whichever verb its state calls for."""
    timed: timing.Waking | None = None
    if call.body.timeout_s is not UNSET:
        bounds = await call.plane.database.read(automatic.bounds, call.project)
        timed = timing.waking(call.body.timeout_s, bounds)
    accepted = await call.plane.database.write(
        accepting.accept_verb, call.project, sandbox_id(call), Verb.WAKE, call.idempotency, timed=timed, gated=True
    )
    return await proceed(call, accepted)


async def delete(call: Call[NoBody]) -> Response:
    """Accepts a deletion."""
    return await do(call, Verb.DELETE)


def _verb_endpoint(verb: Verb, summary: str) -> Endpoint:
    async def handler(call: Call[NoBody]) -> Response:
        return await do(call, verb)

    return Endpoint(
        "POST",
        f"/v1/sandboxes/{{id}}/{verb}",
        handler,
        summary,
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=NoBody,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    )


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes",
        create,
        "Create a sandbox",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=CreateSandbox,
        errors=(503,),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes",
        list_,
        "List sandboxes",
        {200: views.SandboxPage},
        "sandboxes",
        query=ListSandboxes,
        query_prefixes=("metadata.", "annotation."),
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}",
        get,
        "Show a sandbox",
        {200: views.SandboxAnswer},
        "sandboxes",
        query=ShowSandbox,
        errors=(404,),
    ),
    Endpoint(
        "PATCH",
        "/v1/sandboxes/{id}",
        change,
        "Change name, metadata, lifetime, scheduled snapshots or policy",
        {200: views.SandboxAnswer},
        "sandboxes",
        scope="write",
        body=ChangeSandbox,
        errors=(404, 409, 410),
    ),
    Endpoint(
        "DELETE",
        "/v1/sandboxes/{id}",
        delete,
        "Delete a sandbox, whatever it is doing",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=NoBody,
        errors=(404,),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/extend",
        extend,
        "Put the deadline off: at least so long from now; never sooner than it was",
        {200: views.SandboxAnswer},
        "sandboxes",
        scope="write",
        body=timing.Extend,
        errors=(404, 409, 410),
    ),
    _verb_endpoint(Verb.PAUSE, "Stop the virtual CPUs; memory stays"),
    _verb_endpoint(Verb.RESUME, "Let a paused sandbox go on"),
    _verb_endpoint(Verb.STOP, "Power off; memory is lost, the disk is kept"),
    _verb_endpoint(Verb.START, "Boot on the kept disk"),
    _verb_endpoint(Verb.SUSPEND, "Keep memory and disk, and release the machine"),
    _verb_endpoint(Verb.RESTORE, "Let a suspended sandbox go on where it stood"),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/wake",
        wake,
        "Resume, restore or start, whichever the state calls for",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=WakeSandbox,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    ),
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/fork",
        fork,
        "Branch new sandboxes off, which go on from where this one stands; it runs on",
        {202: views.AcceptedAnswer, 200: views.AcceptedAnswer},
        "sandboxes",
        scope="write",
        body=ForkSandbox,
        errors=(404, 409, 410),
        repeated=repeat,
        waits=True,
    ),
)
