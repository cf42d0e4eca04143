"""PUT /sandboxes/{id}/network: another policy for a sandbox. `hatchway.e2b.network_policy` says which."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.e2b import network, network_policy
from hatchway.e2b.control.calls import Call, nothing
from hatchway.e2b.control.finding import find
from hatchway.e2b.errors import E2bError


async def put(call: Call) -> Response:
    """Replaces all that is about the way out: what is left out is cleared. It holds for connections that there are, too."""
    from hatchway.client import calls

    body = await call.body(dict[str, Any])
    info, settings = await find(call)
    if info.state != "running":
        raise E2bError(409, f'Sandbox "{info.id}" is not running.')
    given, internet = network.updated(settings.network, body)
    policy = network_policy.document(network.read(given, internet=internet, secure=settings.secure), datetime.now(UTC))
    settings = msgspec.structs.replace(settings, network=given or None, allow_internet_access=internet)
    changes = {"policy": {"document": policy}, "annotations": settings.annotation()}
    try:
        await call.run(calls.update_sandbox(info.id, changes))
    except ours.Gone:
        raise E2bError(404, f'Sandbox "{info.id}" was not found.') from None
    call.wrapper.reaching.forget(info.id)
    return nothing()
