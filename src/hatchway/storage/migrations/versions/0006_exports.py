"""Exports: archives that wait on a node to be fetched."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """A table of their own."""
    op.create_table(
        "exports",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("sandbox_id", sa.String(length=20), nullable=False),
        sa.Column("snapshot_id", sa.String(length=20), nullable=True),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("operation_id", sa.String(length=20), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(length=80), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_exports_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
    )
    op.create_index(op.f("ix_exports_project_created_at_id"), "exports", ["project", "created_at", "id"])
    op.create_index(op.f("ix_exports_operation_id"), "exports", ["operation_id"])
    op.create_index(op.f("ix_exports_state_updated_at"), "exports", ["state", "updated_at"])
