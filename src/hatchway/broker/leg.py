"""One leg: requests of a gateway, each checked, given its credential and sent; and what comes back, without the secret.

```
gateway ── head ── check against the grant ── strip ── record ── inject ──▶ upstream
gateway ◀── scrub ── head, body ──────────────────────────────────────────── upstream
```
A redirect is a response like another: it goes back, and nobody here follows it.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from hatchway.broker import auditing, checking, http1, injecting
from hatchway.broker.auditing import AuditSink
from hatchway.broker.checking import Bound, NotBound
from hatchway.broker.config import LegLimits
from hatchway.broker.grants import Grants
from hatchway.broker.http1 import Fields, Malformed, RequestHead, ResponseHead
from hatchway.broker.scrubbing import Forms, Scrubber, scrubbed
from hatchway.broker.side import Lost, Side
from hatchway.broker.sources import Held, Sources
from hatchway.broker.upstream import Upstream
from hatchway.domain import problems
from hatchway.domain.errors import BadGateway, Forbidden, HatchwayError, InvalidRequest, Unavailable
from hatchway.wire.broker import LEG_ERROR, Leg

MAX_INTERIM = 8
_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_LEG_ERROR = LEG_ERROR.encode()
_NOT_BACK = (b"content-length", b"alt-svc", b"alternate-protocol", b"sec-websocket-extensions", _LEG_ERROR)
_PIECEMEAL = (b"range", b"if-range", b"accept-encoding")

log = logging.getLogger(__name__)


class LegSession:
    """The requests of one leg, one after another, over one upstream connection."""

    def __init__(
        self,
        head: Leg,
        gateway: Side,
        upstream: Upstream,
        *,
        grants: Grants,
        sources: Sources,
        audit: AuditSink,
        limits: LegLimits,
    ) -> None:
        self._leg = head
        self._gateway = gateway
        self._upstream = upstream
        self._far = Side(upstream.reader, upstream.writer)
        self._grants = grants
        self._sources = sources
        self._audit = audit
        self._limits = limits

    async def serve(self) -> None:
        """Until either side ends the connection, or a message is one behind which nothing can come. Raises nothing that a peer did."""
        try:
            while await self._next_request():
                if not await self._one():
                    return
        except (Lost, Malformed) as error:
            log.info("a leg of %s ended: %s", self._leg.sandbox_id, error)

    async def _next_request(self) -> bool:
        """Waits for a request. What an upstream sends unasked, which would be taken for the next response, ends the leg, as its end does."""
        asked = asyncio.ensure_future(self._gateway.wait_for_input(self._limits.idle_s))
        unasked = asyncio.ensure_future(self._far.wait_for_input(None))
        try:
            await asyncio.wait({asked, unasked}, return_when=asyncio.FIRST_COMPLETED)
            return asked.done() and not unasked.done() and asked.result()
        finally:
            for task in (asked, unasked):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Lost):
                    await task

    async def _one(self) -> bool:
        """One request and its response; tells whether another may follow."""
        try:
            head = http1.parse_request(await self._gateway.head(http1.MAX_HEAD, self._limits.head_within_s))
        except Malformed as error:
            await self._refuse(InvalidRequest("request_refused", f"The request is refused: {error}."))
            return False
        try:
            bound, held = await self._allowed(head)
            forms = held.forms if bound.binding.scrub else None
            octets = await self._written(head, bound, held)
        except HatchwayError as error:
            await self._refuse(error, head)
            return False
        return await self._exchange(head, octets, forms, bound)

    async def _allowed(self, head: RequestHead) -> tuple[Bound, Held]:
        """The binding and the secret for a request, as of now. Raises `HatchwayError` for one that gets none."""
        try:
            bound = self._grants.find(self._leg)
            if bound is None:
                raise Unavailable(
                    "cred_unavailable",
                    "The broker has no grant for this sandbox now.",
                    "Try again in a moment: its node renews it.",
                )
            checking.request(bound, self._leg, head)
            held = await self._secret(bound)
            if not held.may_go_to(self._leg.host):
                raise NotBound("its source is not for this host")
        except NotBound as error:
            raise Forbidden("cred_not_bound", f"The credential is not for this request: {error}.") from None
        return bound, held

    async def _secret(self, bound: Bound) -> Held:
        source = bound.binding.source
        held = self._sources.current(self._leg.project, source)
        if held is not None:
            return held
        try:
            return await self._sources.held(self._leg.project, source)
        except HatchwayError as error:
            raise Unavailable("cred_unavailable", error.cause, error.remedy) from None

    async def _written(self, head: RequestHead, bound: Bound, held: Held) -> bytes:
        """The head as it goes upstream, recorded before. Raises `HatchwayError`."""
        binding = bound.binding
        target, fields = injecting.stripped(head, binding.inject)
        placeholder = binding.placeholder.encode()
        for name, value in fields:
            if placeholder in value or placeholder in name:
                raise Forbidden("cred_not_bound", f"The placeholder is in the field {name.decode('latin-1')[:64]}.")
        leg = self._leg
        host = leg.host if leg.port == 443 else f"{leg.host}:{leg.port}"
        dropped = (b"host", b"content-length", *(_PIECEMEAL if binding.scrub else ()))
        fields = ((b"host", host.encode()), *(field for field in fields if field[0] not in dropped))
        if binding.scrub:
            # What is compressed, or comes in pieces of the caller's choice, could not be searched.
            fields = (*fields, (b"accept-encoding", b"identity"))
        if head.websocket:
            fields = tuple(field for field in fields if field[0] != b"sec-websocket-extensions")
            fields = (*fields, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
        if head.chunked:
            fields = (*fields, (b"transfer-encoding", b"chunked"))
        elif head.length is not None:
            fields = (*fields, (b"content-length", b"%d" % head.length))
        await self._record(head, held)
        self._require_unchanged(bound, held)
        target, fields = injecting.injected(target, fields, binding.inject, held.secret.reveal())
        if len(target) > 2 * http1.MAX_LINE:
            raise InvalidRequest("request_refused", "The target is too long.")
        return http1.write_request(head.method, target, fields)

    def _require_unchanged(self, bound: Bound, held: Held) -> None:
        """Between the decision and the first octet something was waited for."""
        try:
            unchanged = self._grants.find(self._leg) == bound
        except NotBound:
            unchanged = False
        if not unchanged or self._sources.current(self._leg.project, bound.binding.source) is not held:
            raise Unavailable("cred_unavailable", "The credential has just changed.", "Try again.")

    async def _record(self, head: RequestHead, held: Held) -> None:
        """Nothing is sent before it is durable that it is."""
        path = head.target.partition(b"?")[0].decode("latin-1")[: auditing.MAX_PATH]
        entry = auditing.of_leg(
            "credential.used",
            self._leg,
            "allowed",
            method=head.method.decode("latin-1"),
            path=path,
            query_octets=len(head.target.partition(b"?")[2]),
            source_version=held.version,
            address=self._upstream.address,
            certificate_sha256=self._upstream.certificate_sha256,
        )
        try:
            await self._audit.durable(entry)
        except HatchwayError as error:
            raise Unavailable("audit_unavailable", error.cause, error.remedy) from None

    async def _exchange(self, head: RequestHead, octets: bytes, forms: Forms | None, bound: Bound) -> bool:
        sending = asyncio.ensure_future(self._send(head, octets))
        try:
            try:
                response = await self._response(sending)
                self._check(response, head, forms)
            except (Lost, Malformed) as error:
                code = "upstream_failed" if isinstance(error, Lost) else "response_refused"
                await self._refuse(
                    BadGateway(code, f"{self._leg.host} gave no response that can be passed on: {error}."), head
                )
                return False
            if response.status == 101:
                await self._tunnel(response, forms)
                return False
            await self._pass_on(head, response, forms, bound)
            whole = sending.done() and sending.exception() is None
            return whole and not head.close and not self._ends(head, response)
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Lost, Malformed):
                await sending

    async def _send(self, head: RequestHead, octets: bytes) -> None:
        idle = self._limits.body_idle_s
        await self._far.send(octets, idle)
        async for piece in self._gateway.body(head, idle):
            await self._far.send(b"%x\r\n%s\r\n" % (len(piece), piece) if head.chunked else piece, idle)
        if head.chunked:
            await self._far.send(b"0\r\n\r\n", idle)

    async def _response(self, sending: "asyncio.Future[None]") -> ResponseHead:
        """The response's head, without those that come before. The time for it begins when the request is sent."""
        reading = asyncio.ensure_future(self._far.wait_for_input(None))
        try:
            either: set[asyncio.Future[Any]] = {reading, sending}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not reading.done() and (error := sending.exception()) is not None:
                # A server that refuses a body closes its side; what it says of it may have come all the same.
                await asyncio.wait({reading}, timeout=self._limits.head_within_s)
                if not reading.done():
                    raise error
            await asyncio.wait({reading}, timeout=self._limits.response_within_s)
            if not reading.done():
                raise Lost(f"no response within {self._limits.response_within_s:g} s")
            if not reading.result():
                raise Lost("it ended the connection without one")
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Lost):
                await reading
        for _ in range(MAX_INTERIM):
            octets = await self._far.head(http1.MAX_RESPONSE_HEAD, self._limits.head_within_s)
            response = http1.parse_response(octets)
            if response.status >= 200 or response.status == 101:
                return response
            if not await self._far.wait_for_input(self._limits.response_within_s):
                raise Lost("it ended the connection without a final response")
        raise Malformed(f"more than {MAX_INTERIM} interim responses")

    def _check(self, response: ResponseHead, head: RequestHead, forms: Forms | None) -> None:
        """Raises `Malformed` for a response that cannot be passed on."""
        if response.status == 101:
            self._check_upgrade(response, head)
            return
        if forms is None:
            return
        codings = [value.strip().lower() for name, value in response.fields if name == b"content-encoding"]
        if any(coding not in (b"", b"identity") for coding in codings):
            raise Malformed(
                "it is compressed, though that was not asked for, so that the secret cannot be searched for in it"
            )
        if response.status == 206:
            raise Malformed("it is a part of what was asked for, so that the secret cannot be searched for in it")

    def _check_upgrade(self, response: ResponseHead, head: RequestHead) -> None:
        key = head.get(b"sec-websocket-key")
        if not head.websocket or key is None:
            raise Malformed("it changes the protocol without having been asked")
        accept = base64.b64encode(hashlib.sha1(key + _WEBSOCKET, usedforsecurity=False).digest())
        if response.get(b"sec-websocket-accept") != accept or (response.get(b"upgrade") or b"").lower() != b"websocket":
            raise Malformed("it accepts no WebSocket of ours")
        if response.get(b"sec-websocket-extensions") is not None:
            raise Malformed("it uses extensions that were not asked for")

    def _ends(self, head: RequestHead, response: ResponseHead) -> bool:
        """Whether nothing can come behind a response."""
        unbounded = response.length is None and not response.chunked and http1.has_body(head.method, response.status)
        return response.close or unbounded

    async def _pass_on(self, head: RequestHead, response: ResponseHead, forms: Forms | None, bound: Bound) -> None:
        """Sends a response to the gateway. Raises `Lost` or `Malformed` when it breaks off: then the gateway has to see that, too."""
        ends = self._ends(head, response) or head.close
        fields = self._fields(response, forms, bound)
        body = http1.has_body(head.method, response.status)
        framed = response.length is not None
        if response.length is not None and (body or head.method == b"HEAD"):
            fields = (*fields, (b"content-length", b"%d" % response.length))
        elif body:
            fields = (*fields, (b"transfer-encoding", b"chunked"))
        if ends:
            fields = (*fields, (b"connection", b"close"))
        idle = self._limits.response_idle_s
        await self._gateway.send(http1.write_response(response.status, fields), idle)
        if not body:
            return
        until_end = not framed and not response.chunked
        async for piece in _scrubbed(self._far.body(response, idle, until_end=until_end), forms):
            await self._gateway.send(piece if framed else b"%x\r\n%s\r\n" % (len(piece), piece), idle)
        if until_end and not self._upstream.ended_properly():
            raise Lost("the connection was cut in the middle of a body")
        if not framed:
            await self._gateway.send(b"0\r\n\r\n", idle)

    def _fields(self, response: ResponseHead, forms: Forms | None, bound: Bound) -> Fields:
        dropped = _NOT_BACK if bound.binding.set_cookie else (*_NOT_BACK, b"set-cookie", b"set-cookie2")
        kept = [field for field in response.end_to_end if field[0] not in dropped]
        if forms is None:
            return tuple(kept)
        return tuple((scrubbed(forms, name), scrubbed(forms, value)) for name, value in kept)

    async def _tunnel(self, response: ResponseHead, forms: Forms | None) -> None:
        """A WebSocket: octets in both directions until either side ends."""
        idle = self._limits.websocket_idle_s
        fields = tuple(field for field in response.end_to_end if field[0] not in _NOT_BACK)
        if forms is not None:
            fields = tuple((name, scrubbed(forms, value)) for name, value in fields)
        fields = (*fields, (b"connection", b"Upgrade"), (b"upgrade", b"websocket"))
        await self._gateway.send(http1.write_response(101, fields), idle)

        async def out() -> None:
            async for piece in self._gateway.pieces(idle):
                await self._far.send(piece, idle)

        async def back() -> None:
            async for piece in _scrubbed(self._far.pieces(idle), forms):
                await self._gateway.send(piece, idle)

        both = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Lost):
                    await task

    async def _refuse(self, error: HatchwayError, head: RequestHead | None = None) -> None:
        """Answers what the broker itself says; nothing comes behind it."""
        data = {} if head is None else {"method": head.method.decode("latin-1")}
        with contextlib.suppress(HatchwayError):
            self._audit.record(auditing.of_leg("credential.denied", self._leg, "denied", error.code, **data))
        body = msgspec.json.encode(problems.document(error))
        fields: Fields = (
            (b"content-type", problems.MEDIA_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (_LEG_ERROR, error.code.encode()),
            (b"connection", b"close"),
        )
        empty = head is not None and head.method == b"HEAD"
        await self._gateway.send(http1.write_response(error.status, fields) + (b"" if empty else body), 5.0)


async def _scrubbed(pieces: AsyncIterator[bytes], forms: Forms | None) -> AsyncIterator[bytes]:
    if forms is None:
        async for piece in pieces:
            yield piece
        return
    scrubber = Scrubber(forms)
    async for piece in pieces:
        if clean := scrubber.feed(piece):
            yield clean
    if rest := scrubber.finish():
        yield rest
