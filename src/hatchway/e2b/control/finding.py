"""Looking a sandbox up: only those that the wrapper made are there for it, and a failed or deleted one is not there any more."""

from typing import TYPE_CHECKING

from hatchway.client import errors as ours
from hatchway.e2b import settings as kept
from hatchway.e2b.control.calls import Call
from hatchway.e2b.errors import E2bError
from hatchway.e2b.origin import plain_id
from hatchway.e2b.settings import Settings

if TYPE_CHECKING:
    from hatchway.client.models import SandboxInfo

HERE = frozenset({"running", "suspended", "paused", "stopped"})


async def find(call: Call) -> "tuple[SandboxInfo, Settings]":
    """The sandbox that the path names, as it is now. Raises `E2bError` 404."""
    info, settings = await find_any(call)
    if info.state not in HERE or info.desired == "deleted":
        told = f" It {info.state}: {info.reason}" if info.state == "failed" and info.reason else ""
        raise E2bError(404, f'Sandbox "{info.id}" was not found.{told}')
    return info, settings


async def find_any(call: Call) -> "tuple[SandboxInfo, Settings]":
    """Like `find`, in whatever state it is, but deleted. Raises `E2bError` 404."""
    from hatchway.client import calls

    sandbox_id = plain_id(call.path["id"])
    try:
        info = await call.run(calls.get_sandbox(sandbox_id, annotations=True))
    except (ours.NotFound, ours.Gone):
        raise unknown(sandbox_id) from None
    settings = kept.of(info.annotations)
    if settings is None or info.state == "deleted":
        raise unknown(sandbox_id)
    return info, settings


def unknown(sandbox_id: str) -> E2bError:
    """404."""
    return E2bError(404, f'Sandbox "{sandbox_id}" was not found.')
