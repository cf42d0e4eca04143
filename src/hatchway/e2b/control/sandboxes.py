"""What is done with a sandbox that is there: look, connect, pause, resume, time, kill."""

import asyncio
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.e2b import network_policy
from hatchway.e2b.control import views
from hatchway.e2b.control.calls import Call, answer, nothing
from hatchway.e2b.control.creation import DEFAULT_TIMEOUT_S, DEFAULT_TIMEOUT_V1_S, on_timeout
from hatchway.e2b.control.finding import HERE, find, find_any, unknown
from hatchway.e2b.errors import E2bError, of_client
from hatchway.e2b.settings import Settings

if TYPE_CHECKING:
    from hatchway.client.models import SandboxInfo

MIN_TIMEOUT_S = 1.0
MAX_REFRESH_S = 3600
KILL_WITHIN_S = 30.0
LOOK_AGAIN_S = 0.05
"""After somebody else was quicker."""
GUEST_UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"
"""What SDKs know for memory that is not to be resumed: they say that the sandbox can be rebooted."""

_COMMANDING = frozenset({"exec", "write"})
"""Scopes of API v1 with either of which a key may do what a sandbox's token lets do."""
_MEANWHILE = frozenset({"operation_in_flight", "wrong_state", "changed_meanwhile"})
"""What API v1 says where the sandbox was in another state than it was seen in."""


class Connect(msgspec.Struct, frozen=True):
    """`connect` of the present generation. `memory`: false drops the memory of a paused one, which boots then."""

    timeout: float | None = None
    memory: bool | None = None


class ConnectV1(msgspec.Struct, frozen=True):
    """`connect` of the first generation: `timeout` has to be there."""

    timeout: float
    memory: bool | None = None


class Resume(msgspec.Struct, frozen=True, rename="camel"):
    """`resume`, before there was `connect`."""

    timeout: float | None = None
    auto_pause: bool | None = None


class Pause(msgspec.Struct, frozen=True):
    """`pause`; without `memory` the disk alone is kept. Ours is never made of a guest that does not answer, whatever is required."""

    memory: bool | None = None


class Timeout(msgspec.Struct, frozen=True):
    """`timeout`: seconds from now; 0 or less is now."""

    timeout: float


class Refresh(msgspec.Struct, frozen=True):
    """`refreshes`: seconds from now."""

    duration: float | None = None


async def get(call: Call) -> Response:
    """GET /sandboxes/{id}. `allowInternetAccess` is as it was given, and false where policies above the sandbox's own bar the internet.

    The sandbox's token is shown to keys that may do what it lets do: not to one that reads alone.
    """
    from hatchway.client import policycalls

    info, settings = await find(call)
    shown = views.detail(call.wrapper, info, settings, token=settings.secure and await _may_command(call))
    if shown["allowInternetAccess"] is not False:
        effective = await call.run(policycalls.effective_policy(info.id))
        if network_policy.bars_internet(settings.network, effective.documents):
            shown["allowInternetAccess"] = False
    return answer(shown)


async def _may_command(call: Call) -> bool:
    """Whether the caller's key may do things in sandboxes."""
    from hatchway.client import calls

    return not _COMMANDING.isdisjoint((await call.run(calls.own_key())).scopes)


async def connect(call: Call) -> Response:
    """POST /v2/sandboxes/{id}/connect."""
    body = await call.body(Connect)
    timeout_s = DEFAULT_TIMEOUT_S if body.timeout is None else body.timeout
    return await _connect(call, timeout_s, keep_memory=body.memory is not False)


async def connect_v1(call: Call) -> Response:
    """POST /sandboxes/{id}/connect."""
    body = await call.body(ConnectV1)
    return await _connect(call, body.timeout, keep_memory=body.memory is not False)


async def resume(call: Call) -> Response:
    """POST /sandboxes/{id}/resume: one that runs is an error."""
    from hatchway.client import calls

    body = await call.body(Resume)
    info, settings = await _settled(call)
    if info.state == "running":
        raise E2bError(409, f'Sandbox "{info.id}" is running already.')
    if body.auto_pause is not None:
        settings = msgspec.structs.replace(settings, auto_pause=body.auto_pause)
        done = on_timeout(settings.auto_pause, settings.auto_pause_memory)
        changes = {"on_timeout": done, "annotations": settings.annotation()}
        await call.run(calls.update_sandbox(info.id, changes))
    return await _connect(call, DEFAULT_TIMEOUT_V1_S if body.timeout is None else body.timeout, keep_memory=True)


async def _connect(call: Call, timeout_s: float, *, keep_memory: bool) -> Response:
    """Makes it run for so long: 200 where it ran already, which only ever extends its time; 201 where it was resumed."""
    from hatchway.client import calls

    if timeout_s < 0:
        raise E2bError(400, "Timeout must not be negative.")
    wanted = {"timeout_s": max(MIN_TIMEOUT_S, timeout_s)}
    while True:
        info, settings = await _settled(call)
        try:
            if info.state == "running":
                # Also where no time is asked for: the answer has the sandbox's token, which is not for a key that reads alone.
                info = await call.run(calls.extend_sandbox(info.id, max(MIN_TIMEOUT_S, timeout_s)))
                if info.state == "running" and info.operation is None:
                    return answer(views.sandbox(call.wrapper, info, settings, connected=True), 200)
                continue
            if not keep_memory and info.state != "stopped":
                await call.run(calls.change_sandbox(info.id, "stop", wait=True, timeout_s=call.left_s))
                continue
            info, operation = await call.run(
                calls.change_sandbox(info.id, "wake", wait=True, timeout_s=call.left_s, body=wanted)
            )
        except ours.Conflict as error:
            await _again(call, error)
            continue
        except ours.OperationFailed as error:
            if error.code == "memory_lost":
                raise E2bError(409, error.cause, error_code=GUEST_UNRESPONSIVE) from None
            raise
        resumed = not isinstance(operation.result, dict) or operation.result.get("changed") is not False
        return answer(views.sandbox(call.wrapper, info, settings, connected=True), 201 if resumed else 200)


async def pause(call: Call) -> Response:
    """POST /sandboxes/{id}/pause: memory and disk are kept and the machine is released."""
    from hatchway.client import calls

    body = await call.body(Pause)
    verb = "stop" if body.memory is False else "suspend"
    while True:
        info, _ = await _settled(call)
        if info.state in views.PAUSED:
            raise E2bError(409, f'Sandbox "{info.id}" is paused already.')
        try:
            await call.run(calls.change_sandbox(info.id, verb, wait=True, timeout_s=call.left_s))
            call.wrapper.reaching.forget(info.id)
        except ours.Conflict as error:
            await _again(call, error)
            continue
        except ours.OperationFailed as error:
            raise E2bError(
                503, f"The sandbox was not paused: {error.cause}", error_code=error.code, retry=False
            ) from None
        return nothing()


async def timeout(call: Call) -> Response:
    """POST /sandboxes/{id}/timeout: from now on, be it sooner or later than it was."""
    from hatchway.client import calls

    body = await call.body(Timeout)
    info, _ = await find(call)
    if info.state != "running":
        raise E2bError(409, f'Sandbox "{info.id}" is not running.')
    if body.timeout <= 0:
        await _end_now(call, info)
        return nothing()
    changes = {"timeout_s": max(MIN_TIMEOUT_S, body.timeout), "shorten": True}
    await call.run(calls.update_sandbox(info.id, changes))
    return nothing()


async def _end_now(call: Call, info: "SandboxInfo") -> None:
    """Its time is over: what is done at its end is begun."""
    from hatchway.client import calls

    verb = str(info.on_timeout)
    if verb == "delete":
        await call.run(calls.delete_sandbox(info.id, wait=False, timeout_s=0))
    else:
        await call.run(calls.change_sandbox(info.id, verb, wait=False, timeout_s=0))


async def refresh(call: Call) -> Response:
    """POST /sandboxes/{id}/refreshes: at least that long from now on."""
    from hatchway.client import calls

    body = await call.body(Refresh)
    duration_s = DEFAULT_TIMEOUT_V1_S if body.duration is None else body.duration
    if not 0 <= duration_s <= MAX_REFRESH_S:
        raise E2bError(400, f"duration must be from 0 to {MAX_REFRESH_S} seconds.")
    info, _ = await find(call)
    if info.state != "running":
        raise E2bError(404, f'Sandbox "{info.id}" is not running.')
    if duration_s >= MIN_TIMEOUT_S:
        await call.run(calls.extend_sandbox(info.id, duration_s))
    return nothing()


async def kill(call: Call) -> Response:
    """DELETE /sandboxes/{id}, whatever it is doing. What waits for somebody's consent is 409."""
    from hatchway.client import calls

    info, _ = await find_any(call)
    if info.desired == "deleted" and info.operation is not None:
        raise unknown(info.id)
    try:
        await call.run(calls.delete_sandbox(info.id, wait=True, timeout_s=min(KILL_WITHIN_S, call.left_s)))
    except ours.NotFound:
        raise unknown(info.id) from None
    except ours.WaitTimeout:
        pass  # a deletion that was accepted comes to its end
    finally:
        call.wrapper.reaching.forget(info.id)
    return nothing()


async def _settled(call: Call) -> "tuple[SandboxInfo, Settings]":
    """The sandbox, when nothing is in hand with it. Raises `E2bError`: 404, 409 for one that is being killed or stays in transition."""
    from hatchway.client import calls

    while True:
        info, settings = await find_any(call)
        if info.desired == "deleted":
            raise E2bError(409, f'Sandbox "{info.id}" is being killed.')
        if info.operation is None:
            if info.state not in HERE:
                return await find(call)  # says what became of it
            return info, settings
        if call.left_s < 1.0:
            raise transitioning(info)
        try:
            operation = await call.run(calls.get_operation(str(info.operation["id"])))
            await call.run(calls.await_operation(operation, timeout_s=call.left_s))
        except ours.WaitTimeout:
            raise transitioning(info) from None
        except (ours.OperationFailed, ours.NotFound):
            continue  # whoever asked for it is told; here it counts how the sandbox is now


def transitioning(info: "SandboxInfo") -> E2bError:
    """409: something is in hand with it that does not end."""
    kind = (info.operation or {}).get("kind") or "change"
    return E2bError(409, f'Sandbox "{info.id}" is in transition: a {kind} is in hand.', retry=True)


async def _again(call: Call, error: ours.Conflict) -> None:
    """Somebody else was quicker: it is looked at again, while there is time. Raises what is none of that."""
    if error.code not in _MEANWHILE or call.left_s < 1.0:
        raise of_client(error) from None
    await asyncio.sleep(LOOK_AGAIN_S)
