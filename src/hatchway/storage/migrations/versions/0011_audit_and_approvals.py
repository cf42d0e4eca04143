"""Who did what, for the audit journal; requests that wait for somebody's consent."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """What happened before has no author."""
    op.add_column("events", sa.Column("actor", sa.String(length=64), nullable=True))
    op.add_column("events", sa.Column("request_id", sa.String(length=64), nullable=True))
    op.add_column("events", sa.Column("unseen", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("projects", sa.Column("approvals", sa.JSON(), nullable=False, server_default="[]"))
    op.create_table(
        "approvals",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("sandbox_id", sa.String(length=20), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("operation_id", sa.String(length=20), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=512), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("scope", sa.String(length=8), nullable=True),
        sa.Column("ttl_s", sa.Float(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("approver", sa.String(length=20), nullable=True),
        sa.Column("delivered", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("why", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("answered_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_approvals_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_approvals")),
    )
    op.create_index(op.f("ix_approvals_project_created_at_id"), "approvals", ["project", "created_at", "id"])
    op.create_index(op.f("ix_approvals_state_expires_at"), "approvals", ["state", "expires_at"])
    op.create_index(op.f("ix_approvals_sandbox_id_state"), "approvals", ["sandbox_id", "state"])
    op.create_index(op.f("ix_approvals_operation_id"), "approvals", ["operation_id"])
