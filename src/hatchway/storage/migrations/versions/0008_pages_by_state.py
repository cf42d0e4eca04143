"""Lists of sandboxes are read by state, each in its order, so that a page takes the same time wherever it lies."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """From 0007."""
    op.create_index(
        op.f("ix_sandboxes_project_state_created_at_id"), "sandboxes", ["project", "state", "created_at", "id"]
    )
    op.create_index(op.f("ix_sandboxes_created_at"), "sandboxes", ["created_at"])
    op.drop_index(op.f("ix_sandboxes_project_state"), table_name="sandboxes")
    # With it in place PostgreSQL could as well read a whole list to find the few of one state.
    op.drop_index(op.f("ix_sandboxes_project_created_at_id"), table_name="sandboxes")
