"""The commands `policy put|get|ls|rm|show`: policies of the service, and what decides for a sandbox."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .options import SandboxId
from .shared import with_front

if TYPE_CHECKING:
    from hatchway.client import Policy

Name = Annotated[str, typer.Argument(metavar="POLICY", help="Its name.", show_default=False)]
Tier = Annotated[
    str | None,
    typer.Option("--tier", metavar="platform|project|template|sandbox", help="Of this tier.", show_default=False),
]
Platform = Annotated[bool, typer.Option("--platform", help="One of the installation, not of the project.")]
IfMatch = Annotated[
    str | None, typer.Option("--if-match", metavar="ETAG", help="Only if it is still this version.", show_default=False)
]


def add_to(group: typer.Typer) -> None:
    """Adds the commands of this module to the group `policy`."""
    group.command("ls")(ls)
    group.command("get")(get)
    group.command("put")(put)
    group.command("rm")(rm)
    group.command("show")(show)
    group.command("why")(why)


@with_front
def ls(front: Front, tier: Tier = None) -> None:
    """List the policies that hold for the project's sandboxes, the highest tier first."""
    from .output import print_json, print_table, when

    found = list(front.client.policies.list(tier=tier))
    if front.json:
        print_json(found)
        return
    rows = [(one.name, one.tier, one.template or "", one.version, when(one.updated_at), one.etag) for one in found]
    print_table(("POLICY", "TIER", "TEMPLATE", "VERSION", "CHANGED", "ETAG"), rows)


@with_front
def get(front: Front, name: Name, platform: Platform = False) -> None:
    """Print the document of a policy, in canonical form; with --json all of it."""
    from .output import print_json

    found = front.client.policies.get(name, tier="platform" if platform else None)
    print_json(found if front.json else found.document)


@with_front
def put(
    front: Front,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML or JSON; - for standard input.", allow_dash=True)],
    tier: Annotated[
        str, typer.Option("--tier", metavar="platform|project|template|sandbox", help="Whom it holds for.")
    ] = "sandbox",
    template: Annotated[
        str | None, typer.Option("--template", help="With the tier `template`: whose sandboxes.", show_default=False)
    ] = None,
    if_match: IfMatch = None,
    new: Annotated[bool, typer.Option("--new", help="Only if there is none of this name.")] = False,
) -> None:
    """Make a policy, or change it: it holds for running sandboxes at once. A bad document changes nothing."""
    made = front.client.policies.put(name, text_of(file), tier=tier, template=template, if_match=if_match, only_new=new)
    _tell(front, made)


@with_front
def rm(front: Front, name: Name, platform: Platform = False, if_match: IfMatch = None) -> None:
    """Delete a policy: what it allowed is not allowed any more."""
    front.client.policies.delete(name, tier="platform" if platform else None, if_match=if_match)


@with_front
def show(front: Front, sandbox: SandboxId) -> None:
    """Show all that decides what leaves a sandbox, and how far it holds on its node."""
    from .output import print_fields, print_json, print_table

    found = front.client.policies.of_sandbox(sandbox)
    if front.json:
        print_json(found)
        return
    print_fields({"revision": found.revision, "applied": found.applied_revision, **found.conditions})
    rows = [
        (one["tier"], one["name"], one["version"], len(one["document"].get("rules", ()))) for one in found.documents
    ]
    print_table(("TIER", "POLICY", "VERSION", "RULES"), rows)


@with_front
def why(
    front: Front,
    sandbox: SandboxId,
    host: Annotated[str, typer.Option("--host", help="The name or address that is asked for.", show_default=False)],
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 443,
    method: Annotated[str | None, typer.Option("--method", help="Of a request.", show_default=False)] = None,
    path: Annotated[str, typer.Option("--path", help="Path and query of a request.")] = "/",
) -> None:
    """Say whether something would leave a sandbox now, by which rule, and why not."""
    from .output import print_fields, print_json

    found = front.client.policies.check(sandbox, host, port=port, method=method, path=path)
    if front.json:
        print_json(found)
        return
    print_fields({name: found.get(name) for name in ("action", "reason", "rule", "explanation")})
    for stage in found.get("stages", ()):
        print(f"{stage['stage']}: {stage['action']}, {stage['reason']}")


def text_of(file: Path) -> str:
    """What is in a file, or comes by standard input. Raises `typer.BadParameter`."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="FILE") from None


def given(policy: str | None) -> str | None:
    """What an option `--policy` says: what a file holds, or a name."""
    if policy is not None and (policy == "-" or "/" in policy or Path(policy).is_file()):
        return text_of(Path(policy))
    return policy


def _tell(front: Front, policy: "Policy") -> None:
    from .output import print_json

    if front.json:
        print_json(policy)
    else:
        print(f"{policy.name}  {policy.tier}  version {policy.version}  {policy.etag}")
