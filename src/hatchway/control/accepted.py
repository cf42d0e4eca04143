"""What is answered where an operation was accepted: the sandbox and the operation, now or when it has ended."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response

from hatchway.control import idempotency, requests, views
from hatchway.control.endpoints import Call, answer
from hatchway.domain.errors import Gone, NotFound
from hatchway.storage import operations, subjects
from hatchway.storage.accepting import Accepted
from hatchway.storage.idempotency import Answered
from hatchway.storage.rows import OperationRow, SandboxRow


def show(call: Call[Any], row: SandboxRow, annotations: bool = False) -> views.Sandbox:
    """A sandbox, with what the engine and the reconciler know of it, and with its annotations where those are asked for."""
    live = call.plane.engine.live.get(row.operation_id) if row.operation_id else None
    shown = views.sandbox(row, live, call.plane.conditions(row))
    return msgspec.structs.replace(shown, annotations=row.annotations or {}) if annotations else shown


Showing = Callable[[Call[Any], SandboxRow, OperationRow], Awaitable[msgspec.Struct]]
"""What is answered of a sandbox and an operation."""


async def show_both(call: Call[Any], sandbox: SandboxRow, operation: OperationRow) -> views.AcceptedAnswer:
    """The sandbox and the operation, as far as the engine knows it to be."""
    live = call.plane.engine.live.get(operation.id)
    return views.AcceptedAnswer(sandbox=show(call, sandbox), operation=views.operation(operation, live))


async def proceed(call: Call[Any], accepted: Accepted, showing: Showing = show_both) -> Response:
    """Has what was accepted carried out, and answers."""
    if accepted.run:
        call.plane.engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)
    return await _settle(call, accepted.sandbox, accepted.operation, {}, showing)


async def repeat(call: Call[Any], earlier: Answered, showing: Showing = show_both) -> Response:
    """Answers a repeated request with the sandbox and operation of the first, as they are now."""
    operation = await call.plane.database.read(operations.find, str(earlier.answer.get("operation", "")))
    sandbox = None if operation is None else await call.plane.database.read(subjects.of, operation)
    if sandbox is None or operation is None or sandbox.project != call.project:
        raise Gone("sandbox_deleted", "What this Idempotency-Key made was deleted.", "Use a new key.")
    return await _settle(call, sandbox, operation, idempotency.REPLAYED, showing)


async def _settle(
    call: Call[Any], sandbox: SandboxRow, operation: OperationRow, more: dict[str, str], showing: Showing
) -> Response:
    """Waits where the client prefers that; 200 when the operation has ended, 202 while it has not."""
    plane = call.plane
    wait = requests.prefer_wait(call.request)
    headers = {"location": f"/v1/operations/{operation.id}", **more}
    if wait is not None:
        headers["preference-applied"] = f"wait={wait}"
        if operation.finished_at is None and wait > 0:
            finished = await plane.engine.wait(operation.id, wait)
            if finished is not None:
                sandbox, operation = finished.sandbox, finished.operation
            else:
                fresh = await plane.database.read(operations.find, operation.id)
                seen = await plane.database.read(subjects.of, operation)
                operation, sandbox = fresh or operation, seen or sandbox
    body = await showing(call, sandbox, operation)
    return answer(body, 202 if operation.finished_at is None else 200, headers)


def sandbox_id(call: Call[Any]) -> str:
    """The sandbox that the path names. Raises `NotFound` for what cannot be an id."""
    return requests.check_id(call.path["id"], "sandbox", NotFound)
