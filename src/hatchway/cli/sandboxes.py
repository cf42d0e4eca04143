"""Commands about sandboxes: `create ls get rm pause resume suspend restore stop start wake`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .options import (
    AutoWake,
    Credential,
    Disk,
    Env,
    Memory,
    Metadata,
    Name,
    NoWait,
    OnTimeout,
    Policy,
    SandboxId,
    Snapshots,
    Vcpus,
    pairs,
    schedule,
)
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import Operation, Sandbox

_WAIT_S = 300.0


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("create")(create)
    app.command("ls")(ls)
    app.command("get")(get)
    app.command("rm")(rm)
    for verb in (pause, resume, suspend, restore, stop, start, wake):
        app.command(verb.__name__)(verb)


@with_front
def create(
    front: Front,
    template: Annotated[
        str | None,
        typer.Option("--template", "-t", help="Template to make the sandbox from.", show_default="seed:latest"),
    ] = None,
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", metavar="ID", help="Snapshot to make it from instead, with its size.")
    ] = None,
    name: Name = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Disk = None,
    metadata: Metadata = None,
    env: Env = None,
    require_isolation: Annotated[
        str | None, typer.Option("--require-isolation", metavar="hardware|emulated", help="Refuse anything weaker.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", metavar="S", help="Seconds that it runs at a time.")
    ] = None,
    idle_timeout_s: Annotated[
        float | None, typer.Option("--idle-timeout-s", metavar="S", help="Seconds that nobody uses it.")
    ] = None,
    on_timeout: OnTimeout = None,
    auto_wake: AutoWake = None,
    snapshots: Snapshots = None,
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="auto|never|NAME", help="Which pool it may come out of.")
    ] = None,
    policy: Policy = None,
    credential: Credential = None,
    no_wait: NoWait = False,
) -> None:
    """Make a sandbox that stays, and print its id."""
    from .policystore import given
    from .progress import BEING_MADE, patience

    planned, allowed = schedule(snapshots), given(policy)
    with patience(BEING_MADE):
        sandbox = front.client.sandboxes.create(
            template,
            snapshot=snapshot,
            name=name,
            metadata=pairs(metadata, "--metadata") or None,
            env=pairs(env, "--env") or None,
            vcpus=vcpus,
            memory_mib=memory,
            disk_mib=disk,
            require_isolation=require_isolation,
            timeout_s=timeout_s,
            idle_timeout_s=idle_timeout_s,
            on_timeout=on_timeout,
            auto_wake=auto_wake,
            snapshots=planned,
            pool=pool,
            policy=allowed,
            credentials=credential,
            wait=not no_wait,
            timeout=_WAIT_S,
        )
    if front.json:
        from .output import print_json

        print_json(sandbox.info)
    else:
        print(sandbox.id)


@with_front
def ls(
    front: Front,
    state: Annotated[str | None, typer.Option("--state", help="Only those in this state.")] = None,
    template: Annotated[str | None, typer.Option("--template", "-t", help="Only those of this template.")] = None,
    metadata: Metadata = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also those deleted a short while ago.")] = False,
) -> None:
    """List the sandboxes."""
    from .output import print_json, print_table, when

    wanted = pairs(metadata, "--metadata") or None
    found = list(front.client.sandboxes.list(state=state, template=template, metadata=wanted))
    if all_ and state is None:  # the service lists deleted ones only where it is asked for them
        found += front.client.sandboxes.list(state="deleted", template=template, metadata=wanted)
    if front.json:
        print_json(found)
        return
    rows = [
        (
            one.id,
            one.name,
            one.state,
            one.template,
            f"{one.vcpus} vCPU, {one.memory_mib} MiB",
            one.isolation,
            when(one.created_at),
        )
        for one in found
    ]
    print_table(("SANDBOX", "NAME", "STATE", "TEMPLATE", "SIZE", "ISOLATION", "CREATED"), rows)


@with_front
def get(front: Front, sandbox: SandboxId) -> None:
    """Show one sandbox."""
    from .output import print_fields, print_json

    info = front.client.sandboxes.get(sandbox).info
    if front.json:
        print_json(info)
    else:
        print_fields(info.as_dict())


@with_front
def rm(
    front: Front,
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids of sandboxes.", show_default=False)],
    no_wait: NoWait = False,
) -> None:
    """Delete sandboxes, whatever they are doing."""
    for sandbox_id in sandboxes:
        _tell(front, front.client.sandboxes.delete(sandbox_id, wait=not no_wait))


@with_front
def pause(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Stop the vCPUs of a sandbox; its memory stays."""
    _tell(front, _at(front, sandbox).pause(wait=not no_wait))


@with_front
def resume(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Let a paused sandbox go on."""
    _tell(front, _at(front, sandbox).resume(wait=not no_wait))


@with_front
def suspend(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Keep a sandbox's memory and disk, and release its machine."""
    _tell(front, _at(front, sandbox).suspend(wait=not no_wait))


@with_front
def restore(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Let a suspended sandbox go on where it stood."""
    _tell(front, _at(front, sandbox).restore(wait=not no_wait))


@with_front
def stop(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Power a sandbox off; its disk is kept."""
    _tell(front, _at(front, sandbox).stop(wait=not no_wait))


@with_front
def start(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Boot a stopped or failed sandbox on its kept disk."""
    _tell(front, _at(front, sandbox).start_vm(wait=not no_wait))


@with_front
def wake(front: Front, sandbox: SandboxId, no_wait: NoWait = False) -> None:
    """Make a sandbox run, by whichever of resume, restore and start applies."""
    _tell(front, _at(front, sandbox).wake(wait=not no_wait))


def _at(front: Front, sandbox_id: str) -> "Sandbox":
    return front.client.sandboxes.get(sandbox_id)


def _tell(front: Front, operation: "Operation") -> None:
    from .output import print_json

    if front.json:
        print_json(operation)
    else:
        print(f"{operation.target}  {operation.kind} {operation.status}")
