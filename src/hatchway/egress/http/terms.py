"""What the rule of a verdict says about an HTTP request beyond yes and no, in the form in which HTTP needs it."""

from dataclasses import dataclass
from typing import Any

from hatchway.domain.policy.verdicts import Verdict
from hatchway.egress.http.heads import MAX_HEAD, MAX_LINE

UNBOUNDED = 1 << 62
_MAX_MADE = 256


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a credential goes: `header` into the field `name`, `basic` into `authorization`, `query` into the parameter `name`."""

    where: str
    name: str


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one rule, for requests that get one certain credential or none."""

    client_auth: str = "forbid"
    """`forbid placeholder_only allow`: whether a client may bring its own credentials."""
    slots: tuple[Slot, ...] = ()
    """Where the credential of the request goes."""
    strip: frozenset[str] = frozenset()
    put: tuple[tuple[str, str], ...] = ()
    only: frozenset[str] | None = None
    """Fields of requests that are taken away, set, and alone let through."""
    strip_answer: frozenset[str] = frozenset()
    max_url: int = MAX_LINE
    max_head: int = MAX_HEAD
    max_body: int = UNBOUNDED
    max_answer: int = UNBOUNDED
    """Octets."""
    max_frame: int = 64 * 1024
    text_only: bool = False
    """Of a WebSocket."""


NO_TERMS = Terms()


class TermsBook:
    """The terms of a policy's rules, made once for each: mostly, a verdict's own terms are one object for each rule."""

    def __init__(self) -> None:
        self._policy: Any = None
        self._made: dict[tuple[int, tuple[str, ...]], tuple[object, Terms]] = {}

    def of(self, policy: Any, verdict: Verdict) -> Terms:
        """The terms on which a request passes; plain ones where it does not."""
        source = verdict.terms
        if source is None:
            return NO_TERMS
        if policy is not self._policy:
            self._policy, self._made = policy, {}
        key = id(source), verdict.credentials
        known = self._made.get(key)
        if known is not None:
            return known[1]
        if len(self._made) >= _MAX_MADE:
            self._made.clear()
        made = _make(policy, verdict)
        self._made[key] = source, made  # which keeps it, so that its id is nobody else's
        return made


def _make(policy: Any, verdict: Verdict) -> Terms:
    source = verdict.terms
    assert source is not None
    sent, sizes = source.request_headers, source.max
    slots = [
        Slot(
            injection.where,
            "authorization"
            if injection.where == "basic"
            else injection.name.lower()
            if injection.where == "header"
            else injection.name,
        )
        for credential in verdict.credentials
        for injection in policy.credentials[credential].credential.inject
    ]
    return Terms(
        client_auth=str(source.client_auth),
        slots=tuple(slots),
        strip=frozenset(name.lower() for name in sent.strip),
        put=tuple((name.lower(), value) for name, value in sent.set.items()),
        only=None if sent.allow_only is None else frozenset(name.lower() for name in sent.allow_only),
        strip_answer=frozenset(name.lower() for name in source.response_headers.strip),
        max_url=_least(sizes.url, MAX_LINE),
        max_head=_least(sizes.head, MAX_HEAD),
        max_body=_least(sizes.body, UNBOUNDED),
        max_answer=_least(sizes.response, UNBOUNDED),
        max_frame=source.websocket.max_frame,
        text_only=source.websocket.text_only,
    )


def _least(given: int | None, bound: int) -> int:
    return bound if given is None else min(given, bound)
