"""Command sessions: the right to start one process in a sandbox and to follow it, on the node, at `attach_url`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import idempotency, requests, views
from hatchway.control.auth import require_scope
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.control.fields import check_env, check_metadata, metadata_filters
from hatchway.control.nodes import LOST_CODES, NodeLink, node_timeout
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import Gone, HatchwayError, NotFound, Unavailable
from hatchway.storage import sandboxes, sessions
from hatchway.storage.idempotency import Answered
from hatchway.storage.rows import SandboxRow, SessionRow
from hatchway.wire.node import (
    Empty,
    SandboxSessions,
    SessionLimits,
    SessionList,
    SessionRef,
    SessionSpec,
    SessionStatus,
    TerminalSize,
)

NODE_WAIT_S = 3.0
CREATE_WITHIN_S = 15.0
GET_WITHIN_S = 5.0
MAX_ARGUMENTS = 512
MAX_ARGUMENT_OCTETS = 256 * 1024
MAX_ENV = 384
MAX_ENV_OCTETS = 256 * 1024
MAX_METADATA_OCTETS = 8 * 1024
"""Arguments and environment together stay below what the guest channel carries for one process: 1,024 entries, 1 MiB."""
DEFAULT_USER = "user"
HOMES = {"user": "/home/user", "root": "/root"}
SHELL = ("/bin/bash", "-lc")

Seconds = Annotated[float, Meta(gt=0, le=30 * 24 * 3600.0)]
Flag = Literal["0", "1"]
STATES = ("created", "running", "exited", "ended", "lost")


class Terminal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a pseudo terminal."""

    rows: Annotated[int, Meta(ge=1, le=1000)] = 24
    cols: Annotated[int, Meta(ge=1, le=1000)] = 80


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process and its children may use; what is not given is bounded so that others in the sandbox go on working.

    `memory_mib` and `processes` hold for all of them together, `cpu_s` is their CPU time, `open_files` and `file_size_mib` (the
    largest file that is written) hold for each.
    """

    memory_mib: Annotated[int, Meta(ge=4, le=1_048_576)] | None = None
    cpu_s: Seconds | None = None
    open_files: Annotated[int, Meta(ge=16, le=1_048_576)] | None = None
    processes: Annotated[int, Meta(ge=1, le=4_194_304)] | None = None
    file_size_mib: Annotated[int, Meta(ge=0, le=1_048_576)] | None = None


class CreateSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command: `argv` as it is, or `command`, which `/bin/bash -lc` runs. The process starts when somebody attaches."""

    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_ARGUMENTS)] | None = None
    command: Annotated[str, Meta(min_length=1, max_length=MAX_ARGUMENT_OCTETS)] | None = None
    env: dict[str, str] = {}
    cwd: Annotated[str, Meta(pattern=r"^/[^\x00]{0,4095}$")] | None = None
    user: Annotated[str, Meta(pattern=r"^([a-z_][a-z0-9_-]{0,31}|[0-9]{1,10})$")] = DEFAULT_USER
    pty: Terminal | None = None
    stdin: bool = True
    timeout_s: Seconds | None = None
    timeout_scope: Literal["tree", "leader"] = "tree"
    linger_s: Annotated[float, Meta(ge=0, le=30 * 24 * 3600.0)] | None = None
    limits: Limits | None = None
    retain_s: Annotated[float, Meta(ge=0, le=7 * 24 * 3600.0)] = 3600.0
    metadata: dict[str, str] = {}


class ListSessions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters and paging; also `metadata.KEY=VALUE`, any number of them."""

    state: Annotated[str, Meta(description="One state, or several with commas between them.")] | None = None
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    live: Annotated[Flag, Meta(description="1: as the node knows them now, where it can be asked.")] = "0"
    env: Annotated[Flag, Meta(description="1: shows the environment too; for keys with the scope `exec`.")] = "0"
    limit: Annotated[int, Meta(ge=1, le=requests.MAX_LIMIT)] = requests.DEFAULT_LIMIT
    cursor: str | None = None


async def create(call: Call[CreateSession]) -> Response:
    """Makes a session: stored, then recorded by the node, then answered."""
    wanted = _spec(call.body)
    await call.plane.database.require_room()
    sandbox, row = await call.plane.database.write(
        sessions.create, call.project, _id(call, "sandbox"), wanted, call.idempotency
    )
    return await _tell_node(call, sandbox, row, {})


async def repeat(call: Call[CreateSession], earlier: Answered) -> Response:
    """The node may not have heard of the first request: it is told again, which changes nothing where it has."""
    database = call.plane.database
    row = await database.read(sessions.get, call.project, str(earlier.answer["session"]))
    sandbox = await database.read(sandboxes.get_alive, call.project, row.sandbox_id)
    return await _tell_node(call, sandbox, row, idempotency.REPLAYED)


async def _tell_node(
    call: Call[CreateSession], sandbox: SandboxRow, row: SessionRow, headers: dict[str, str]
) -> Response:
    plane = call.plane
    spec = msgspec.convert(row.spec, SessionSpec)
    try:
        link = await plane.nodes.wait(sandbox.node_id, within=NODE_WAIT_S)
        try:
            status = await link.call("session.create", spec, SessionStatus, within=CREATE_WITHIN_S)
        except Unavailable as error:
            if error.code not in LOST_CODES:
                raise
            # Once more, on the connection to the node that took its place.
            link = await plane.nodes.wait(sandbox.node_id, within=NODE_WAIT_S)
            status = await link.call("session.create", spec, SessionStatus, within=CREATE_WITHIN_S)
    except (HatchwayError, TimeoutError) as error:
        if call.idempotency is None:
            await plane.database.write(sessions.close, row.id, "lost")
        if isinstance(error, TimeoutError):
            raise node_timeout() from None
        raise
    return answer(_opened(call, sandbox, row, status, link), 201, headers)


async def list_(call: Call[NoBody]) -> Response:
    """Lists the sessions of a sandbox. With `live` a page may have fewer than `limit` although there is a next one."""
    query: ListSessions = call.query
    states = tuple(filter(None, (query.state or "").split(",")))
    for state in states:
        if state not in STATES:
            raise invalid_field("state", f"there is no state {state[:64]!r}.", list(STATES))
    live, env = query.live == "1", query.env == "1"
    if env:
        require_scope(call.key, "exec")
    sandbox = await call.plane.database.read(sandboxes.get, call.project, _id(call, "sandbox"))
    wanted = sessions.Wanted(
        states=states, pid=query.pid, metadata=metadata_filters(call.request), may_have_changed=live
    )
    rows = await call.plane.database.read(
        sessions.list_page,
        call.project,
        sandbox.id,
        wanted=wanted,
        before=requests.decode_cursor(query.cursor),
        limit=query.limit + 1,
    )
    rows, cursor = requests.page(rows, query.limit)
    now = await _statuses(call, sandbox, rows) if live else {}
    url = _attach_base(call, sandbox)
    shown = [_show(row, now.get(row.id), url, env=env) for row in rows]
    if live:
        shown = [one for one in shown if one.state in (states or STATES) and query.pid in (None, one.pid)]
    return answer(views.SessionPage(sessions=tuple(shown), next_cursor=cursor))


async def _statuses(call: Call[NoBody], sandbox: SandboxRow, rows: list[SessionRow]) -> dict[str, SessionStatus]:
    """What the node knows now of sessions that may have changed; nothing where it is away."""
    link = call.plane.nodes.find(sandbox.node_id)
    if link is None or not link.connected or not any(row.state in sessions.OPEN for row in rows):
        return {}
    try:
        asked = SandboxSessions(sandbox_id=sandbox.id)
        told = await link.call("session.list", asked, SessionList, within=GET_WITHIN_S)
    except (HatchwayError, TimeoutError):
        return {}
    return {status.session_id: status for status in told.sessions}


async def get(call: Call[NoBody]) -> Response:
    """Shows a session, as its node knows it now; where the node is away, as it was heard last."""
    row, sandbox = await _find(call)
    status: SessionStatus | None = None
    link = call.plane.nodes.find(sandbox.node_id)
    if row.state in sessions.OPEN and link is not None and link.connected:
        try:
            status = await link.call("session.get", SessionRef(session_id=row.id), SessionStatus, within=GET_WITHIN_S)
        except (HatchwayError, TimeoutError):
            status = None  # what is stored is the best that is known
    return answer(views.SessionAnswer(session=_show(row, status, _attach_base(call, sandbox))))


async def renew(call: Call[NoBody]) -> Response:
    """Answers a session with a fresh token."""
    row, sandbox = await _find(call)
    if sandbox.deleted_at is not None:
        raise Gone(
            "sandbox_deleted", f"The sandbox {sandbox.id} was deleted, its sessions with it.", "Create a new one."
        )
    link = call.plane.nodes.find(sandbox.node_id)
    if link is None:
        raise Unavailable("node_unreachable", f"The node {sandbox.node_id} is not connected.", "Try again in a moment.")
    return answer(_opened(call, sandbox, row, None, link))


async def delete(call: Call[NoBody]) -> Response:
    """Kills what runs of a session and drops its output. Idempotent as far as the node goes; the session is unknown afterwards."""
    row, sandbox = await _find(call)
    if sandbox.deleted_at is None:
        link = await call.plane.nodes.wait(sandbox.node_id, within=NODE_WAIT_S)
        try:
            await link.call("session.delete", SessionRef(session_id=row.id), Empty, within=CREATE_WITHIN_S)
        except NotFound:
            pass
        except TimeoutError:
            raise node_timeout() from None
    await call.plane.database.write(sessions.close, row.id, "deleted")
    return answer(None, 204)


def _spec(body: CreateSession) -> SessionSpec:
    if (body.argv is None) == (body.command is None):
        raise invalid_field("argv", "exactly one of `argv` and `command` must be given.", "`argv`, or `command`")
    argv = body.argv if body.argv is not None else (*SHELL, body.command or "")
    if sum(len(argument.encode()) + 1 for argument in argv) > MAX_ARGUMENT_OCTETS:
        raise invalid_field("argv", "it is too long in all.", f"at most {MAX_ARGUMENT_OCTETS} octets")
    if any("\0" in argument for argument in argv):
        raise invalid_field(
            "argv" if body.argv is not None else "command", "it has a NUL character.", "text without NUL"
        )
    if not argv[0]:
        raise invalid_field("argv[0]", "the program's name is empty.", "a path, or a name to be found in PATH")
    check_env(body.env, "env", entries=MAX_ENV, octets=MAX_ENV_OCTETS)
    check_metadata(body.metadata)
    if sum(len(key) + len(value.encode()) for key, value in body.metadata.items()) > MAX_METADATA_OCTETS:
        raise invalid_field("metadata", "it is too long in all.", f"at most {MAX_METADATA_OCTETS} octets")
    return SessionSpec(
        session_id="",
        sandbox_id="",
        project="",
        process_id=0,
        argv=argv,
        env=body.env,
        cwd=body.cwd or HOMES.get(body.user),
        user=body.user,
        pty=None if body.pty is None else TerminalSize(rows=body.pty.rows, cols=body.pty.cols),
        stdin=body.stdin,
        timeout_s=body.timeout_s,
        timeout_scope=body.timeout_scope,
        linger_s=body.linger_s,
        metadata=body.metadata,
        limits=None if body.limits is None else msgspec.convert(body.limits, SessionLimits, from_attributes=True),
        retain_s=body.retain_s,
    )


async def _find(call: Call[Any]) -> tuple[SessionRow, SandboxRow]:
    row = await call.plane.database.read(sessions.get, call.project, _id(call, "session"))
    return row, await call.plane.database.read(sandboxes.get, call.project, row.sandbox_id)


def _show(row: SessionRow, status: SessionStatus | None, base: str | None, *, env: bool = False) -> views.Session:
    url = None if base is None else f"{base}/v1/sessions/{row.id}/attach"
    shown = {"env": row.spec.get("env", {})} if env else {}
    return views.Session(**views.session_fields(row, status, url), **shown)


def _attach_base(call: Call[Any], sandbox: SandboxRow) -> str | None:
    link = call.plane.nodes.find(sandbox.node_id)
    return None if link is None or link.info is None else link.info.attach_url.rstrip("/")


def _opened(
    call: Call[Any], sandbox: SandboxRow, row: SessionRow, status: SessionStatus | None, link: NodeLink
) -> views.OpenedSessionAnswer:
    token, expires_at = call.plane.signer.issue(
        project=row.project,
        sandbox_id=row.sandbox_id,
        generation=sandbox.generation,
        ttl_s=call.plane.config.token_ttl_s,
        session_id=row.id,
        key_id=call.key.id,
        until=call.key.expires_at,
    )
    assert link.info is not None
    told = {"session": row.id, "expires_at": expires_at}
    call.plane.audit.issued("token.issued", row.project, row.sandbox_id, told)
    url = f"{link.info.attach_url.rstrip('/')}/v1/sessions/{row.id}/attach"
    fields = views.session_fields(row, status, url)
    return views.OpenedSessionAnswer(session=views.OpenedSession(**fields, token=token, token_expires_at=expires_at))


def _id(call: Call[Any], what: str) -> str:
    return requests.check_id(call.path["id"], what, NotFound)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sandboxes/{id}/sessions",
        create,
        "Create a command session",
        {201: views.OpenedSessionAnswer},
        "sessions",
        scope="exec",
        body=CreateSession,
        errors=(404, 409, 410, 503),
        repeated=repeat,
    ),
    Endpoint(
        "GET",
        "/v1/sandboxes/{id}/sessions",
        list_,
        "List the sessions of a sandbox",
        {200: views.SessionPage},
        "sessions",
        query=ListSessions,
        query_prefixes=("metadata.",),
        errors=(404,),
    ),
    Endpoint("GET", "/v1/sessions/{id}", get, "Show a session", {200: views.SessionAnswer}, "sessions", errors=(404,)),
    Endpoint(
        "DELETE",
        "/v1/sessions/{id}",
        delete,
        "Kill what runs of a session and drop its output",
        {204: None},
        "sessions",
        scope="exec",
        body=NoBody,
        errors=(404, 503),
    ),
    Endpoint(
        "POST",
        "/v1/sessions/{id}/token",
        renew,
        "Renew the token of a session",
        {200: views.OpenedSessionAnswer},
        "sessions",
        scope="exec",
        body=NoBody,
        errors=(404, 410, 503),
    ),
)
