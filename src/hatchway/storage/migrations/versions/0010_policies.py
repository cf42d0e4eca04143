"""Policies of what may leave sandboxes, and how far each sandbox's holds on its node."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """One table, and columns of sandboxes."""
    op.create_table(
        "policies",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("tier", sa.String(length=16), nullable=False),
        sa.Column("template", sa.String(length=128), nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=80), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", name=op.f("pk_policies")),
    )
    op.create_index(op.f("ix_policies_project_tier"), "policies", ["project", "tier"])
    op.add_column("sandboxes", sa.Column("policy", sa.String(length=63), nullable=True))
    op.add_column("sandboxes", sa.Column("policy_document", sa.Text(), nullable=True))
    op.add_column("sandboxes", sa.Column("credentials", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("sandboxes", sa.Column("policy_revision", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("sandboxes", sa.Column("policy_applied", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("sandboxes", sa.Column("policy_conditions", sa.JSON(none_as_null=True), nullable=True))
    op.create_index(op.f("ix_sandboxes_project_policy"), "sandboxes", ["project", "policy"])
