"""Alembic's entry: runs the migrations on the connection that `storage.migrate` hands over."""

from alembic import context

from hatchway.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True, render_as_batch=True)
# The caller's transaction holds the whole upgrade: all of it or nothing.
context.run_migrations()
