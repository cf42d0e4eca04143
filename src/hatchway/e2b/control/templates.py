"""Templates: what an id may name, and what there is. `base` is `seed:latest`; snapshots are templates there."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from hatchway.client import errors as ours
from hatchway.domain.ids import is_id
from hatchway.domain.shapes import Shape
from hatchway.e2b.control import views
from hatchway.e2b.control.calls import Call, answer, nothing
from hatchway.e2b.control.views import TAG
from hatchway.e2b.errors import E2bError
from hatchway.e2b.version import ENVD_VERSION

if TYPE_CHECKING:
    from hatchway.client.models import Snapshot, Template

ALIASES = {"base": "seed"}
"""Names that SDKs take for granted: E2B's, and ours."""
LATEST = "latest"
LIMIT = 500

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Absent(Exception):
    """There is no such template, or it is gone."""


@dataclass(frozen=True)
class Found:
    """What a sandbox can be made from: how the id is shown, the template's name there, and what API v1 is given."""

    shown: str
    alias: str | None
    given: dict[str, str]


@dataclass(frozen=True)
class Source:
    """One thing that an id may name."""

    snapshot_id: str | None = None
    snapshot_name: str | None = None
    template: Found = field(default_factory=lambda: Found("", None, {}))

    async def find(self, call: Call) -> Found | None:
        """What it is; None where it is known already that it is not there."""
        if self.snapshot_id is not None:
            return Found(views.snapshot_id(self.snapshot_id), None, {"snapshot": self.snapshot_id})
        if self.snapshot_name is not None:
            newest = await named_snapshots(call, self.snapshot_name, limit=1)
            if not newest:
                return None
            return Found(views.snapshot_id(newest[0].id), self.snapshot_name, {"snapshot": newest[0].id})
        return self.template


def sources(template_id: str) -> Iterator[Source]:
    """What an id may name, in the order in which it is looked for: a snapshot by its id, a template, a snapshot by its name."""
    name, _, tag = template_id.partition(":")
    plain = tag in ("", TAG)
    if plain and is_id(name):
        yield Source(snapshot_id=name)
    ours_name, shown = ALIASES.get(name, name), canonical(name)
    reference = f"{ours_name}:{LATEST}" if plain and name in ALIASES else ours_name if plain else f"{ours_name}:{tag}"
    yield Source(template=Found(shown, shown, {"template": reference}))
    if plain and _NAME.fullmatch(name):
        yield Source(snapshot_name=name)


def canonical(name: str) -> str:
    """The one of a template's names that it is shown under."""
    return next((there for there, here in ALIASES.items() if here == name), name)


async def named_snapshots(call: Call, name: str, *, limit: int = LIMIT) -> "list[Snapshot]":
    """The snapshots of a name that can be used, newest first."""
    from hatchway.client.calls import Listing
    from hatchway.client.models import Snapshot

    filters = {"name": name, "state": "ready", "limit": str(limit)}
    return list((await call.run(Listing("/v1/snapshots", "snapshots", Snapshot, filters).page(None))).items)


async def list_(call: Call) -> Response:
    """GET /templates and /v2/templates."""
    return answer([_show(name, releases) for name, releases in (await _by_name(call)).items()])


async def get(call: Call) -> Response:
    """GET /templates/{id}."""
    name, releases = await _releases(call, call.path["template"])
    builds = [
        {
            "buildID": views.build_id(release),
            "status": "ready",
            "createdAt": views.time(release.created_at or 0.0),
            "updatedAt": views.time(release.created_at or 0.0),
            "finishedAt": views.time(release.created_at or 0.0),
            "cpuCount": Shape().vcpus,
            "memoryMB": Shape().memory_mib,
            "diskSizeMB": Shape().disk_mib,
            "envdVersion": ENVD_VERSION,
        }
        for release in releases
    ]
    return answer({**_show(name, releases), "builds": builds})


async def alias(call: Call) -> Response:
    """GET /templates/aliases/{alias}: whether a name is taken."""
    name, _, tag = call.path["alias"].partition(":")
    if tag in ("", TAG) and (kept := await named_snapshots(call, name, limit=1) if _NAME.fullmatch(name) else []):
        return answer({"templateID": kept[0].id, "public": False})
    found, _ = await _releases(call, name)
    return answer({"templateID": _names(found)[0], "public": True})


async def tags(call: Call) -> Response:
    """GET /templates/{id}/tags."""
    _, releases = await _releases(call, call.path["template"])
    return answer(
        [
            {"tag": release.tag, "buildID": views.build_id(release), "createdAt": views.time(release.created_at or 0.0)}
            for release in releases
        ]
    )


async def delete(call: Call) -> Response:
    """DELETE /templates/{id}: a snapshot, by its id or all of a name. Templates are the operator's."""
    from hatchway.client import calls

    template_id = call.path["template"]
    name, _, tag = template_id.partition(":")
    if tag not in ("", TAG):
        raise unknown(template_id)
    wanted = [name] if is_id(name) else []
    if not wanted and _NAME.fullmatch(name):
        wanted = [kept.id for kept in await named_snapshots(call, name)]
    gone = 0
    for snapshot_id in wanted:
        try:
            if (await call.run(calls.get_snapshot(snapshot_id))).state in ("deleted", "deleting"):
                continue
            await call.run(calls.delete_snapshot(snapshot_id))
        except (ours.NotFound, ours.Gone):
            continue
        gone += 1
    if not gone:
        try:
            await _releases(call, template_id)
        except E2bError:
            raise unknown(template_id) from None
        raise E2bError(403, f"The template {template_id!r} is the installation's, and deleted by its operator alone.")
    return nothing()


def unknown(template_id: str) -> E2bError:
    """404."""
    return E2bError(404, f"Template {template_id[:200]!r} was not found.")


def unsupported(what: str, instead: str) -> E2bError:
    """501. `what` is the beginning of a sentence, `instead` says what does the same here."""
    return E2bError(501, f"{what} not supported here. {instead}", retry=False)


async def _by_name(call: Call) -> "dict[str, list[Template]]":
    from hatchway.client import calls
    from hatchway.client.calls import Listing

    listing = calls.templates()
    listing = Listing(listing.path, listing.member, listing.kind, {"limit": str(LIMIT)})
    found: dict[str, list[Template]] = {}
    cursor: str | None = None
    while True:
        page = await call.run(listing.page(cursor))
        for release in page.items:
            found.setdefault(release.name, []).append(release)
        cursor = page.cursor
        if cursor is None:
            return found


async def _releases(call: Call, template_id: str) -> "tuple[str, list[Template]]":
    """A template and its releases. Raises `E2bError` 404."""
    name = template_id.partition(":")[0]
    name = ALIASES.get(name, name)
    releases = (await _by_name(call)).get(name)
    if not releases:
        raise unknown(template_id)
    return name, releases


def _names(name: str) -> list[str]:
    """All names of a template, the one that it is shown under first."""
    return list(dict.fromkeys((canonical(name), name)))


def _show(name: str, releases: "list[Template]") -> dict[str, Any]:
    usual = Shape()
    return views.template(_names(name), releases, (usual.vcpus, usual.memory_mib, usual.disk_mib))
