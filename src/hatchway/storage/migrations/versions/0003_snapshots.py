"""Snapshots, and what suspend, fork and rollback keep of sandboxes and operations."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """From the first release."""
    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("sandbox_id", sa.String(length=20), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("operation_id", sa.String(length=20), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=True),
        sa.Column("parent_id", sa.String(length=20), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("template", sa.String(length=512), nullable=False),
        sa.Column("template_digest", sa.String(length=80), nullable=False),
        sa.Column("vcpus", sa.Integer(), nullable=False),
        sa.Column("memory_mib", sa.Integer(), nullable=False),
        sa.Column("disk_mib", sa.Integer(), nullable=False),
        sa.Column("disk_bytes", sa.BigInteger(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(length=80), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_snapshots_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_snapshots")),
    )
    op.create_index(op.f("ix_snapshots_project_created_at_id"), "snapshots", ["project", "created_at", "id"])
    op.create_index(op.f("ix_snapshots_sandbox_id_created_at"), "snapshots", ["sandbox_id", "created_at"])
    op.create_index(op.f("ix_snapshots_node_id_state"), "snapshots", ["node_id", "state"])
    # Plain ALTER TABLE: SQLite then need not copy the table.
    op.add_column("sandboxes", sa.Column("forked_from", sa.String(length=20), nullable=True))
    op.add_column("sandboxes", sa.Column("snapshot_id", sa.String(length=20), nullable=True))
    op.add_column("sandboxes", sa.Column("head_snapshot_id", sa.String(length=20), nullable=True))
    op.add_column("sandboxes", sa.Column("stored_bytes", sa.BigInteger(), nullable=True))
    op.create_index(op.f("ix_sandboxes_operation_id"), "sandboxes", ["operation_id"])
    op.add_column("operations", sa.Column("arguments", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("sessions", sa.Column("forked_from", sa.String(length=20), nullable=True))
    # After a rollback the process of a session that ended with it runs on in another one.
    op.drop_index(op.f("ix_sessions_sandbox_id_process_id"), table_name="sessions")
    op.create_index(op.f("ix_sessions_sandbox_id_process_id"), "sessions", ["sandbox_id", "process_id"])
