"""Projects: what keys and sandboxes belong to, and what is required of all sandboxes of one."""

import msgspec
from sqlalchemy import Connection, select, update

from hatchway.domain.errors import NotFound
from hatchway.storage import outbox
from hatchway.storage.tables import projects


class ProjectRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `projects`."""

    name: str
    created_at: float
    require_isolation: str | None


def get(connection: Connection, name: str) -> ProjectRow:
    """Raises `NotFound("unknown_project")`."""
    row = connection.execute(select(projects).where(projects.c.name == name)).mappings().one_or_none()
    if row is None:
        raise NotFound(
            "unknown_project", f"There is no project {name[:64]!r}.", "GET /v1/projects lists those that there are."
        )
    return ProjectRow(**row)


def required_isolation(connection: Connection, name: str) -> str | None:
    """The isolation that every sandbox of the project must have; None where any will do."""
    return connection.execute(select(projects.c.require_isolation).where(projects.c.name == name)).scalar_one_or_none()


def require_isolation(connection: Connection, name: str, isolation: str | None) -> ProjectRow:
    """Sets what is required of all sandboxes from their next start on. Raises `NotFound("unknown_project")`."""
    before = get(connection, name)
    if before.require_isolation != isolation:
        connection.execute(update(projects).where(projects.c.name == name).values(require_isolation=isolation))
        outbox.append(connection, name, "project.updated", name, {"require_isolation": isolation})
    return get(connection, name)
