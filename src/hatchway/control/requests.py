"""From octets to checked values: bodies, query parameters, headers. Whatever is wrong says which field, and what is allowed."""

import asyncio
import base64
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from hatchway.domain.checking import explain, too_large
from hatchway.domain.errors import HatchwayError, InvalidRequest
from hatchway.domain.ids import is_id
from hatchway.storage.approvals import ApprovalRow
from hatchway.storage.exports import ExportRow
from hatchway.storage.rows import OperationRow, SandboxRow, SessionRow, SnapshotRow

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R", SandboxRow, OperationRow, SessionRow, SnapshotRow, ExportRow, ApprovalRow)

MAX_BODY = 1024 * 1024
MAX_DRAINED = 16 * MAX_BODY
BODY_WITHIN_S = 30.0
MAX_WAIT_S = 60
DEFAULT_LIMIT = 50
MAX_LIMIT = 500


async def read_body(request: Request) -> bytes:
    """Reads the body, however its length is announced. Raises `TooLarge` when it is longer than `MAX_BODY`.

    What is too long is read on, up to `MAX_DRAINED`, and thrown away: a client that is still sending when the connection closes
    would not see the answer.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for part in request.stream():
                size += len(part)
                if size <= MAX_BODY:
                    parts.append(part)
                elif parts:
                    parts.clear()
                if size > MAX_DRAINED:
                    break
    except ClientDisconnect:
        raise InvalidRequest("body_cut_off", "The connection ended in the middle of the body.", "Try again.") from None
    except TimeoutError:
        cause = f"The body did not come within {BODY_WITHIN_S:g} seconds."
        raise InvalidRequest("body_too_slow", cause, "Try again over a faster connection.") from None
    if size > MAX_BODY:
        raise too_large(MAX_BODY)
    return b"".join(parts)


def query(request: Request, kind: type[T], *, prefixes: tuple[str, ...] = ()) -> T:
    """Decodes the query string; parameters that begin with one of `prefixes` are the caller's. A repeated one is a list."""
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(prefixes) and prefixes:
            continue
        if name in values:
            raise InvalidRequest(
                "invalid_field", f"The parameter `{name}` is given twice.", "Give it once.", field=name
            )
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind) from None


def check_id(value: str, what: str, error: type[HatchwayError]) -> str:
    """Raises the error of an unknown thing for what cannot be an id: nothing is there by that name either."""
    if not is_id(value):
        remedy = "Give its id, which is 20 characters of a-z and 0-9; a name is no id. Lists show the ids."
        raise error(f"unknown_{what}", f"There is no {what} {value[:64]!r}.", remedy)
    return value


def prefer_wait(request: Request) -> int | None:
    """Seconds of `Prefer: wait=N` (RFC 7240), at most `MAX_WAIT_S`; None without one, or when it cannot be read: it is a preference."""
    for header in request.headers.getlist("prefer"):
        for part in header.split(","):
            name, _, value = part.split(";")[0].strip().partition("=")
            value = value.strip().strip('"')
            if name.strip().lower() == "wait" and value.isascii() and value.isdigit() and len(value) < 10:
                return min(int(value), MAX_WAIT_S)
    return None


def page(rows: list[R], limit: int, *, ascending: bool = False) -> tuple[list[R], str | None]:
    """Cuts what was read, one row more than `limit`, to one page; returns the cursor of the next, None at the end."""
    if len(rows) <= limit:
        return rows, None
    rows = rows[:limit]
    return rows, encode_cursor(rows[-1].created_at, rows[-1].id, ascending=ascending)


def encode_cursor(created_at: float, row_id: str, *, ascending: bool = False) -> str:
    """A cursor is the place of the last row in the order of the list, and good for that order alone."""
    place = (created_at, row_id, True) if ascending else (created_at, row_id)
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(place)).decode().rstrip("=")


def decode_cursor(cursor: str | None, *, ascending: bool = False) -> tuple[float, str] | None:
    """Raises `InvalidRequest("invalid_cursor")` for what is none of ours, or of the other order."""
    if cursor is None:
        return None
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        if ascending:
            return msgspec.msgpack.decode(raw, type=tuple[float, str, Literal[True]])[:2]
        return msgspec.msgpack.decode(raw, type=tuple[float, str])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidRequest(
            "invalid_cursor",
            "The cursor is none that a list has answered.",
            "Pass `next_cursor` of the previous page.",
            field="cursor",
        ) from None
