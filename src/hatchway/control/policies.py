"""/v1/policies: what may leave sandboxes. A document is taken as a whole or not at all; what it changes holds on the nodes at once.

```
tier       who sets it                 holds for
platform   keys with `installation`    every sandbox of every project
project    keys with `admin`           every sandbox of the project
template   keys with `admin`           the project's sandboxes made from a template
sandbox    keys with `write`           sandboxes that refer to it, or that the document was given with
```
"""

import asyncio
import re
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from hatchway.control import requests, timing, views
from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import NotFound, Unprocessable
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.explaining import Explanation, Question, explain
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import canonical, load
from hatchway.storage import policies, sandboxes
from hatchway.storage.database import Connection
from hatchway.storage.policies import Wanted
from hatchway.storage.rows import PolicyRow, SandboxRow
from hatchway.wire.egress import EgressSpec, PolicyDocument

NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
RESERVED = frozenset({"check", policies.INLINE})
MAX_CREDENTIALS = 64

Tier = Literal["platform", "project", "template", "sandbox"]
DocumentText = Annotated[str, Meta(max_length=512 * 1024, description="The document as YAML or JSON text.")]
Document = DocumentText | dict[str, Any]
TemplateName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._/-]{0,127}$")]
CredentialId = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
Credentials = Annotated[tuple[CredentialId, ...], Meta(max_length=MAX_CREDENTIALS)]


class OwnDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A document that is one sandbox's alone."""

    document: Document


PolicyName = Annotated[
    str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Name of a policy of the tier `sandbox`.")
]


class WithPolicy(timing.Timing, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """And what may leave a sandbox: a policy by its name, or a document; null: what the higher tiers say, and else nothing.

    `credentials` names those that it may use of what its policy binds; null: all of them.
    """

    policy: PolicyName | OwnDocument | UnsetType | None = UNSET
    credentials: Credentials | UnsetType | None = UNSET


class PutPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy: its document, and whom it holds for. `template` names the template of the tier of that name."""

    document: Document
    tier: Tier = "sandbox"
    template: TemplateName | None = None


class ListPolicies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Those of one tier only."""

    tier: Tier | None = None


class NamePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`platform` for a policy of the installation; else it is one of the project."""

    tier: Tier | None = None


class Policy(views.View, frozen=True, kw_only=True):
    """A policy. `document` is in canonical form, and left out of lists; `etag` names this version for `If-Match`."""

    name: str
    tier: str
    project: str | None
    template: str | None
    version: int
    digest: str
    etag: str
    created_at: float
    updated_at: float
    document: dict[str, Any] | None = None


class PolicyAnswer(views.View, frozen=True, kw_only=True):
    """One policy."""

    policy: Policy


class PolicyPage(views.View, frozen=True, kw_only=True):
    """The policies that hold for the project's sandboxes, the highest tier first."""

    policies: tuple[Policy, ...]
    next_cursor: str | None


class EffectiveDocument(views.View, frozen=True, kw_only=True):
    """One of the documents that together decide what leaves a sandbox."""

    tier: str
    name: str
    version: int
    document: dict[str, Any]


class EffectivePolicy(views.View, frozen=True, kw_only=True):
    """All that decides what leaves a sandbox, and how far its node says that it holds."""

    sandbox_id: str
    revision: int
    applied_revision: int
    conditions: dict[str, str]
    credentials: tuple[str, ...] | None
    documents: tuple[EffectiveDocument, ...]


class CheckPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Would this pass, out of this sandbox, as its policy is now? Without `method` only the connection is asked about.

    `document` is asked instead of what the sandbox has of its own tier: what would change.
    """

    sandbox: str
    host: Annotated[str, Meta(min_length=1, max_length=512, description="A name or an address.")]
    port: Annotated[int, Meta(ge=1, le=65535)] = 443
    method: Annotated[str, Meta(pattern=r"^[A-Za-z]{1,32}$")] | None = None
    path: Annotated[str, Meta(max_length=8192, description="Path and query.")] = "/"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = msgspec.field(default_factory=dict)
    websocket: bool = False
    tls: bool | None = None
    document: Document | None = None


class CheckAnswer(views.View, frozen=True, kw_only=True):
    """What would become of it, by which rule, and what would be needed."""

    check: Explanation


class EffectiveAnswer(views.View, frozen=True, kw_only=True):
    """The effective policy of one sandbox."""

    policy: EffectivePolicy


def accepted(document: Document, field: str) -> str:
    """The canonical form of a document. Raises `PolicyError` with all that is wrong with it, each with its place."""
    text = document if isinstance(document, str) else msgspec.json.encode(document).decode()
    try:
        return canonical(load(text, time.time()))
    except PolicyError as error:
        error.extra["field"] = field
        raise


def assignment(body: WithPolicy) -> dict[str, Any]:
    """The columns of a sandbox that a request sets. Raises `PolicyError`."""
    given: dict[str, Any] = {}
    if body.policy is not UNSET:
        given["policy"] = body.policy if isinstance(body.policy, str) else None
        given["policy_document"] = (
            accepted(body.policy.document, "policy.document") if isinstance(body.policy, OwnDocument) else None
        )
    if body.credentials is not UNSET:
        given["credentials"] = None if body.credentials is None else sorted(set(body.credentials))
    return given


async def put(call: Call[PutPolicy]) -> Response:
    """Makes a policy, or changes one, and has it hold for every sandbox that it concerns."""
    body, plane = call.body, call.plane
    name = _name(call)
    if name in RESERVED:
        raise invalid_field("name", f"{name} is no name of a policy.", f"any name but {' and '.join(sorted(RESERVED))}")
    if (body.template is None) == (body.tier == policies.TEMPLATE):
        raise Unprocessable(
            "missing_field" if body.template is None else "invalid_field",
            "`template` belongs to the tier `template`, and to that alone.",
            "Name the template whose sandboxes it is for, or choose another tier.",
            field="template",
        )
    _require_tier(call, body.tier)
    document = accepted(body.document, "document")
    await plane.database.require_room()
    wanted = Wanted(
        project=policies.owner_of(body.tier, call.project),
        name=name,
        tier=body.tier,
        template=body.template,
        document=document,
    )
    only_new = call.request.headers.get("if-none-match", "").strip() == "*"
    row, new = await plane.database.write(policies.put, wanted, _if_match(call), only_new=only_new)
    plane.policies.look()
    return _answer(row, 201 if new else 200)


async def get(call: Call[NoBody]) -> Response:
    """Shows a policy with its document."""
    query: NamePolicy = call.query
    owner = policies.owner_of(query.tier, call.project)
    return _answer(await call.plane.database.read(policies.get, owner, _name(call)))


async def list_(call: Call[NoBody]) -> Response:
    """Lists the policies of the project and of the installation."""
    query: ListPolicies = call.query
    owners = (policies.INSTALLATION, call.project)
    rows = await call.plane.database.read(policies.list_all, owners, query.tier)
    return answer(PolicyPage(policies=tuple(_show(row) for row in rows), next_cursor=None))


async def delete(call: Call[NoBody]) -> Response:
    """Deletes a policy: what it allowed is not allowed any more, and flows that need it are cut."""
    query: NamePolicy = call.query
    owner = policies.owner_of(query.tier, call.project)
    row = await call.plane.database.read(policies.get, owner, _name(call))
    _require_tier(call, row.tier)
    await call.plane.database.write(policies.remove, owner, row.name, _if_match(call) or row.etag)
    call.plane.policies.look()
    return answer(None, 204)


async def of_sandbox(call: Call[NoBody]) -> Response:
    """Shows all that decides what leaves a sandbox."""
    row, spec = await call.plane.database.read(
        _effective, call.project, requests.check_id(call.path["id"], "sandbox", NotFound)
    )
    shown = EffectivePolicy(
        sandbox_id=row.id,
        revision=spec.revision,
        applied_revision=row.policy_applied,
        conditions=row.policy_conditions or {},
        credentials=spec.credentials,
        documents=tuple(
            EffectiveDocument(tier=one.tier, name=one.name, version=one.version, document=msgspec.json.decode(one.text))
            for one in spec.documents
        ),
    )
    return answer(EffectiveAnswer(policy=shown))


async def check(call: Call[CheckPolicy]) -> Response:
    """Says whether something would leave a sandbox, by which rule, with which credential; and why not."""
    body = call.body
    name = requests.check_id(body.sandbox, "sandbox", NotFound)
    _, spec = await call.plane.database.read(_effective, call.project, name)
    documents = list(spec.documents)
    if body.document is not None:
        own = PolicyDocument(
            tier=policies.SANDBOX, name=policies.INLINE, version=0, text=accepted(body.document, "document")
        )
        documents = [*(one for one in documents if one.tier != policies.SANDBOX), own]
    question = Question(
        destination=body.host,
        port=body.port,
        method=None if body.method is None else body.method.upper(),
        target=body.path,
        headers=tuple((name.lower(), value) for name, value in body.headers.items()),
        websocket=body.websocket,
        tls=body.tls,
    )
    return answer(CheckAnswer(check=await asyncio.to_thread(_explain, documents, question)))


def _explain(documents: list[PolicyDocument], question: Question) -> Explanation:
    policy = compile_policy([TieredDocument.stored(one.tier, one.name, one.version, one.text) for one in documents])
    return explain(policy, question, time.time())


def _effective(connection: Connection, project: str, sandbox_id: str) -> tuple[SandboxRow, EgressSpec]:
    row = sandboxes.get_alive(connection, project, sandbox_id)
    return row, policies.effective_of(connection, row)


def _require_tier(call: Call[Any], tier: str) -> None:
    """Who may set what holds for others than his own sandboxes. Raises `Forbidden`."""
    if tier == policies.PLATFORM:
        require_scope(call.key, "installation")
    elif tier != policies.SANDBOX:
        require_scope(call.key, "admin")


def _if_match(call: Call[Any]) -> str | None:
    given = call.request.headers.get("if-match")
    return None if given is None else given.strip().removeprefix("W/").strip('"')


def _name(call: Call[Any]) -> str:
    name = call.path["name"]
    if not re.fullmatch(NAME, name):
        raise NotFound("unknown_policy", f"There is no policy {name[:64]!r}.", f"A name matches {NAME}.")
    return name


def _answer(row: PolicyRow, status: int = 200) -> Response:
    shown = _show(row, document=msgspec.json.decode(row.document))
    return answer(PolicyAnswer(policy=shown), status, {"etag": f'"{row.etag}"'})


def _show(row: PolicyRow, document: dict[str, Any] | None = None) -> Policy:
    return Policy(
        name=row.name,
        tier=row.tier,
        project=row.project or None,
        template=row.template,
        version=row.version,
        digest=row.digest,
        etag=row.etag,
        created_at=row.created_at,
        updated_at=row.updated_at,
        document=document,
    )


_IF_MATCH = {"If-Match": "The ETag of the version that is to be changed; another one is refused (`policy_changed`)."}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/policies/check",
        check,
        "Say whether something would leave a sandbox, by which rule, and why not",
        {200: CheckAnswer},
        "policies",
        body=CheckPolicy,
        errors=(404, 410),
    ),
    Endpoint("GET", "/v1/policies", list_, "List policies", {200: PolicyPage}, "policies", query=ListPolicies),
    Endpoint(
        "GET",
        "/v1/policies/{name}",
        get,
        "Show a policy",
        {200: PolicyAnswer},
        "policies",
        query=NamePolicy,
        errors=(404,),
    ),
    Endpoint(
        "PUT",
        "/v1/policies/{name}",
        put,
        "Make a policy, or change one; a bad document is refused as a whole and changes nothing",
        {200: PolicyAnswer, 201: PolicyAnswer},
        "policies",
        scope="write",
        body=PutPolicy,
        errors=(404, 409),
        headers={**_IF_MATCH, "If-None-Match": "`*`: only where there is no policy of that name."},
    ),
    Endpoint(
        "DELETE",
        "/v1/policies/{name}",
        delete,
        "Delete a policy that no sandbox refers to",
        {204: None},
        "policies",
        scope="write",
        body=NoBody,
        query=NamePolicy,
        errors=(404, 409),
        headers=_IF_MATCH,
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}/policy",
        of_sandbox,
        "Show all that decides what leaves a sandbox, and how far it holds",
        {200: EffectiveAnswer},
        "policies",
        errors=(404, 410),
    ),
)
