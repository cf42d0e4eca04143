"""What is answered where an operation was accepted: the sandbox and the operation, now or when it has ended."""

from typing import Any

import msgspec
from starlette.responses import Response

from hatchway.control import idempotency, requests, views
from hatchway.control.endpoints import Call, answer
from hatchway.domain.errors import Gone, NotFound
from hatchway.storage import operations, sandboxes
from hatchway.storage.accepting import Accepted
from hatchway.storage.idempotency import Answered
from hatchway.storage.rows import OperationRow, SandboxRow


def show(call: Call[Any], row: SandboxRow, annotations: bool = False) -> views.Sandbox:
    """A sandbox, with what the engine and the reconciler know of it, and with its annotations where those are asked for."""
    live = call.plane.engine.live.get(row.operation_id) if row.operation_id else None
    shown = views.sandbox(row, live, call.plane.conditions(row))
    return msgspec.structs.replace(shown, annotations=row.annotations or {}) if annotations else shown


async def proceed(call: Call[Any], accepted: Accepted) -> Response:
    """Has what was accepted carried out, and answers."""
    if accepted.run:
        call.plane.engine.submit(accepted.operation, accepted.sandbox, accepted.preempted)
    return await _settle(call, accepted.sandbox, accepted.operation, {})


async def repeat(call: Call[Any], earlier: Answered) -> Response:
    """Answers a repeated request with the sandbox and operation of the first, as they are now."""
    names = earlier.answer
    sandbox = await call.plane.database.read(sandboxes.find, str(names.get("sandbox", "")))
    operation = await call.plane.database.read(operations.find, str(names.get("operation", "")))
    if sandbox is None or operation is None or sandbox.project != call.project:
        raise Gone("sandbox_deleted", "What this Idempotency-Key made was deleted.", "Use a new key.")
    return await _settle(call, sandbox, operation, idempotency.REPLAYED)


async def _settle(call: Call[Any], sandbox: SandboxRow, operation: OperationRow, more: dict[str, str]) -> Response:
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
                seen = await plane.database.read(sandboxes.find, sandbox.id)
                operation, sandbox = fresh or operation, seen or sandbox
    live = plane.engine.live.get(operation.id)
    body = views.AcceptedAnswer(sandbox=show(call, sandbox), operation=views.operation(operation, live))
    return answer(body, 202 if operation.finished_at is None else 200, headers)


def sandbox_id(call: Call[Any]) -> str:
    """The sandbox that the path names. Raises `NotFound` for what cannot be an id."""
    return requests.check_id(call.path["id"], "sandbox", NotFound)
