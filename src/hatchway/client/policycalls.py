"""Policies as flows: which request, and what the answer means. No I/O."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from .calls import Listing, compact, either, exchange, segment
from .models import EffectivePolicy, Policy
from .steps import Flow, Request

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def policies(tier: str | None) -> Listing[Policy]:
    """The policies that hold for the project's sandboxes."""
    return Listing("/v1/policies" + _query(tier), "policies", Policy)


def get_policy(name: str, tier: str | None) -> Flow[Policy]:
    """Asks for one policy with its document."""
    reply = yield from exchange(Request("GET", f"/v1/policies/{segment(name)}{_query(tier)}"))
    return either(reply.body, "policy", Policy)


def put_policy(
    name: str, document: object, *, tier: str, template: str | None, if_match: str | None, only_new: bool
) -> Flow[Policy]:
    """Makes a policy, or changes it."""
    body = compact(document=document, tier=tier, template=template)
    headers = _if_match(if_match)
    if only_new:
        headers["If-None-Match"] = "*"
    reply = yield from exchange(Request("PUT", f"/v1/policies/{segment(name)}", json=body, headers=headers))
    return either(reply.body, "policy", Policy)


def delete_policy(name: str, tier: str | None, if_match: str | None) -> Flow[None]:
    """Deletes a policy."""
    path = f"/v1/policies/{segment(name)}{_query(tier)}"
    yield from exchange(Request("DELETE", path, headers=_if_match(if_match)))


def effective_policy(sandbox_id: str) -> Flow[EffectivePolicy]:
    """Asks for all that decides what leaves a sandbox."""
    reply = yield from exchange(Request("GET", f"/v1/sandboxes/{segment(sandbox_id)}/policy"))
    return either(reply.body, "policy", EffectivePolicy)


def check_policy(body: Mapping[str, object]) -> Flow[dict[str, Any]]:
    """Asks whether something would leave a sandbox."""
    reply = yield from exchange(Request("POST", "/v1/policies/check", json=body))
    return either(reply.body, "check", dict[str, Any])


def of_sandbox(policy: object) -> object:
    """What a request says of a sandbox's policy: a name stays one; a document, as text or as an object, is the sandbox's own."""
    if isinstance(policy, Mapping):
        return {"document": dict(policy)}
    if isinstance(policy, str) and not _NAME.fullmatch(policy):
        return {"document": policy}
    return policy


def _query(tier: str | None) -> str:
    return "" if tier is None else "?" + urlencode({"tier": tier})


def _if_match(etag: str | None) -> dict[str, str]:
    return {} if etag is None else {"If-Match": f'"{etag}"'}
