"""Identifiers: what they look like and how they are made.

Sandboxes, sessions, operations and keys are named by 20 characters of `[a-z0-9]`: about 103 bits, so that an id
cannot be guessed, and short enough for a DNS label beside a port number.
"""

import re

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
LENGTH = 20
_PATTERN = re.compile(r"[a-z0-9]{20}")


def new_id() -> str:
    """Returns a fresh random id."""
    import secrets  # late: it costs 2 MiB, and the launcher only checks ids

    return "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))


def is_id(text: str) -> bool:
    """Tells whether `text` has the form of an id; says nothing of whether it exists."""
    return _PATTERN.fullmatch(text) is not None
