"""What an installation says of its audit journal and of those who are asked for consent: the tables `[audit]` and `[approvals]` of hatchway.toml."""

from typing import Annotated

import msgspec
from msgspec import Meta


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the journal is kept. What goes is told by a signed record."""

    keep_mib: Annotated[int, Meta(ge=64, le=64 << 20)] = 4096
    keep_days: Annotated[float, Meta(ge=1, le=36_500)] = 400.0


class ApprovalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is told of requests for approval: a URL (https, or http on this machine), and a file with the secret that messages are signed with."""

    webhook: Annotated[str, Meta(pattern=r"^https?://[^\s#]+$", max_length=2048)] | None = None
    webhook_secret_file: str | None = None
    """Its path is from the settings file's folder on."""
