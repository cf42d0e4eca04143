"""What an installation says of archives and of where kept memory goes: the table `[archives]` of hatchway.toml."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ArchivePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose archives are taken in, and the store that suspended sandboxes are kept in."""

    trusted_keys: Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=64)] = ()
    """Keys of other installations, as `signed_by` of their exports says; the own one is always trusted."""
    store: Annotated[str, Meta(max_length=1000)] | None = None
    """URL of the store that nodes share; None: what is suspended stays on its node. Credentials come from the environment."""
    import_from: Annotated[tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(max_length=64)] = ()
    """Prefixes of addresses that projects may have archives fetched from, besides `archives/PROJECT/` in the store."""


DEFAULT = ArchivePolicy()
