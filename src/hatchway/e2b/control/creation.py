"""POST /sandboxes and /v2/sandboxes."""

import contextlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.domain.lifetimes import OnTimeout
from hatchway.e2b import network, network_policy
from hatchway.e2b.control import templates, views
from hatchway.e2b.control.calls import WITHIN_S, Call, answer, later
from hatchway.e2b.errors import E2bError, of_client
from hatchway.e2b.settings import Settings
from hatchway.wire.node import BAKING

if TYPE_CHECKING:
    from hatchway.client.models import SandboxInfo

DEFAULT_TIMEOUT_S = 300
DEFAULT_TIMEOUT_V1_S = 15
DAY_S = 24 * 3600
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}", re.ASCII)


class AutoResume(msgspec.Struct, frozen=True):
    """`autoResume`."""

    enabled: bool = False


class NewSandbox(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is asked for; members that we do not know are those of a newer E2B, and left aside."""

    template_id: str = msgspec.field(name="templateID", default="base")
    timeout: float | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[Any] | None = None


async def create(call: Call) -> Response:
    """Of the present generation: every sandbox is secured, and lives 300 s unless it is said."""
    return await _create(call, await call.body(NewSandbox), default_s=DEFAULT_TIMEOUT_S, secure=True)


async def create_v1(call: Call) -> Response:
    """Of the first generation: secured where it is asked for, 15 s."""
    body = await call.body(NewSandbox)
    return await _create(call, body, default_s=DEFAULT_TIMEOUT_V1_S, secure=body.secure is True)


async def _create(call: Call, body: NewSandbox, *, default_s: float, secure: bool) -> Response:
    timeout_s = default_s if body.timeout is None else body.timeout
    _check(body, timeout_s)
    internet = body.allow_internet_access
    policy = network_policy.document(network.read(body.network, internet=internet, secure=secure), _today())
    asked = {
        "metadata": body.metadata or {},
        "env": body.env_vars or {},
        "timeout_s": timeout_s,
        "on_timeout": on_timeout(body.auto_pause is True, body.auto_pause_memory is not False),
        "auto_wake": False,  # the wrapper resumes by itself, see `resuming`
        "policy": {"document": policy},
    }
    settings = Settings(
        template="",
        secure=secure,
        auto_pause=body.auto_pause is True,
        auto_pause_memory=body.auto_pause_memory is not False,
        auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
        allow_internet_access=internet,
        network=body.network,
    )
    for source in templates.sources(body.template_id):
        found = await source.find(call)
        if found is None:
            continue
        named = msgspec.structs.replace(settings, template=found.shown, alias=found.alias)
        try:
            info = await _make(call, {**asked, **found.given, "annotations": named.annotation()})
        except templates.Absent:
            continue
        return answer(views.sandbox(call.wrapper, info, named), 201)
    raise templates.unknown(body.template_id)


async def _make(call: Call, body: dict[str, Any]) -> "SandboxInfo":
    """Has it made, and waits until it runs. One that does not come to that is deleted: nobody could know of it, but who repeats the request
    with its `Idempotency-Key`, and finds it by that."""
    from hatchway.client import calls

    key = call.request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise E2bError(400, "Invalid Idempotency-Key: 1 to 255 printable characters of ASCII.")
    try:
        info, _ = await call.run(calls.create_sandbox(body, wait=True, timeout_s=call.left_s, idempotency_key=key))
    except ours.OperationFailed as error:
        _forget(call, error.sandbox_id)
        raise of_client(error) from None
    except ours.WaitTimeout as error:
        late = await _late(call, error, again=key is not None)
        if key is None:
            _forget(call, error.sandbox_id)
        raise late from None
    except (ours.NotFound, ours.Unprocessable) as error:
        if error.code in ("unknown_snapshot", "unknown_template") or error.extra.get("field") in (
            "template",
            "snapshot",
        ):
            raise templates.Absent from None
        raise
    except ours.ConnectionFailed as error:
        failure = of_client(error)
        failure.retry = not error.sent or key is not None  # else it may be made already
        raise failure from None
    return info


async def _late(call: Call, error: ours.WaitTimeout, *, again: bool) -> E2bError:
    """What is said of a sandbox that was not made in time; `again`: who asks once more gets that very one.

    503 where its template is still being baked: that goes on by itself, so that a repeated request is on the right way in any case.
    """
    from hatchway.client import calls

    phase = None
    with contextlib.suppress(ours.HatchwayError):
        phase = (await call.run(calls.get_operation(error.operation_id))).phase
    if phase in BAKING:
        return E2bError(
            503,
            f"The template is still being prepared for its first sandbox ({phase}), and that took longer than a request may. It goes on: "
            "create the sandbox again in a moment.",
            retry=True,
        )
    return E2bError(504, f"The sandbox did not run within {WITHIN_S:g} s. Create it again.", retry=again)


def _forget(call: Call, sandbox_id: str | None) -> None:
    from hatchway.client import calls

    if sandbox_id is not None:
        later(call.driver.run(calls.delete_sandbox(sandbox_id, wait=False, timeout_s=0)))


def on_timeout(auto_pause: bool, memory: bool) -> OnTimeout:
    """What is done at the end of a sandbox's time."""
    if not auto_pause:
        return OnTimeout.DELETE
    return OnTimeout.SUSPEND if memory else OnTimeout.STOP


def _check(body: NewSandbox, timeout_s: float) -> None:
    """Raises `E2bError` 400 for what E2B refuses, and for what there is not here: it must not be left aside in silence."""
    resumes = body.auto_resume is not None and body.auto_resume.enabled
    if timeout_s <= 0:
        raise E2bError(400, "Timeout must be greater than 0.")
    if body.auto_pause_memory is False and body.auto_pause is not True:
        raise E2bError(400, "autoPauseMemory=false needs autoPause=true.")
    if body.auto_pause_memory is False and resumes:
        raise E2bError(
            400, "autoPauseMemory=false and autoResume exclude each other: without memory only connect resumes."
        )
    for name, given in (("mcp", body.mcp), ("iam", body.iam), ("volumeMounts", body.volume_mounts)):
        if given:
            raise E2bError(400, f"{name} is not supported here: leave it out.")


def _today() -> datetime:
    """The time, to the day: a request that is repeated with its `Idempotency-Key` has to ask for the same policy."""
    now = datetime.now(UTC).timestamp()
    return datetime.fromtimestamp(now - now % DAY_S, UTC)
