"""Several control processes: whose an operation is, and the leases by which they know of each other."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """From 0004: what has not ended belongs to nobody."""
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=96), nullable=False),
        sa.Column("holder", sa.String(length=20), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_holder"), "leases", ["holder"], unique=False)
    op.add_column("operations", sa.Column("controller_id", sa.String(length=20), nullable=True))
