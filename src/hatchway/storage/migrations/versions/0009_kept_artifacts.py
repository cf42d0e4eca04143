"""By which digest a suspended sandbox is fetched from the store that nodes share."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """One column."""
    op.add_column("sandboxes", sa.Column("artifact", sa.String(length=80), nullable=True))
