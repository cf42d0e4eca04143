"""Lifetimes, schedules of snapshots and pools."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Sandboxes that are there already have no deadline, as before."""
    for column in (
        sa.Column("timeout_s", sa.Float(), nullable=True),
        sa.Column("idle_timeout_s", sa.Float(), nullable=True),
        sa.Column("on_timeout", sa.String(length=8), nullable=False, server_default="suspend"),
        sa.Column("auto_wake", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("left_s", sa.Float(), nullable=True),
        sa.Column("active_at", sa.Float(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("retry_at", sa.Float(), nullable=True),
        sa.Column("due_at", sa.Float(), nullable=True),
        sa.Column("state_since", sa.Float(), nullable=True),
        sa.Column("schedule", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("disk_due_at", sa.Float(), nullable=True),
        sa.Column("full_due_at", sa.Float(), nullable=True),
        sa.Column("pool", sa.String(length=63), nullable=True),
        sa.Column("pool_key", sa.String(length=160), nullable=True),
    ):
        op.add_column("sandboxes", column)
    op.create_index(op.f("ix_sandboxes_due_at"), "sandboxes", ["due_at"])
    op.create_index(op.f("ix_sandboxes_pool_project"), "sandboxes", ["pool", "project"])
    op.create_index(op.f("ix_sandboxes_state_state_since"), "sandboxes", ["state", "state_since"])
    op.add_column("snapshots", sa.Column("scheduled", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "pools",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("template", sa.String(length=512), nullable=False),
        sa.Column("template_digest", sa.String(length=80), nullable=False),
        sa.Column("pool_key", sa.String(length=160), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("vcpus", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("condition", sa.Text(), nullable=False),
        sa.Column("retry_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_pools_project")),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_pools")),
    )
