"""Brings a database up to the newest migration, in one transaction."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from hatchway.domain.errors import Unavailable
from hatchway.storage import migrations


def current(connection: Connection) -> str | None:
    """Returns the migration that the database stands at; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if version is None else str(version)


def upgrade(connection: Connection) -> None:
    """Runs what is missing. Raises `Unavailable("database_too_new")` where a newer release has already changed the database."""
    version = current(connection)
    if version == migrations.HEAD:
        return
    # Costs 10 MiB and 100 ms, and is needed once per release.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise Unavailable(
            "database_too_new",
            f"The database stands at migration {version}, which this release does not know.",
            "Start the release that wrote it, or a newer one.",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
