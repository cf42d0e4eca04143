"""/v1/credentials: secrets for the requests of sandboxes. What is known of them is shown; their values go to the broker and nowhere else."""

import contextlib
import re
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response

from hatchway.control import views
from hatchway.control.broker import Unheard
from hatchway.control.endpoints import Call, Endpoint, NoBody, answer
from hatchway.domain.checking import invalid_field
from hatchway.domain.errors import HatchwayError, Internal, NotFound
from hatchway.storage import credentials
from hatchway.storage.rows import CredentialRow
from hatchway.wire.broker import Rotated, Source, SourceCheck, SourceRef, VaultPath
from hatchway.wire.message import Empty

NAME = r"[a-z0-9](?:[a-z0-9._-]|/(?=[a-z0-9])){0,63}"
MAX_VALUE = 4096

Kind = Literal["store", "env", "file", "vault"]
Text = Annotated[str, Meta(min_length=1, max_length=256)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]

FIELDS: dict[str, tuple[str, ...]] = {
    "store": ("value",),
    "env": ("variable",),
    "file": ("file",),
    "vault": ("server", "mount", "path", "field"),
}
"""What each kind needs; nothing else may be given."""


class CredentialSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the value comes from: `store` has it in `value`; `env` in `variable` of the broker, `file` in its folder, `vault` there."""

    kind: Kind
    value: Annotated[str, Meta(min_length=1, max_length=MAX_VALUE)] | None = None
    variable: Text | None = None
    file: Text | None = None
    server: Text | None = None
    mount: Text | None = None
    path: Text | None = None
    field: Text | None = None

    def __repr__(self) -> str:
        return f"CredentialSource({self.kind})"


class PutCredential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A credential: where its value comes from, and the names of the only hosts that it may ever be sent to."""

    source: CredentialSource
    hosts: Annotated[tuple[Host, ...], Meta(min_length=1, max_length=64)]


class LookAtCredential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`check=true`: also fetch the value now, to tell whether it can be had."""

    check: bool = False


class ShownSource(views.View, frozen=True, kw_only=True, omit_defaults=True):
    """Where the value comes from; the value itself is never shown."""

    kind: str
    variable: str | None = None
    file: str | None = None
    server: str | None = None
    mount: str | None = None
    path: str | None = None
    field: str | None = None


class Credential(views.View, frozen=True, kw_only=True):
    """A secret for requests of sandboxes. `available` and `error` tell whether it could be had, where that was looked at.

    `state` is `incomplete` where nobody knows whether the broker made the last change: put it again, or delete it. Version 0 was never made.
    """

    name: str
    project: str
    source: ShownSource
    hosts: tuple[str, ...]
    version: int
    state: Literal["ready", "changing", "incomplete"]
    available: bool | None
    error: str | None
    created_at: float
    updated_at: float


class CredentialAnswer(views.View, frozen=True, kw_only=True):
    """One credential."""

    credential: Credential


class CredentialPage(views.View, frozen=True, kw_only=True):
    """The project's credentials, by name."""

    credentials: tuple[Credential, ...]
    next_cursor: str | None


class MasterKey(views.View, frozen=True, kw_only=True):
    """The key that stored values are sealed with from now on: its name, which says nothing of it, and how many credentials there are."""

    key_id: str
    sealed: int


class MasterKeyAnswer(views.View, frozen=True, kw_only=True):
    """A master key."""

    master_key: MasterKey


async def put(call: Call[PutCredential]) -> Response:
    """Makes a credential or changes one, for requests that are sent from now on. Where the broker refuses it, the former one stays."""
    name, body = _name(call), call.body
    await call.plane.database.require_room()
    source = _source(call.project, name, body)
    shown: dict[str, Any] = {
        "kind": body.source.kind,
        "source": _recorded(body.source),
        "hosts": list(body.hosts),
    }
    version = await call.plane.database.write(credentials.begin, call.project, name, **shown)
    async with _concluded(call, name, version):
        found = await call.plane.broker.call(
            "source.put", msgspec.structs.replace(source, version=version), SourceCheck
        )
    row, new = await call.plane.database.write(
        credentials.finish,
        call.project,
        name,
        version,
        **shown,
    )
    return answer(CredentialAnswer(credential=_show(row, found)), 201 if new else 200)


async def get(call: Call[NoBody]) -> Response:
    """Shows a credential, without its value."""
    query: LookAtCredential = call.query
    row = await call.plane.database.read(credentials.get, call.project, _name(call))
    found = None
    if query.check:
        found = await call.plane.broker.call(
            "source.check", SourceRef(project=call.project, name=row.name), SourceCheck
        )
    return answer(CredentialAnswer(credential=_show(row, found)))


async def list_(call: Call[NoBody]) -> Response:
    """Lists the project's credentials, without their values."""
    rows = await call.plane.database.read(credentials.list_all, call.project)
    return answer(CredentialPage(credentials=tuple(map(_show, rows)), next_cursor=None))


async def delete(call: Call[NoBody]) -> Response:
    """Forgets a credential; connections that use it are cut before the answer."""
    name = _name(call)
    version = await call.plane.database.write(credentials.begin_delete, call.project, name)
    async with _concluded(call, name, version):
        await call.plane.broker.call("source.delete", SourceRef(project=call.project, name=name), Empty)
    await call.plane.database.write(credentials.finish_delete, call.project, name, version)
    return answer(None, 204)


async def rotate_key(call: Call[NoBody]) -> Response:
    """Has the broker make a new master key and seal everything with it; the old one is gone then."""
    made = await call.plane.broker.call("store.rotate", Empty(), Rotated)
    await call.plane.database.write(credentials.key_rotated, made.key_id)
    return answer(MasterKeyAnswer(master_key=MasterKey(key_id=made.key_id, sealed=made.sealed)))


@contextlib.asynccontextmanager
async def _concluded(call: Call[Any], name: str, version: int) -> AsyncIterator[None]:
    """What the broker refuses is no change; of what it may have done it is told that nobody knows."""
    try:
        yield
    except HatchwayError as error:
        unheard = isinstance(error, Unheard | Internal)
        after = credentials.leave if unheard else credentials.give_up
        await call.plane.database.write(after, call.project, name, version)
        raise


def _source(project: str, name: str, body: PutCredential) -> Source:
    """What the broker is told. Raises `InvalidRequest("invalid_field")`, which has nothing of the value in it."""
    given = body.source
    wanted = FIELDS[given.kind]
    for field in ("value", "variable", "file", "server", "mount", "path", "field"):
        if (getattr(given, field) is not None) != (field in wanted):
            raise invalid_field(
                f"source.{field}",
                f"A source of kind `{given.kind}` has {'a' if field in wanted else 'no'} `{field}`.",
                f"{', '.join(wanted)} beside the kind",
            )
    vault = None
    if given.kind == "vault":
        assert given.server is not None
        assert given.mount is not None
        assert given.path is not None
        assert given.field is not None
        vault = VaultPath(server=given.server, mount=given.mount, path=given.path, field=given.field)
    return Source(
        project=project,
        name=name,
        hosts=body.hosts,
        value=None if given.value is None else given.value.encode(),
        variable=given.variable,
        file=given.file,
        vault=vault,
    )


def _recorded(source: CredentialSource) -> dict[str, str]:
    return {field: getattr(source, field) for field in FIELDS[source.kind] if field != "value"}


def _show(row: CredentialRow, found: SourceCheck | None = None) -> Credential:
    return Credential(
        name=row.name,
        project=row.project,
        source=ShownSource(kind=row.kind, **row.source),
        hosts=row.hosts,
        version=row.version,
        state=_state(row),
        available=None if found is None else found.available and found.version == row.version,
        error=_error(row, found),
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _state(row: CredentialRow) -> Literal["ready", "changing", "incomplete"]:
    if row.changing_until is None:
        return "ready"
    return "changing" if row.changing_until > time.time() else "incomplete"


def _error(row: CredentialRow, found: SourceCheck | None) -> str | None:
    if found is not None and found.version not in (0, row.version):
        return f"The broker has version {found.version} of it, of a change that did not come to its end. Put it again."
    if found is not None and not found.available:
        return found.error
    if _state(row) != "incomplete":
        return None
    what = "A change of it" if row.version else "Its making"
    return f"{what} did not come to its end: whether the broker made it is not known. Put it again, or delete it."


def _name(call: Call[Any]) -> str:
    name = call.path["credential"]
    if not re.fullmatch(NAME, name):
        raise NotFound("unknown_credential", f"There is no credential {name[:64]!r}.", f"A name matches {NAME}.")
    return name


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/credentials",
        list_,
        "List credentials",
        {200: CredentialPage},
        "credentials",
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/credentials/{credential}",
        get,
        "Show a credential, without its value",
        {200: CredentialAnswer},
        "credentials",
        scope="admin",
        query=LookAtCredential,
        errors=(404, 503),
    ),
    Endpoint(
        "PUT",
        "/v1/credentials/{credential}",
        put,
        "Make a credential, or change one",
        {200: CredentialAnswer, 201: CredentialAnswer},
        "credentials",
        scope="admin",
        body=PutCredential,
        errors=(404, 409, 503, 507),
        description="The value is given to the broker and is stored, logged and shown nowhere else.",
    ),
    Endpoint(
        "DELETE",
        "/v1/credentials/{credential}",
        delete,
        "Forget a credential",
        {204: None},
        "credentials",
        scope="admin",
        body=NoBody,
        errors=(404, 409, 503),
    ),
    Endpoint(
        "POST",
        "/v1/master-key/rotate",
        rotate_key,
        "Make a new master key for stored credentials",
        {200: MasterKeyAnswer},
        "credentials",
        scope="installation",
        body=NoBody,
        errors=(409, 503),
    ),
)
