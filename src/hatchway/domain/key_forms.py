"""What secrets of API keys look like: so that one that went astray is known as such without asking whose it is."""

import re

NATIVE_PREFIX = "hw_"
E2B_PREFIX = "e2b_"
"""Before hexadecimal digits: older SDKs of E2B send no other form."""
PREFIXES = (NATIVE_PREFIX, E2B_PREFIX)
LENGTH = 40
"""Characters behind `NATIVE_PREFIX`."""
E2B_OCTETS = 24
"""Two digits behind `E2B_PREFIX` are of each."""

_SHORTEST = 16
"""Of what follows a prefix: other lengths than today's are keys all the same, a word such as `e2b_added` is none."""
_KEY = re.compile(
    rf"(?:[\w!#$%&'*+.^`|~-]+[ \t]+)?\"?(?:{NATIVE_PREFIX}[0-9A-Za-z]{{{_SHORTEST},}}|{E2B_PREFIX}[0-9A-Fa-f]{{{_SHORTEST},}})\"?".encode()
)


def is_key(value: bytes) -> bool:
    """Whether the value of a header is the secret of an API key, alone or behind the name of a way to authenticate (`Bearer …`), or has one
    among several with commas between them."""
    return any(_KEY.fullmatch(part.strip()) for part in value.split(b","))
