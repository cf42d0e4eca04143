"""/v1/templates: what sandboxes can be made from, as the nodes have it."""

import asyncio
import logging
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.nodes import NodeLink, node_timeout
from hatchway.domain.errors import HatchwayError, NotFound, Unavailable
from hatchway.domain.quotas import template_allowed
from hatchway.storage import projects
from hatchway.wire.node import Empty, ResolveTemplate, TemplateList, TemplateRelease

log = logging.getLogger(__name__)

NODE_WAIT_S = 3.0
LIST_WITHIN_S = 10.0


class ListTemplates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paging: `cursor` is the one of the previous page."""

    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def list_(call: Call[NoBody]) -> Response:
    """Lists the releases of every connected node that the project may use, by name and tag."""
    query: ListTemplates = call.query
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    found: dict[tuple[str, str, str], TemplateRelease] = {}
    allowed = (await call.plane.database.read(projects.get, call.project)).templates
    answers = await asyncio.gather(*(_releases(link) for link in call.plane.nodes.ready()))
    if answers and all(listed is None for listed in answers):
        raise node_timeout()
    for listed in answers:
        for release in listed or ():
            if template_allowed(allowed, name=release.name, tag=release.tag, digest=release.digest):
                found[release.name, release.tag, release.digest] = release
    ordered = sorted(found)
    after = requests.decode_cursor(query.cursor)
    if after is not None:
        ordered = [place for place in ordered if "\0".join(place) > after[1]]
    page = ordered[: query.limit]
    cursor = requests.encode_cursor(0.0, "\0".join(page[-1])) if len(ordered) > len(page) else None
    return answer(
        views.TemplatePage(templates=tuple(views.template(found[place]) for place in page), next_cursor=cursor)
    )


async def _releases(link: NodeLink) -> tuple[TemplateRelease, ...] | None:
    """What one node has; None from one that does not answer, which hides nothing of the others'."""
    try:
        return (await link.call("template.list", Empty(), TemplateList, within=LIST_WITHIN_S)).templates
    except (HatchwayError, TimeoutError) as error:
        log.warning("the templates of node %s are not known now: %r", link.node_id, error)
        return None


async def get(call: Call[NoBody]) -> Response:
    """Shows the release behind a reference."""
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    reference = call.path["reference"][:512]
    allowed = (await call.plane.database.read(projects.get, call.project)).templates
    silent = False
    for link in call.plane.nodes.ready():
        try:
            release = await link.call(
                "template.resolve", ResolveTemplate(reference=reference), TemplateRelease, within=LIST_WITHIN_S
            )
        except NotFound:
            continue
        except (Unavailable, TimeoutError):
            silent = True  # another node may have it
            continue
        if template_allowed(allowed, name=release.name, tag=release.tag, digest=release.digest):
            return answer(views.TemplateAnswer(template=views.template(release)))
    if silent:
        raise node_timeout()
    raise NotFound(
        "unknown_template",
        f"There is no template {reference!r} that the project may use.",
        "GET /v1/templates lists those that there are.",
    )


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/templates",
        list_,
        "List templates",
        {200: views.TemplatePage},
        "templates",
        query=ListTemplates,
        errors=(503,),
    ),
    Endpoint(
        "GET",
        "/v1/templates/{reference}",
        get,
        "Show the release behind a reference",
        {200: views.TemplateAnswer},
        "templates",
        errors=(404, 503),
    ),
)
