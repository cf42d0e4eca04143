"""POST /sandboxes/{id}/snapshots and GET /snapshots; they are deleted as templates (`templates.delete`)."""

import re

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.domain.ids import is_id
from hatchway.e2b.control import views
from hatchway.e2b.control.calls import Call, answer
from hatchway.e2b.control.finding import find
from hatchway.e2b.control.views import TAG
from hatchway.e2b.errors import E2bError
from hatchway.e2b.origin import plain_id

MAX_LIMIT = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LIMIT = re.compile(r"[0-9]{1,9}")


class NewSnapshot(msgspec.Struct, frozen=True):
    """Its name, if it shall have one; without `memory` it holds the disk alone."""

    name: str | None = None
    memory: bool | None = None


async def make(call: Call) -> Response:
    """Keeps a sandbox as it is; it runs on."""
    from hatchway.client import calls

    body = await call.body(NewSnapshot)
    name = None if not body.name else _plain(body.name)
    info, _ = await find(call)
    if info.state != "running":
        raise E2bError(409, f'Sandbox "{info.id}" is paused: connect to it first.')
    asked = calls.compact(kind="disk" if body.memory is False else "full", name=name)
    try:
        _, operation = await call.run(
            calls.change_sandbox(info.id, "snapshots", wait=True, timeout_s=call.left_s, body=asked)
        )
    except ours.OperationFailed as error:
        raise E2bError(503, f"The snapshot was not made: {error.cause}", error_code=error.code, retry=False) from None
    return answer(views.snapshot(await call.run(calls.snapshot_of(operation))), 201)


async def list_(call: Call) -> Response:
    """The project's snapshots, newest first; `x-next-token` where there are more."""
    from hatchway.client.calls import Listing
    from hatchway.client.models import Snapshot

    limit = call.query("limit") or str(MAX_LIMIT)
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise E2bError(400, f"Invalid limit {limit[:40]!r}: 1 to {MAX_LIMIT}.")
    filters = {"state": "ready", "limit": limit}
    if (of := call.query("sandboxID")) is not None:
        filters["sandbox"] = plain_id(of)
    if name := call.query("name"):
        plain, _, tag = name.partition(":")
        if tag not in ("", TAG):
            return answer([])
        if is_id(plain):
            return answer(await _one(call, plain, filters.get("sandbox")))
        filters["name"] = plain
    page = await call.run(Listing("/v1/snapshots", "snapshots", Snapshot, filters).page(call.query("nextToken")))
    headers = {} if page.cursor is None else {"x-next-token": page.cursor}
    return answer([views.snapshot(kept) for kept in page.items], headers=headers)


async def _one(call: Call, snapshot_id: str, sandbox_id: str | None) -> list[dict[str, object]]:
    from hatchway.client import calls

    try:
        kept = await call.run(calls.get_snapshot(snapshot_id))
    except (ours.NotFound, ours.Gone):
        return []
    return [views.snapshot(kept)] if kept.state == "ready" and sandbox_id in (None, kept.sandbox_id) else []


def _plain(given: str) -> str:
    """The name as it is kept. Raises `E2bError` 400."""
    name, _, tag = given.partition(":")
    if tag not in ("", TAG) or not _NAME.fullmatch(name) or is_id(name):
        raise E2bError(
            400,
            f"Invalid name {given[:80]!r}: letters, digits, '.', '_' and '-', at most 63; another tag than {TAG} is not supported.",
        )
    return name
