"""POST /sandboxes/{id}/fork."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.e2b import errors
from hatchway.e2b.control import views
from hatchway.e2b.control.calls import Call, answer, later
from hatchway.e2b.control.creation import DEFAULT_TIMEOUT_S
from hatchway.e2b.control.finding import find
from hatchway.e2b.errors import E2bError, of_client
from hatchway.e2b.settings import Settings

MAX_FORKS = 100


class Fork(msgspec.Struct, frozen=True):
    """How many, and how long each of them lives."""

    count: int | None = None
    timeout: float | None = None


async def fork(call: Call) -> Response:
    """Branches off, each with what became of it: a sandbox, or an error."""
    from hatchway.client import calls

    body = await call.body(Fork)
    count = 1 if body.count is None else body.count
    timeout_s = DEFAULT_TIMEOUT_S if body.timeout is None else body.timeout
    if not 1 <= count <= MAX_FORKS:
        raise E2bError(400, f"count must be from 1 to {MAX_FORKS}.")
    if timeout_s <= 0:
        raise E2bError(400, "Timeout must be greater than 0.")
    info, settings = await find(call)
    if info.state != "running":
        raise E2bError(409, f'Sandbox "{info.id}" is paused: connect to it first.')
    asked = {"count": count, "timeout_s": timeout_s}
    try:
        _, operation = await call.run(
            calls.change_sandbox(info.id, "fork", wait=True, timeout_s=call.left_s, body=asked)
        )
    except ours.OperationFailed as error:
        raise of_client(error) from None
    result = operation.result if isinstance(operation.result, dict) else {}
    branches = list(result.get("branches", ()))
    return answer(await asyncio.gather(*(_shown(call, one, settings) for one in branches)), 201)


async def _shown(call: Call, branch: dict[str, Any], settings: Settings) -> dict[str, Any]:
    from hatchway.client import calls

    error = branch.get("error")
    if error is None:
        try:
            info = await call.run(calls.get_sandbox(str(branch["sandbox"])))
        except (ours.NotFound, ours.Gone):
            return {"error": errors.shown(E2bError(404, "It was killed meanwhile."))}
        return {"sandbox": views.sandbox(call.wrapper, info, settings)}
    later(call.driver.run(calls.delete_sandbox(str(branch["sandbox"]), wait=False, timeout_s=0)))
    return {"error": errors.shown(E2bError(500, str(error.get("cause", "")) or "It could not be made."))}
