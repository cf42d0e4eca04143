"""A project may require an isolation of all its sandboxes."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """From 0001: nothing is required so far."""
    op.add_column("projects", sa.Column("require_isolation", sa.String(length=16), nullable=True))
