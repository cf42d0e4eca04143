"""The terms on which something passes, within those of a ceiling's rule that admits it."""

from collections.abc import Sequence

import msgspec

from hatchway.domain.policy.addresses import Network
from hatchway.domain.policy.schema import ClientAuth, RequestHeaders, ResponseHeaders, Sizes
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Protocol, TlsMode

_LENIENCE = (ClientAuth.FORBID, ClientAuth.PLACEHOLDER_ONLY, ClientAuth.ALLOW)


class Beyond(msgspec.Struct, frozen=True):
    """What of a rule's terms a ceiling does not admit: the place in the rule."""

    key: str


def narrowed(terms: Terms, bound: Terms, *, vouched: bool) -> Terms | Beyond:
    """The terms that hold beneath a ceiling's rule with the terms `bound`. `vouched`: see `elsewhere`."""
    keys = terms.upstream_spki
    if bound.upstream_spki:
        keys = tuple(key for key in keys if key in bound.upstream_spki) if keys else bound.upstream_spki
        if not keys:
            return Beyond("tls.upstream_spki")
    websocket = terms.websocket
    if terms.protocol is bound.protocol is Protocol.WEBSOCKET:
        websocket = msgspec.structs.replace(
            websocket,
            max_frame=min(websocket.max_frame, bound.websocket.max_frame),
            text_only=websocket.text_only or bound.websocket.text_only,
        )
    looked_into = bound.protocol in HTTP_FAMILY
    intercepted = bound.tls is TlsMode.INTERCEPT
    return msgspec.structs.replace(
        terms,
        tls_min=max(terms.tls_min, bound.tls_min) if intercepted else terms.tls_min,
        upstream_ca=terms.upstream_ca or bound.upstream_ca,
        upstream_spki=keys,
        sni=terms.sni if bound.sni == "optional" else "required",
        private=terms.private if vouched else _within(terms.private, bound.private),
        pin=terms.pin or bound.pin,
        within=(*terms.within, *bound.within),
        request_headers=_sent(terms.request_headers, bound.request_headers),
        response_headers=_answered(terms.response_headers, bound.response_headers),
        max=_least(terms.max, bound.max),
        websocket=websocket,
        client_auth=_strictest(terms.client_auth, bound.client_auth) if looked_into else terms.client_auth,
        route=terms.route if terms.route.via != "direct" else bound.route,
        expires=min((end for end in (terms.expires, bound.expires) if end is not None), default=None),
        under=(*terms.under, bound),
    )


def counted(terms: Terms, bound: Terms) -> Terms:
    """The terms of a connection whose requests are each looked at: the ceiling's rule counts it, and the rest is said for each request."""
    return msgspec.structs.replace(terms, under=(*terms.under, bound))


def elsewhere(terms: Terms, bound: Terms) -> str:
    """By which key a rule's own terms would lead to another place than those of the ceiling's rule; empty: by none.

    A rule that stands at the ceiling's tier or above may do so: it is vouched for. Below, whoever writes a document would put a host of
    theirs in the place of the one that the ceiling names.
    """
    if not set(terms.pin) <= set(bound.pin):
        return "resolve.pin"
    if not set(terms.upstream_ca) <= set(bound.upstream_ca):
        return "tls.upstream_ca"
    if terms.route.via not in ("direct", bound.route.via):
        return "route.via"
    return ""


def _within(networks: Sequence[Network], others: Sequence[Network]) -> tuple[Network, ...]:
    return tuple(part for one in networks for other in others for part in common(one, other))


def common(one: Network, other: Network) -> tuple[Network, ...]:
    """The smaller of two networks, if it is in the larger."""
    if one.version != other.version or not one.overlaps(other):
        return ()
    return (one if one.prefixlen >= other.prefixlen else other,)


def _sent(own: RequestHeaders, bound: RequestHeaders) -> RequestHeaders:
    only = own.allow_only
    if bound.allow_only is not None:
        only = bound.allow_only if only is None else tuple(name for name in only if name in bound.allow_only)
    put = {
        name: value
        for name, value in own.set.items()
        if name not in bound.strip and (bound.allow_only is None or name in bound.allow_only)
    }
    return RequestHeaders(
        strip=tuple(dict.fromkeys((*own.strip, *bound.strip))), set={**put, **bound.set}, allow_only=only
    )


def _answered(own: ResponseHeaders, bound: ResponseHeaders) -> ResponseHeaders:
    return ResponseHeaders(strip=tuple(dict.fromkeys((*own.strip, *bound.strip))))


def _least(own: Sizes, bound: Sizes) -> Sizes:
    def least(one: int | None, other: int | None) -> int | None:
        return min((size for size in (one, other) if size is not None), default=None)

    return Sizes(
        url=least(own.url, bound.url),
        head=least(own.head, bound.head),
        body=least(own.body, bound.body),
        response=least(own.response, bound.response),
    )


def _strictest(own: ClientAuth, bound: ClientAuth) -> ClientAuth:
    """A client's own credentials pass where both say so; what the ceiling says of placeholders is a matter of who binds credentials."""
    return min(own, bound, key=_LENIENCE.index) if own is ClientAuth.ALLOW else own
