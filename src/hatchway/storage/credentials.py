"""Credentials: what is known of them here, which is never their values.

The value of a credential goes to the broker between two transactions. The first numbers the change and lets nobody else change this
credential for a while, the second records it. Whatever dies in between, the row is there and says that its change did not come to its
end (`changing_until` is over): the next change has a higher number, and a row that was never recorded can be deleted like any other.
"""

import time
from typing import Any

import msgspec
from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from hatchway.domain.errors import Conflict, Exhausted, NotFound
from hatchway.storage import outbox, projects
from hatchway.storage.rows import CredentialRow
from hatchway.storage.tables import credentials

MAX_OF_PROJECT = 1000
CHANGES_WITHIN_S = 60.0
"""How long one change keeps others away; longer than it can take."""


def begin(
    connection: Connection, project: str, name: str, *, kind: str, source: dict[str, str], hosts: list[str]
) -> int:
    """Begins to change a credential, or to make one, which shows as what it is to be; returns the version that this makes.

    Raises `Conflict("credential_busy")` while another change is on its way, `Exhausted("too_many_credentials")`, and what `projects.hold` raises.
    """
    projects.hold(connection, project)
    projects.lock(connection, project)
    row = _find(connection, project, name)
    now = time.time()
    if row is None:
        held = connection.execute(
            select(func.count()).select_from(credentials).where(credentials.c.project == project)
        ).scalar_one()
        if held >= MAX_OF_PROJECT:
            raise Exhausted(
                "too_many_credentials",
                f"The project has {MAX_OF_PROJECT} credentials.",
                "Delete some.",
                limit=MAX_OF_PROJECT,
            )
        connection.execute(
            insert(credentials),
            {
                "project": project,
                "name": name,
                "version": 0,
                "kind": kind,
                "source": source,
                "hosts": hosts,
                "changing_version": 1,
                "changing_until": now + CHANGES_WITHIN_S,
                "created_at": now,
                "updated_at": now,
            },
        )
        return 1
    _require_idle(row, now)
    version: int = row["changing_version"] + 1
    _set(connection, project, name, changing_version=version, changing_until=now + CHANGES_WITHIN_S)
    return version


def finish(
    connection: Connection,
    project: str,
    name: str,
    version: int,
    *,
    kind: str,
    source: dict[str, str],
    hosts: list[str],
) -> tuple[CredentialRow, bool]:
    """Records a change that the broker has made; tells whether the credential is new. Raises `Conflict("credential_busy")` when it took too long."""
    row = _find(connection, project, name)
    if row is None or row["changing_version"] != version:
        raise busy(name)
    new = row["version"] == 0
    _set(
        connection,
        project,
        name,
        version=version,
        kind=kind,
        source=source,
        hosts=hosts,
        changing_until=None,
        updated_at=time.time(),
    )
    data = {"version": version, "kind": kind, "hosts": hosts}
    if new:
        outbox.append(connection, project, "credential.created", name, data)
    else:
        outbox.append(connection, project, "credential.updated", name, data)
    return get(connection, project, name), new


def give_up(connection: Connection, project: str, name: str, version: int) -> None:
    """A change that the broker refused is none; a credential that was never there is forgotten."""
    row = _find(connection, project, name)
    if row is None or row["changing_version"] != version:
        return
    if row["version"] == 0:
        connection.execute(delete(credentials).where(*_is(project, name)))
    else:
        _set(connection, project, name, changing_until=None)


def leave(connection: Connection, project: str, name: str, version: int) -> None:
    """A change of which nobody knows whether the broker made it: it shows as one that did not come to its end, and keeps no other away."""
    row = _find(connection, project, name)
    if row is not None and row["changing_version"] == version:
        _set(connection, project, name, changing_until=time.time())


def incomplete(connection: Connection, before: float) -> list[CredentialRow]:
    """Credentials whose change should have come to its end before a time (Unix seconds), and did not; of all projects."""
    query = select(credentials).where(credentials.c.changing_until < before)
    return [_row(row) for row in connection.execute(query).mappings()]


def begin_delete(connection: Connection, project: str, name: str) -> int:
    """Begins to delete a credential, also one that was never recorded. Raises `NotFound("unknown_credential")`, `Conflict("credential_busy")`."""
    row = _find(connection, project, name)
    if row is None:
        raise unknown(name)
    now = time.time()
    _require_idle(row, now)
    version: int = row["changing_version"] + 1
    _set(connection, project, name, changing_version=version, changing_until=now + CHANGES_WITHIN_S)
    return version


def finish_delete(connection: Connection, project: str, name: str, version: int) -> None:
    """Records that the broker has forgotten it. Raises `Conflict("credential_busy")` when that took too long."""
    row = _find(connection, project, name)
    if row is None:
        return
    if row["changing_version"] != version:
        raise busy(name)
    connection.execute(delete(credentials).where(*_is(project, name)))
    if row["version"]:
        outbox.append(connection, project, "credential.deleted", name, {})


def forget_all(connection: Connection, project: str) -> None:
    """Records that the broker has forgotten all of a project that is being deleted."""
    connection.execute(delete(credentials).where(credentials.c.project == project))


def key_rotated(connection: Connection, key_id: str) -> None:
    """Notes that the values are sealed with another key."""
    outbox.append(connection, outbox.INSTALLATION, "credential.key_rotated", key_id, {})


def any_of(connection: Connection, project: str) -> bool:
    """Whether there is anything of a project, recorded or on its way."""
    query = select(credentials.c.name).where(credentials.c.project == project).limit(1)
    return connection.execute(query).one_or_none() is not None


def get(connection: Connection, project: str, name: str) -> CredentialRow:
    """Raises `NotFound("unknown_credential")`."""
    row = connection.execute(select(credentials).where(*_is(project, name))).mappings().one_or_none()
    if row is None:
        raise unknown(name)
    return _row(row)


def list_all(connection: Connection, project: str) -> list[CredentialRow]:
    """The project's credentials, by name; also those whose making has not come to its end."""
    query = select(credentials).where(credentials.c.project == project).order_by(credentials.c.name)
    return [_row(row) for row in connection.execute(query).mappings()]


def unknown(name: str) -> NotFound:
    """The error of a credential that is not there, or is another project's."""
    return NotFound(
        "unknown_credential",
        f"There is no credential {name[:64]!r}.",
        "GET /v1/credentials lists those that there are.",
    )


def busy(name: str) -> Conflict:
    """The error of a change beside another one."""
    return Conflict("credential_busy", f"The credential {name[:64]} is just being changed.", "Try again in a moment.")


def _find(connection: Connection, project: str, name: str) -> RowMapping | None:
    """The row, which nobody else changes until the transaction ends."""
    query = select(credentials).where(*_is(project, name)).with_for_update()
    return connection.execute(query).mappings().one_or_none()


def _is(project: str, name: str) -> tuple[Any, ...]:
    return credentials.c.project == project, credentials.c.name == name


def _set(connection: Connection, project: str, name: str, **values: Any) -> None:
    connection.execute(update(credentials).where(*_is(project, name)).values(**values))


def _require_idle(row: RowMapping, now: float) -> None:
    if row["changing_until"] is not None and row["changing_until"] > now:
        raise busy(row["name"])


def _row(row: RowMapping) -> CredentialRow:
    fields = {name: row[name] for name in CredentialRow.__struct_fields__}
    return msgspec.convert(fields, CredentialRow)
