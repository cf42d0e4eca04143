"""What happened, and what waits for consent, as flows: which requests, where a broken transfer goes on, and what the answers mean. No I/O."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

import msgspec

from .calls import Listing, compact, decode, either, exchange, segment
from .errors import BadAnswer, ConnectionFailed, Unavailable
from .models import Approval, AuditHead, AuditRecord
from .sse import Parser
from .steps import Emit, Flow, Open, Read, Reply, Request, Stream
from .streams import Patience, raise_for

SILENCE_S = 45.0
MAX_LINE = 1024 * 1024


def filters(
    project: str | None,
    sandbox: str | None,
    kinds: Sequence[str],
    decision: str | None,
    since: float | None,
    until: float | None,
) -> dict[str, str]:
    """The parameters of a question about the journal."""
    given = {
        "project": project,
        "sandbox": sandbox,
        "kind": ",".join(kinds) or None,
        "decision": decision,
        "since": None if since is None else repr(float(since)),
        "until": None if until is None else repr(float(until)),
    }
    return {name: value for name, value in given.items() if value is not None}


def records(wanted: Mapping[str, str], *, newest: bool) -> Listing[AuditRecord]:
    """The records that pass the filters."""
    more = {"newest": "true"} if newest else {}
    return Listing("/v1/audit", "records", AuditRecord, {**wanted, **more, "limit": "200"})


def audit_head() -> Flow[AuditHead]:
    """Asks where the journal is."""
    reply = yield from exchange(Request("GET", "/v1/audit/head"))
    return decode(reply.body, AuditHead)


def lines(wanted: Mapping[str, str], after: int) -> Stream[bytes]:
    """Every line that passes the filters, as the journal has it; goes on behind the last whole one after a lost connection."""
    patience = Patience("The export", "Go on behind the last record when the service is back.")
    while True:
        try:
            path = "/v1/audit?" + urlencode({**wanted, "after": after})
            reply: Reply = yield Open(
                Request("GET", path, headers={"Accept": "application/x-ndjson"}, timeout_s=SILENCE_S)
            )
            raise_for(reply)
            rest = b""
            while True:
                piece: bytes = yield Read()
                if not piece:
                    if rest:
                        raise ConnectionFailed("The export was cut off.")
                    return
                *whole, rest = (rest + piece).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise BadAnswer("bad_answer", "A line of the export has no end.", "Check the URL.")
                for line in whole:
                    after = decode(line, _Place).sequence
                    yield Emit(line + b"\n")
                if whole:
                    patience.progress()
        except (ConnectionFailed, Unavailable) as error:
            yield patience.next_pause(error.cause)


def follow(wanted: Mapping[str, str], after: int | None) -> Stream[AuditRecord]:
    """What is recorded, for as long as the caller iterates; goes on by itself after a lost connection."""
    patience = Patience("The stream of records", "Go on behind the last record when the service is back.")
    if after is None:
        after = (yield from audit_head()).sequence
    while True:
        try:
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
            path = "/v1/audit" + ("?" + urlencode(wanted) if wanted else "")
            reply: Reply = yield Open(Request("GET", path, headers=headers, timeout_s=SILENCE_S))
            raise_for(reply)
            parser = Parser()
            while True:
                piece: bytes = yield Read()
                if not piece:
                    raise ConnectionFailed("The stream ended.")
                for event in parser.feed(piece):
                    patience.progress()
                    record = decode(event.data, AuditRecord)
                    after = record.sequence
                    yield Emit(record)
        except (ConnectionFailed, Unavailable) as error:
            yield patience.next_pause(error.cause)


def approvals(states: Sequence[str], sandbox: str | None) -> Listing[Approval]:
    """The approvals of the project that pass the filters."""
    given = {"state": ",".join(states) or None, "sandbox": sandbox}
    return Listing(
        "/v1/approvals", "approvals", Approval, {n: value for n, value in given.items() if value is not None}
    )


def get_approval(approval_id: str) -> Flow[Approval]:
    """Asks for one approval."""
    reply = yield from exchange(Request("GET", f"/v1/approvals/{segment(approval_id)}"))
    return either(reply.body, "approval", Approval)


def answer_approval(approval_id: str, decision: str, scope: str, ttl_s: float | None, note: str) -> Flow[Approval]:
    """Decides; the same answer twice is one."""
    body = compact(decision=decision, scope=scope, ttl_s=ttl_s, note=note)
    reply = yield from exchange(Request("POST", f"/v1/approvals/{segment(approval_id)}/answer", json=body))
    return either(reply.body, "approval", Approval)


class _Place(msgspec.Struct):
    sequence: int
