"""/v1/templates: what sandboxes can be made from, as the nodes have it."""

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import requests, views
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.nodes import node_timeout
from hatchway.domain.errors import NotFound
from hatchway.wire.node import Empty, ResolveTemplate, TemplateList, TemplateRelease

NODE_WAIT_S = 3.0
LIST_WITHIN_S = 10.0


class ListTemplates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paging: `cursor` is the one of the previous page."""

    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def list_(call: Call[NoBody]) -> Response:
    """Lists the releases of every connected node, by name and tag."""
    query: ListTemplates = call.query
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    found: dict[tuple[str, str, str], TemplateRelease] = {}
    for link in call.plane.nodes.ready():
        try:
            listed = await link.call("template.list", Empty(), TemplateList, within=LIST_WITHIN_S)
        except TimeoutError:
            raise node_timeout() from None
        for release in listed.templates:
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


async def get(call: Call[NoBody]) -> Response:
    """Shows the release behind a reference."""
    await call.plane.nodes.wait(None, within=NODE_WAIT_S)
    reference = call.path["reference"][:512]
    missing: NotFound | None = None
    for link in call.plane.nodes.ready():
        try:
            release = await link.call(
                "template.resolve", ResolveTemplate(reference=reference), TemplateRelease, within=LIST_WITHIN_S
            )
        except NotFound as error:
            missing = error
        except TimeoutError:
            raise node_timeout() from None
        else:
            return answer(views.TemplateAnswer(template=views.template(release)))
    raise NotFound(
        "unknown_template",
        missing.cause if missing else f"There is no template {reference!r}.",
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
