"""Projects and tokens as flows: which request, and what the answer means. No I/O."""

import uuid
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from .calls import Listing, compact, either, exchange, segment
from .models import Key, NewKey, Project, Token
from .steps import Flow, Request


def projects() -> Listing[Project]:
    """The projects that the key can see."""
    return Listing("/v1/projects", "projects", Project)


def get_project(name: str) -> Flow[Project]:
    """Asks for one project and what it holds."""
    reply = yield from exchange(Request("GET", f"/v1/projects/{segment(name)}"))
    return either(reply.body, "project", Project)


def create_project(body: Mapping[str, object]) -> Flow[Project]:
    """Makes a project. Not repeated: a second one is told that there is one."""
    reply = yield from exchange(Request("POST", "/v1/projects", json=body, repeatable=False))
    return either(reply.body, "project", Project)


def change_project(name: str, body: Mapping[str, object]) -> Flow[Project]:
    """Changes a project."""
    reply = yield from exchange(Request("PATCH", f"/v1/projects/{segment(name)}", json=body))
    return either(reply.body, "project", Project)


def delete_project(name: str, *, force: bool) -> Flow[bool]:
    """Deletes a project; tells whether it is gone already."""
    query = "?force=true" if force else ""
    reply = yield from exchange(Request("DELETE", f"/v1/projects/{segment(name)}{query}"))
    return reply.status == 204


def keys_of(project: str | None) -> Listing[Key]:
    """The keys of a project, by default the key's own."""
    return Listing("/v1/keys" if project is None else "/v1/keys?" + urlencode({"project": project}), "keys", Key)


def rotate_key(key_id: str, overlap_s: float) -> Flow[NewKey]:
    """Makes a key in the place of another."""
    reply = yield from exchange(
        Request(
            "POST",
            f"/v1/keys/{segment(key_id)}/rotate",
            json=compact(overlap_s=overlap_s),
            headers={"Idempotency-Key": uuid.uuid4().hex},
        )
    )
    return either(reply.body, "key", NewKey)


def tokens_of(sandbox_id: str) -> Listing[Token]:
    """The tokens of a sandbox that are good now."""
    return Listing(f"/v1/sandboxes/{segment(sandbox_id)}/tokens", "tokens", Token)


def revoke_token(token_id: str) -> Flow[None]:
    """Revokes one token."""
    yield from exchange(Request("POST", f"/v1/tokens/{segment(token_id)}/revoke"))


def revoke_tokens(sandbox_id: str) -> Flow[None]:
    """Revokes every token of a sandbox."""
    yield from exchange(Request("DELETE", f"/v1/sandboxes/{segment(sandbox_id)}/tokens"))


def settings(
    require_isolation: str | None,
    templates: Sequence[str] | None,
    quotas: Mapping[str, int] | None,
    caps: Mapping[str, float] | None,
    approvals: Sequence[str] | None = None,
) -> dict[str, object]:
    """Builds the body of a request about a project; what is None is left as it is."""
    return compact(
        require_isolation=require_isolation,
        templates=None if templates is None else list(templates),
        quotas=None if quotas is None else dict(quotas),
        caps=None if caps is None else dict(caps),
        approvals=None if approvals is None else list(approvals),
    )
