"""The tables as the newest migration leaves them; a unit test compares the two.

Times are Unix seconds. Everything that belongs to a user carries its project.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only where the key is a plain INTEGER.
_Sequence = BigInteger().with_variant(Integer, "sqlite")

projects = Table(
    "projects",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("require_isolation", String(16)),
    Column("state", String(16), nullable=False, server_default="active"),
    Column("templates", JSON(none_as_null=True)),
    Column("quotas", JSON, nullable=False, server_default="{}"),
    Column("caps", JSON, nullable=False, server_default="{}"),
    Column("approvals", JSON, nullable=False, server_default="[]"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("name", String(63), nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("secret_hash", LargeBinary(32), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
    Column("development", Boolean, nullable=False, default=False),
    Index(None, "project", "created_at"),
    Index(None, "revoked_at"),
    Index(None, "expires_at"),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("name", String(63)),
    Column("state", String(16), nullable=False),
    Column("desired", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("observed_sequence", BigInteger, nullable=False),
    Column("operation_id", String(20)),
    Column("template", String(512), nullable=False),
    Column("template_digest", String(80), nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_mib", Integer, nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("require_isolation", String(16)),
    Column("isolation", String(16)),
    Column("boot_id", String(64)),
    Column("cause", String(32)),
    Column("reason", Text, nullable=False),
    Column("last_process_id", Integer, nullable=False),
    Column("forked_from", String(20)),
    Column("snapshot_id", String(20)),
    Column("head_snapshot_id", String(20)),
    Column("stored_bytes", BigInteger),
    Column("artifact", String(80)),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("deleted_at", Float),
    Column("timeout_s", Float),
    Column("idle_timeout_s", Float),
    Column("on_timeout", String(8), nullable=False, server_default="suspend"),
    Column("auto_wake", Boolean, nullable=False, server_default=false()),
    Column("expires_at", Float),
    Column("left_s", Float),
    Column("active_at", Float),
    Column("tries", Integer, nullable=False, server_default="0"),
    Column("retry_at", Float),
    Column("due_at", Float),
    Column("state_since", Float),
    Column("schedule", JSON(none_as_null=True)),
    Column("disk_due_at", Float),
    Column("full_due_at", Float),
    Column("pool", String(63)),
    Column("pool_key", String(160)),
    Column("policy", String(63)),
    Column("policy_document", Text),
    Column("credentials", JSON(none_as_null=True)),
    Column("policy_revision", Integer, nullable=False, server_default="0"),
    Column("policy_applied", Integer, nullable=False, server_default="0"),
    Column("policy_conditions", JSON(none_as_null=True)),
    Column("annotations", JSON(none_as_null=True)),
    Index(None, "created_at"),
    Index(None, "project", "policy"),
    Index(None, "project", "state", "created_at", "id"),
    Index(None, "node_id", "state"),
    Index(None, "deleted_at"),
    Index(None, "operation_id"),
    Index(None, "due_at"),
    Index(None, "pool", "project"),
    Index(None, "state", "state_since"),
)

pools = Table(
    "pools",
    metadata,
    Column("project", String(63), ForeignKey("projects.name"), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("template", String(512), nullable=False),
    Column("template_digest", String(80), nullable=False),
    Column("pool_key", String(160), nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("size", Integer, nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_mib", Integer, nullable=False),
    Column("condition", Text, nullable=False),
    Column("retry_at", Float),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

# No foreign key: those of the tier `platform` belong to no project.
policies = Table(
    "policies",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("tier", String(16), nullable=False),
    Column("template", String(128)),
    Column("version", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("digest", String(80), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index(None, "project", "tier"),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    # No foreign key: a snapshot outlives its sandbox.
    Column("sandbox_id", String(20), nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("operation_id", String(20)),
    Column("kind", String(8), nullable=False),
    Column("name", String(63)),
    Column("parent_id", String(20)),
    Column("state", String(16), nullable=False),
    Column("template", String(512), nullable=False),
    Column("template_digest", String(80), nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mib", Integer, nullable=False),
    Column("disk_mib", Integer, nullable=False),
    Column("disk_bytes", BigInteger),
    Column("memory_bytes", BigInteger),
    Column("digest", String(80)),
    Column("error", JSON(none_as_null=True)),
    Column("scheduled", Boolean, nullable=False, server_default=false()),
    Column("origin", JSON(none_as_null=True)),
    Column("last_process_id", Integer, nullable=False, server_default="0"),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index(None, "project", "created_at", "id"),
    Index(None, "sandbox_id", "created_at"),
    Index(None, "node_id", "state"),
)

exports = Table(
    "exports",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    # No foreign keys: an export outlives what it was made from.
    Column("sandbox_id", String(20), nullable=False),
    Column("snapshot_id", String(20)),
    Column("node_id", String(64), nullable=False),
    Column("operation_id", String(20)),
    Column("state", String(16), nullable=False),
    Column("size_bytes", BigInteger),
    Column("digest", String(80)),
    Column("error", JSON(none_as_null=True)),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("expires_at", Float),
    Index(None, "project", "created_at", "id"),
    Index(None, "operation_id"),
    Index(None, "state", "updated_at"),
)

operations = Table(
    "operations",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("target", String(20), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("phase", String(64), nullable=False),
    Column("progress", Float),
    Column("arguments", JSON, nullable=False, server_default="{}"),
    Column("result", JSON(none_as_null=True)),
    Column("error", JSON(none_as_null=True)),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("controller_id", String(20)),
    Index(None, "project", "created_at", "id"),
    Index(None, "target", "created_at"),
    Index(None, "status", "created_at"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("sandbox_id", String(20), ForeignKey("sandboxes.id"), nullable=False),
    Column("process_id", Integer, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("status", JSON(none_as_null=True)),
    Column("forked_from", String(20)),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Index(None, "sandbox_id", "process_id"),
    Index(None, "project", "created_at", "id"),
    Index(None, "project", "state"),
)

# Tokens of sandboxes; those of sessions are signed and not stored.
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("sandbox_id", String(20), nullable=False),
    Column("key_id", String(20), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
    Index(None, "sandbox_id", "created_at", "id"),
    Index(None, "revoked_at"),
    Index(None, "expires_at"),
)

# Tokens of a sandbox that were signed at `before` or earlier are revoked, whoever has them.
token_cutoffs = Table(
    "token_cutoffs",
    metadata,
    Column("sandbox_id", String(20), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("before", Float, nullable=False),
)

# What is known of credentials. Their values are the broker's alone.
credentials = Table(
    "credentials",
    metadata,
    Column("project", String(63), ForeignKey("projects.name"), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("source", JSON, nullable=False),
    Column("hosts", JSON, nullable=False),
    Column("changing_version", Integer, nullable=False),
    Column("changing_until", Float),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("sequence", _Sequence, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", String(64), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    # Who did it, and in which request; None: the control plane by itself.
    Column("actor", String(64)),
    Column("request_id", String(64)),
    # A record for the audit journal alone.
    Column("unseen", Boolean, nullable=False, server_default=false()),
    Index(None, "project", "sequence"),
    sqlite_autoincrement=True,
)

approvals = Table(
    "approvals",
    metadata,
    # The id of a gateway's ask, or one of ours.
    Column("id", String(64), primary_key=True),
    Column("project", String(63), ForeignKey("projects.name"), nullable=False),
    Column("sandbox_id", String(20), nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("operation_id", String(20)),
    Column("generation", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("key", String(512), nullable=False),
    Column("request", JSON, nullable=False),
    Column("scope", String(8)),
    Column("ttl_s", Float),
    Column("note", Text, nullable=False),
    Column("approver", String(20)),
    Column("delivered", Boolean, nullable=False, server_default=false()),
    Column("why", String(32)),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("answered_at", Float),
    Index(None, "project", "created_at", "id"),
    Index(None, "state", "expires_at"),
    Index(None, "sandbox_id", "state"),
    Index(None, "operation_id"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_hash", LargeBinary(32), nullable=False),
    Column("answer", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index(None, "expires_at"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("address", String(512), nullable=False),
    Column("info", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),
)

settings = Table(
    "settings",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", JSON, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(96), primary_key=True),
    Column("holder", String(20), nullable=False),
    Column("expires_at", Float, nullable=False),
    Index(None, "holder"),
)
