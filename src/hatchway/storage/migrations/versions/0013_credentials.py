"""What is known of credentials: where their values come from and where they may go. The values are the broker's alone."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0011"


def upgrade() -> None:
    """One table."""
    op.create_table(
        "credentials",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("hosts", sa.JSON(), nullable=False),
        sa.Column("changing_version", sa.Integer(), nullable=False),
        sa.Column("changing_until", sa.Float()),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_credentials_project")),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_credentials")),
    )
