"""Placeholders where they may not be: a request that carries one anywhere but in its slot does not leave.

Looked for as they are, percent-decoded (twice), and in what Basic authentication decodes to; in bodies as they are, over the borders of
pieces. What hides one behind an encoding of its own sends a text that is worth nothing: it is replaced nowhere but in its slot.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from urllib.parse import unquote_to_bytes

from hatchway.domain.errors import Forbidden

OVERRIDE_NEEDLES = (b"_method=", b'name="_method"')
"""A form's way to mean another method than the request's."""


def misplaced(credential: str, where: str) -> Forbidden:
    """The error of a placeholder where it may not be."""
    return Forbidden(
        "placeholder_misplaced",
        f"The placeholder of the credential {credential!r} is in {where}, where no secret is put in.",
        "Send it only to the host and in the header that the credential is for; the policy's rule names both.",
        credential=credential,
    )


def find(placeholders: Mapping[str, str], text: str) -> str | None:
    """The credential whose placeholder is in a path, a query or the value of a header; None: none is."""
    for placeholder, credential in placeholders.items():
        if placeholder in text:
            return credential
    if "%" in text:
        decoded = text.encode("latin-1", "replace")
        for _ in range(2):
            decoded = unquote_to_bytes(decoded)
            for placeholder, credential in placeholders.items():
                if placeholder.encode() in decoded:
                    return credential
    return None


def find_in_field(placeholders: Mapping[str, str], value: str) -> str | None:
    """The same, for the value of a header: Basic authentication is decoded."""
    found = find(placeholders, value)
    if found is not None:
        return found
    scheme, _, content = value.partition(" ")
    if scheme.lower() == "basic" and content:
        try:
            decoded = base64.b64decode(content.strip(), validate=False)
        except (binascii.Error, ValueError):
            return None
        return find(placeholders, decoded.decode("latin-1"))
    return None


class Scan:
    """Looks through a body that comes in pieces. What might be the beginning of a needle is held back until it is known."""

    def __init__(self, placeholders: Mapping[str, str], needles: Iterable[bytes] = ()) -> None:
        self._needles = {placeholder.encode(): credential for placeholder, credential in placeholders.items()}
        self._needles.update(dict.fromkeys(needles, ""))
        self._firsts = {needle[:1] for needle in self._needles}
        self._longest = max(map(len, self._needles), default=0)
        self._held = b""

    def take(self, piece: bytes) -> bytes:
        """Returns what may go on now. Raises `Forbidden` (`placeholder_misplaced method_override`)."""
        if not self._needles:
            return piece
        data = self._held + piece if self._held else piece
        for needle, credential in self._needles.items():
            if needle in data:
                if credential:
                    raise misplaced(credential, "the body")
                raise overridden("the body of the form has a field `_method`")
        keep = self._beginning(data)
        self._held = data[len(data) - keep :] if keep else b""
        return data[: len(data) - keep] if keep else data

    def rest(self) -> bytes:
        """What was held back, at the end of the body."""
        held, self._held = self._held, b""
        return held

    def _beginning(self, data: bytes) -> int:
        """How many octets at the end could be the beginning of a needle."""
        start = max(0, len(data) - self._longest + 1)
        for at in range(start, len(data)):
            if data[at : at + 1] in self._firsts:
                tail = data[at:]
                if any(needle.startswith(tail) for needle in self._needles):
                    return len(tail)
        return 0


def overridden(why: str) -> Forbidden:
    """The error of a request that means another method than it says."""
    return Forbidden(
        "method_override",
        f"The request would have the server take another method than its own: {why}.",
        "Send the request with the method that is meant.",
    )
