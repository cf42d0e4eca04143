"""Archives as flows: which requests, where a broken transfer goes on, and what the answers mean. No I/O."""

import base64
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from .bodies import Body
from .calls import Listing, accepted, carried_out, decode, either, exchange, get_sandbox, get_snapshot, segment
from .errors import BadAnswer, ConnectionFailed, InvalidRequest, OperationFailed, WaitTimeout, from_problem
from .models import Export, Operation, SandboxInfo, Snapshot
from .steps import Emit, Flow, Open, Pause, Read, Reply, Request, Stream

SLOW_S = 20 * 60.0
"""How long a node may take to decrypt what was uploaded."""
SILENT_S = 90.0
ATTEMPTS = 5
"""How often a download that breaks is taken up again without an octet in between."""
POLL_S = 0.5


class _Right(msgspec.Struct):
    id: str
    url: str
    token: str


def secret(passphrase: str | None) -> dict[str, str]:
    """The header that a passphrase is sent as. Raises `InvalidRequest("bad_passphrase")` for an empty one."""
    if passphrase is None:
        return {}
    if not passphrase:
        raise InvalidRequest("bad_passphrase", "The passphrase is empty.", "Give one, or none at all.")
    return {"Hatchway-Passphrase": base64.urlsafe_b64encode(passphrase.encode()).decode().rstrip("=")}


def exports() -> Listing[Export]:
    """The exports of the project."""
    return Listing("/v1/exports", "exports", Export)


def get_export(export_id: str) -> Flow[Export]:
    """Asks for one export."""
    reply = yield from exchange(Request("GET", f"/v1/exports/{segment(export_id)}"))
    return either(reply.body, "export", Export)


def delete_export(export_id: str) -> Flow[None]:
    """Deletes an export."""
    yield from exchange(Request("DELETE", f"/v1/exports/{segment(export_id)}"))


def export_sandbox(sandbox_id: str, *, include_template: bool, timeout_s: float) -> Flow[Export]:
    """Has an archive of a sandbox made, and waits for it."""
    path, headers = f"/v1/sandboxes/{segment(sandbox_id)}/export", {"Idempotency-Key": uuid.uuid4().hex}
    body = {"include_template": include_template}
    _, operation = yield from accepted("POST", path, body, headers, True, timeout_s)
    made = operation.result.get("export", "") if isinstance(operation.result, dict) else ""
    return (yield from get_export(str(made)))


def export_snapshot(snapshot_id: str, *, include_template: bool, timeout_s: float) -> Flow[Export]:
    """Has an archive of a snapshot made, and waits for it."""
    body, path = {"include_template": include_template}, f"/v1/snapshots/{segment(snapshot_id)}/export"
    # Made twice, one of the two is removed after an hour.
    reply = yield from exchange(Request("POST", path, json=body))
    export, left = either(reply.body, "export", Export), timeout_s
    while export.state == "pending":
        if left <= 0:
            raise WaitTimeout(export.id, timeout_s, snapshot_id)
        yield Pause(POLL_S)
        left -= POLL_S
        export = yield from get_export(export.id)
    if export.state != "ready":
        error: Mapping[str, Any] = export.error or {}
        code, cause = str(error.get("code", "export_failed")), str(error.get("cause", "The export failed."))
        raise OperationFailed(code, cause, str(error.get("remedy", "")), operation_id=export.id, sandbox_id=None)
    return export


def content(export: Export, passphrase: str | None, offset: int) -> Stream[bytes]:
    """The octets of an archive from `offset` on; a connection that breaks is taken up where it was."""
    headers, at, left = secret(passphrase), offset, ATTEMPTS
    right: _Right | None = None
    size: int | None = None
    while size is None or at < size:
        try:
            if right is None:
                answer = yield Request("POST", f"/v1/exports/{segment(export.id)}/token")
                right = decode(_checked(answer).body, _Right)
            ranged = {**headers, **({"Range": f"bytes={at}-"} if at else {})}
            reply: Reply = yield Open(Request("GET", right.url, headers=ranged, token=right.token, timeout_s=SILENT_S))
            if reply.status == 401:
                right = None
                raise ConnectionFailed("The token of the download is over.")
            _checked(reply)
            found = _size(reply, at)
            if size not in (None, found):
                raise BadAnswer("bad_answer", "The archive is another one than it was.", "Fetch it again.")
            size = found
            while at < size and (piece := (yield Read())):
                at, left = at + len(piece), ATTEMPTS
                yield Emit(piece)
            if at < size:
                raise ConnectionFailed("The archive was cut off.")
        except ConnectionFailed:
            left -= 1
            if left <= 0:
                raise
            yield Pause(0.2 * 2 ** (ATTEMPTS - left))


def _size(reply: Reply, at: int) -> int:
    try:
        if reply.status == 206:
            return int(reply.headers["content-range"].rsplit("/", 1)[1])
        if at == 0:
            return int(reply.headers["content-length"])
    except (KeyError, ValueError, IndexError):
        pass
    raise BadAnswer("bad_answer", "The answer is another part of the archive than was asked for.", "Fetch it again.")


def _checked(reply: Reply) -> Reply:
    if reply.status >= 400:
        raise from_problem(reply.status, reply.body)
    return reply


def upload(body: Body, passphrase: str | None) -> Flow[str]:
    """Brings an archive to a node; returns the id of the upload. One that breaks is begun anew where the content can be."""
    headers = secret(passphrase)
    for attempt in range(ATTEMPTS):
        right = decode((yield from exchange(Request("POST", "/v1/uploads", repeatable=True))).body, _Right)
        try:
            put = Request("PUT", right.url, content=body, token=right.token, timeout_s=SLOW_S, repeatable=False)
            yield from exchange(put)
        except ConnectionFailed:
            if not body.again or attempt + 1 == ATTEMPTS:
                raise
            continue
        opening = right.url.removesuffix("/content") + "/open"
        yield from exchange(Request("POST", opening, headers=headers, token=right.token, timeout_s=SLOW_S))
        return right.id
    raise AssertionError("the last round returns or raises")


class _Fetched(msgspec.Struct):
    offset: int
    complete: bool = False
    fetching: bool = False
    error: dict[str, Any] | None = None


def fetched(url: str, passphrase: str | None, timeout_s: float) -> Flow[str]:
    """Has a node fetch an archive, and waits for it; returns the id of the upload. A node that was restarted goes on with it."""
    headers, left, upload, again = secret(passphrase), timeout_s, None, ATTEMPTS
    while True:
        body = {"url": url} if upload is None else {"url": url, "upload": upload}
        # Begun twice, one of the two is removed after an hour.
        right = decode((yield from exchange(Request("POST", "/v1/uploads", json=body, repeatable=True))).body, _Right)
        upload, at = right.id, right.url.removesuffix("/content")
        state = _Fetched(0, fetching=True)
        while state.fetching:
            if left <= 0:
                raise WaitTimeout(upload, timeout_s, None)
            yield Pause(POLL_S)
            left -= POLL_S
            state = decode((yield from exchange(Request("GET", at, token=right.token))).body, _Fetched)
        if state.complete:
            yield from exchange(Request("POST", at + "/open", headers=headers, token=right.token, timeout_s=SLOW_S))
            return upload
        again -= 1
        if state.error is not None or again <= 0:
            error = state.error or {}
            code, cause = str(error.get("code", "fetch_failed")), str(error.get("cause", "It was not fetched."))
            raise OperationFailed(code, cause, str(error.get("remedy", "")), operation_id=upload, sandbox_id=None)


def load(
    upload_id: str, body: Mapping[str, object], *, timeout_s: float
) -> Flow[tuple[SandboxInfo | Snapshot, Operation]]:
    """Makes a sandbox of an upload, or a snapshot of a snapshot's."""
    headers, wanted = {"Idempotency-Key": uuid.uuid4().hex}, {"upload": upload_id, **body}
    answer = yield from carried_out("POST", "/v1/imports", wanted, headers, True, timeout_s)
    made: SandboxInfo | Snapshot
    if answer.made == "snapshot":
        made = answer.snapshot or (yield from get_snapshot(answer.operation.target or ""))
    else:
        made = answer.sandbox or (yield from get_sandbox(answer.operation.target or ""))
    return made, answer.operation
