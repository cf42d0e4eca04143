"""What programs keep with a sandbox for themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """One column."""
    op.add_column("sandboxes", sa.Column("annotations", sa.JSON(none_as_null=True), nullable=True))
