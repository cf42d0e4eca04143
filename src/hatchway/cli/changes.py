"""Commands that change what a sandbox is called and how long it lives: `set`, `extend`."""

from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .options import AutoWake, Credential, Metadata, OnTimeout, SandboxId, Snapshots, pairs, schedule
from .policystore import given
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import SandboxInfo

NONE = "none"


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("set")(set_)
    app.command("extend")(extend)


@with_front
def set_(
    front: Front,
    sandbox: SandboxId,
    name: Annotated[
        str | None, typer.Option("--name", help='Another name for it; "" takes it away.', show_default=False)
    ] = None,
    metadata: Metadata = None,
    drop_metadata: Annotated[
        list[str] | None,
        typer.Option("--drop-metadata", metavar="K", help="Metadata to take away; repeatable.", show_default=False),
    ] = None,
    timeout_s: Annotated[
        str | None, typer.Option("--timeout-s", metavar="S|none", help="Seconds that it runs, from now on.")
    ] = None,
    idle_timeout_s: Annotated[
        str | None, typer.Option("--idle-timeout-s", metavar="S|none", help="Seconds that nobody uses it.")
    ] = None,
    on_timeout: OnTimeout = None,
    auto_wake: AutoWake = None,
    snapshots: Snapshots = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME|FILE|none",
            help="What may leave it from now on; none: what the higher tiers say alone.",
            show_default=False,
        ),
    ] = None,
    credential: Credential = None,
    shorten: Annotated[bool, typer.Option("--shorten", help="Also where its deadline comes earlier by it.")] = False,
) -> None:
    """Change what is given of a sandbox, and leave the rest as it is.

    none: no bound any more, no snapshots by a schedule.
    """
    changes: dict[str, object] = {}
    if name is not None:
        changes["name"] = name or None
    if timeout_s is not None:
        changes["timeout_s"] = _seconds(timeout_s, "--timeout-s")
    if idle_timeout_s is not None:
        changes["idle_timeout_s"] = _seconds(idle_timeout_s, "--idle-timeout-s")
    if on_timeout is not None:
        changes["on_timeout"] = on_timeout
    if auto_wake is not None:
        changes["auto_wake"] = auto_wake
    if snapshots is not None:
        changes["snapshots"] = None if snapshots == NONE else schedule(snapshots)
    if policy is not None:
        changes["policy"] = None if policy == NONE else given(policy)
    if credential is not None:
        changes["credentials"] = credential
    added = pairs(metadata, "--metadata")
    if not changes and not added and not drop_metadata:
        raise typer.BadParameter("say what shall change; --help lists what can")
    found = front.client.sandboxes.get(sandbox)
    if added or drop_metadata:
        kept = {key: value for key, value in found.info.metadata.items() if key not in (drop_metadata or ())}
        changes["metadata"] = {**kept, **added}
    if shorten:
        changes["shorten"] = True
    _show(front, found.update(**changes))  # type: ignore[arg-type]  # each has the type of its option


@with_front
def extend(
    front: Front,
    sandbox: SandboxId,
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="From now on, at least.", show_default=False)],
) -> None:
    """Put the deadline of a sandbox off. One that is later stays, and a sandbox without one gets none."""
    _show(front, front.client.sandboxes.get(sandbox).extend(seconds))


def _seconds(text: str, option: str) -> float | None:
    if text == NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither seconds nor {NONE}", param_hint=option) from None


def _show(front: Front, info: "SandboxInfo") -> None:
    from .output import print_fields, print_json

    if front.json:
        print_json(info)
    else:
        print_fields(info.as_dict())
