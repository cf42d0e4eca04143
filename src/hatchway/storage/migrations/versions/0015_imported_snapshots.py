"""Where an imported snapshot comes from, and which numbers of processes a snapshot has used, with its sandbox or without."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Two columns."""
    op.add_column("snapshots", sa.Column("origin", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("snapshots", sa.Column("last_process_id", sa.Integer(), nullable=False, server_default="0"))
