"""From a request's head to the decision about it, and to what goes upstream if it may. Pure, but for what the policy answers.

`canonical` makes of a head the one form that is decided on; `prepare` makes of the decision what is sent: the same path, the fields
that may go, without any credential of the client's where the policy does not say that it may bring its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from hatchway.domain import auth_names
from hatchway.domain.errors import Forbidden, HatchwayError, HeadTooLarge, InvalidRequest, Misdirected, TooLarge
from hatchway.domain.policy.paths import PathRefused, canonical_path
from hatchway.domain.policy.verdicts import Action, Request, Verdict
from hatchway.egress.http import fields, placeholders
from hatchway.egress.http.heads import MAX_HEAD, Fields, RequestHead, malformed
from hatchway.egress.http.terms import Terms

_DIVIDED = re.compile("[;?]")
"""What some servers take for `&`."""
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
_REMEDY = "Ask whoever set the policy for a rule that allows it; `hatchway policy explain` shows what would be needed."


@dataclass(slots=True)
class Going:
    """A request that may go, as it goes."""

    request: Request
    verdict: Verdict
    terms: Terms
    target: str
    """The canonical path, and the query."""
    fields: Fields
    credential: str = ""
    """The broker puts it in; empty: no credential."""
    needles: tuple[bytes, ...] = ()
    """What the body may not have, beside placeholders."""

    @property
    def key(self) -> tuple[object, str]:
        """Requests of one key may share a connection to the outside: those on the terms of one rule. The rule that asked about one is no key:
        what is let through by it may go to different places."""
        return self.verdict.terms, self.credential


def canonical(head: RequestHead, host: str, port: int, *, tls: bool) -> Request:
    """The form that is decided on. Raises `Misdirected("authority_mismatch")` and `InvalidRequest`."""
    if head.host is not None and not same_authority(head.host, host, port, tls=tls):
        raise Misdirected(
            "authority_mismatch",
            f"This connection is for {host}, and the request is for {head.host[:253]!r}.",
            "Open a connection to the other host by its own name; each is decided on by itself.",
        )
    raw_path, _, query = head.target.partition("?")
    try:
        path = canonical_path(raw_path)
    except PathRefused as error:
        raise InvalidRequest(
            "path_ambiguous",
            f"The path can be read in more than one way, or is none: {error.cause}.",
            "Send the path in its plain form: no dot segments, no double slashes, nothing escaped that need not be.",
        ) from error
    if query and "%" in query and _BROKEN_ESCAPE.search(query):
        raise malformed("the query has a percent sign that begins no escape")
    return Request(
        host=host,
        port=port,
        tls=tls,
        method=head.method,
        path=path,
        query=query,
        headers=_written(fields.for_upstream(head.fields, nominated=head.nominated), head, host, port, tls=tls),
        websocket=head.upgrade == "websocket" and head.method == "GET",
        version=head.version,
    )


def _written(going: Fields, head: RequestHead, host: str, port: int, *, tls: bool) -> tuple[tuple[str, str], ...]:
    """The fields of a request that are judged: those that go on, and what the gateway itself writes of them for the site."""
    ours = [("host", authority(host, port, tls=tls))]
    if head.upgrade == "websocket" and (offered := fields.offered_protocols(head.fields)):
        ours.append(("sec-websocket-protocol", ", ".join(offered)))
    return (*ours, *going)


def as_sent(going: "Going", head: RequestHead, *, headers_matter: bool) -> Request:
    """The request as it is written upstream, after all that the rule takes away and puts in: this is what has to be let pass.

    Where a credential is put in, the client's own field or parameter stands for it. The same object, where nothing that matters is different.
    """
    if not headers_matter and (going.request.query or "?") in ("?", going.target.partition("?")[2]):
        return going.request
    request, slots = going.request, {slot.name for slot in going.terms.slots if slot.where != "query"}
    kept = [field for field in head.fields if going.credential and auth_names.plain(field[0]) in slots]
    query = going.target.partition("?")[2]
    if going.credential and request.query != query:
        query = request.query if _only_slots_gone(request.query, query, going.terms) else query
    headers = _written([*kept, *going.fields], head, request.host, request.port, tls=request.tls)
    if query == request.query and sorted(headers) == sorted(request.headers):
        return request
    return msgspec.structs.replace(request, headers=headers, query=query)


def _only_slots_gone(before: str, after: str, terms: Terms) -> bool:
    slots = {auth_names.parameter_key(slot.name) for slot in terms.slots if slot.where == "query"}
    kept = [pair for pair in before.split("&") if auth_names.parameter_key(pair.partition("=")[0]) not in slots]
    return "&".join(kept) == after


def same_authority(given: str, host: str, port: int, *, tls: bool) -> bool:
    """Whether `Host` or `:authority` names this host and port: any case, one trailing dot, and the scheme's own port left out or said."""
    if given == host:
        return port == (443 if tls else 80)
    name, colon, number = given.partition(":")
    if colon and number != str(port):
        return False
    if not colon and port != (443 if tls else 80):
        return False
    if not name.isascii():
        return False
    name = name.lower()
    return name.removesuffix(".") == host


def authority(host: str, port: int, *, tls: bool) -> str:
    """What is sent upstream as `Host`."""
    return host if port == (443 if tls else 80) else f"{host}:{port}"


def refused(verdict: Verdict) -> HatchwayError:
    """The error that tells a client about a verdict that is not `allow`."""
    why = verdict.explanation or "Nothing in the policy of this sandbox allows it."
    named = {} if verdict.rule is None else {"rule": verdict.rule.rule, "tier": verdict.rule.tier}
    if verdict.action is Action.ASK:
        return Forbidden(
            "approval_denied",
            f"It needs an approval, which was not given. {why}",
            "Ask the people who approve.",
            **named,
        )
    return Forbidden(verdict.reason, why, _REMEDY, **named)


def other_rule(verdict: Verdict, again: Verdict) -> HatchwayError:
    """The error of a request that falls under another rule once this one took away from it, or put in, what its edits say."""
    named = [str(one.terms.rule) for one in (verdict, again) if one.terms is not None]
    return Forbidden(
        "header_not_allowed",
        f"What the rule that lets it pass makes of its headers falls under another one ({' and then '.join(named)}).",
        "Ask whoever set the policy to bring the two rules into accord.",
    )


def prepare(request: Request, head: RequestHead, verdict: Verdict, terms: Terms, known: Mapping[str, str]) -> Going:
    """What goes upstream of an allowed request; `known`: placeholder → credential, of the whole sandbox.

    Raises `Forbidden` (`client_auth_forbidden placeholder_misplaced method_override cred_ambiguous`), `HeadTooLarge("url_too_long")` and
    `TooLarge("body_too_large")`.
    """
    if len(head.target) > terms.max_url:
        raise HeadTooLarge(
            "url_too_long",
            f"The URL takes more than the {terms.max_url} octets that the rule allows.",
            "Send a shorter one.",
            limit=terms.max_url,
        )
    if terms.max_head < MAX_HEAD and sum(len(name) + len(value) + 4 for name, value in head.fields) > terms.max_head:
        raise HeadTooLarge(
            "head_too_large",
            f"The headers take more than the {terms.max_head} octets that the rule allows.",
            "Send fewer.",
            limit=terms.max_head,
        )
    if head.length is not None:
        check_size(head.length, terms.max_body)
    if len(verdict.credentials) > 1:
        raise Forbidden(
            "cred_ambiguous",
            "The rules give this request more than one credential.",
            "Let each rule name one, or split their paths.",
        )
    credential = verdict.credentials[0] if verdict.credentials else ""
    query = _checked_query(request.query, terms, credential, known)
    if known:
        if found := placeholders.find(known, head.target if not credential else f"{request.path}?{query}"):
            raise placeholders.misplaced(found, "the URL")
        _check_field_placeholders(head.fields, terms, credential, known)
    if (not credential and terms.client_auth != "allow") or (credential and terms.client_auth == "placeholder_only"):
        _check_client_auth(head.fields, credential, known)
    _check_protocols(request, head.fields, terms, credential)
    slots = {slot.name for slot in terms.slots if slot.where != "query"} if credential else set()
    sent = fields.for_upstream(
        head.fields,
        nominated=head.nominated,
        without_auth=bool(credential) or terms.client_auth != "allow",
        strip=terms.strip | slots,
        only=terms.only,
        put=terms.put,
    )
    return Going(
        request,
        verdict,
        terms,
        target=f"{request.path}?{query}" if query else request.path,
        fields=sent,
        credential=credential,
        needles=placeholders.OVERRIDE_NEEDLES if head.length != 0 and _is_form(head.fields) else (),
    )


def _is_form(sent: Fields) -> bool:
    return any(name == "content-type" and value.partition(";")[0].strip().lower() in _FORMS for name, value in sent)


def check_size(length: int, limit: int) -> None:
    """Raises `TooLarge("body_too_large")`."""
    if length > limit:
        raise TooLarge(
            "body_too_large",
            f"The body takes more than the {limit} octets that the rule allows.",
            "Send less.",
            limit=limit,
        )


def _checked_query(query: str, terms: Terms, credential: str, known: Mapping[str, str]) -> str:
    """The query as it goes on: on the way to a credential without what else would tell who asks."""
    if not query:
        return query
    kept = []
    slots = (
        {auth_names.parameter_key(slot.name) for slot in terms.slots if slot.where == "query"} if credential else set()
    )
    for pair in query.split("&"):
        parts = _DIVIDED.split(pair) if ";" in pair or "?" in pair else [pair]
        names = [one.partition("=")[0] for one in parts]
        keys = {auth_names.parameter_key(name) for name in names}
        if "-method" in keys:
            raise placeholders.overridden("the query has a parameter `_method`")
        auth = next((name for name in names if auth_names.parameter_tells(name)), None)
        signed = any(map(auth_names.parameter_signs, names))
        if not slots.isdisjoint(keys) or (credential and (auth is not None or signed)):
            if (found := placeholders.find(known, pair)) and found != credential:
                raise placeholders.misplaced(found, "the URL")
            continue
        if not credential and terms.client_auth != "allow" and auth is not None:
            raise _brought_own(f"the parameter {auth[:64]!r} of the URL")
        kept.append(pair)
    return query if len(kept) == query.count("&") + 1 else "&".join(kept)


def _check_protocols(request: Request, sent: Fields, terms: Terms, credential: str) -> None:
    """Refuses a token in the one field in which browsers can send it for a WebSocket. It cannot be left out: the client goes by what is chosen of it."""
    if not request.websocket or (terms.client_auth == "allow" and not credential):
        return
    if auth_names.protocol_tells(fields.offered_protocols(sent)) is not None:
        raise _brought_own("the header 'sec-websocket-protocol'")


def _check_field_placeholders(sent: Fields, terms: Terms, credential: str, known: Mapping[str, str]) -> None:
    slots = {slot.name for slot in terms.slots if slot.where != "query"}
    for name, value in sent:
        found = placeholders.find_in_field(known, value) or placeholders.find(known, name)
        if found and not (found == credential and (name in slots or auth_names.field_tells(name))):
            raise placeholders.misplaced(found, f"the header {name!r}")


def _check_client_auth(sent: Fields, credential: str, known: Mapping[str, str]) -> None:
    for name, value, cookie in fields.auth_fields(sent):
        if cookie or name == "proxy-authorization":
            continue  # not passed on; refusing them would break clients that only keep what servers set
        if not (credential and placeholders.find_in_field(known, value) == credential):
            raise _brought_own(f"the header {name!r}")


def _brought_own(where: str) -> Forbidden:
    return Forbidden(
        "client_auth_forbidden",
        f"The request brings a credential of its own, in {where}; the policy's rule does not let that pass.",
        "Leave it out. Credentials are bound to rules by the policy, and put in outside the sandbox.",
    )
