"""Identifiers: what they look like and how they are made.

Sandboxes, sessions, operations and keys are named by 20 characters of `[a-z0-9]`: about 103 bits, so that an id
cannot be guessed, and short enough for a DNS label beside a port number.
"""

import os
import re

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
LENGTH = 20
_PATTERN = re.compile(r"[a-z0-9]{20}")


def new_id() -> str:
    """Returns a fresh random id."""
    text = ""
    while len(text) < LENGTH:
        # 252 is the largest multiple of 36 in an octet: what is above would make the first letters likelier.
        text += "".join(ALPHABET[octet % 36] for octet in os.urandom(LENGTH) if octet < 252)
    return text[:LENGTH]


def is_id(text: str) -> bool:
    """Tells whether `text` has the form of an id; says nothing of whether it exists."""
    return _PATTERN.fullmatch(text) is not None
