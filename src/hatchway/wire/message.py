"""What every message of the installation's processes to each other is made of."""

import msgspec


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every message."""


class Empty(Struct, frozen=True, kw_only=True):
    """Nothing to say."""
