"""Quotas, caps and templates of projects; tokens of sandboxes, so that they can be revoked; the scope `installation`."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """From 0003: nothing is bounded so far, and every administrator of the one project there was keeps what he could do."""
    op.add_column("projects", sa.Column("state", sa.String(length=16), nullable=False, server_default="active"))
    op.add_column("projects", sa.Column("templates", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("projects", sa.Column("quotas", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("projects", sa.Column("caps", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("sandbox_id", sa.String(length=20), nullable=False),
        sa.Column("key_id", sa.String(length=20), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_tokens_project")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_index(op.f("ix_tokens_sandbox_id_created_at_id"), "tokens", ["sandbox_id", "created_at", "id"])
    op.create_index(op.f("ix_tokens_revoked_at"), "tokens", ["revoked_at"])
    op.create_index(op.f("ix_tokens_expires_at"), "tokens", ["expires_at"])
    op.create_table(
        "token_cutoffs",
        sa.Column("sandbox_id", sa.String(length=20), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("before", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_token_cutoffs_project")),
        sa.PrimaryKeyConstraint("sandbox_id", name=op.f("pk_token_cutoffs")),
    )
    for table, columns in (
        ("sandboxes", ["project", "state"]),
        ("sessions", ["project", "state"]),
        ("api_keys", ["revoked_at"]),
        ("api_keys", ["expires_at"]),
    ):
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)
    _administrators_of_the_installation()


def _administrators_of_the_installation() -> None:
    keys = sa.table("api_keys", sa.column("id", sa.String()), sa.column("scopes", sa.JSON()))
    connection = op.get_bind()
    for row in connection.execute(sa.select(keys.c.id, keys.c.scopes)).all():
        if "admin" in row.scopes and "installation" not in row.scopes:
            scopes = [*row.scopes, "installation"]
            connection.execute(sa.update(keys).where(keys.c.id == row.id).values(scopes=scopes))
