"""Takes a secret out of what an upstream answers: as it is, and in the forms in which services echo what they were sent. Pure.

Looked for are, in any mixture within one occurrence: the bare characters, percent encoding (once and twice), escapes of JSON and of HTML;
and each by itself: hexadecimal digits, UTF-16, and Base64 in both alphabets, at every alignment (so that a pair of Basic is found
too) and with line ends in it. An occurrence is overwritten octet for octet, so that lengths stay what was announced.
Only what may still become an occurrence is held back between two pieces: a stream of events is not delayed by it.

What a service encodes in another way (compressed, encrypted, spelled backwards) is not found: such a service is not one to give
a secret to.
"""

import base64
import re
from collections.abc import Iterable

MASK = b"*"
WHOLE = 128
"""A secret that is longer is looked for in pieces, at least so long: a part of it is found where not all of it comes back."""
PIECES = 8

_PREFIX = 4
"""Elements by which an occurrence is found; the rest is compared then."""
_NAMED = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    '"': "&quot;",
    "'": "&apos;",
    " ": "&nbsp;",
    "/": "&sol;",
    "+": "&plus;",
    "=": "&equals;",
}
_ESCAPED = "\"\\/'"
_LINE_ENDS = (b"", b"\r\n", b"\n", b"\\r\\n", b"\\n")

Element = tuple[bytes, ...]
"""What may stand at one place of an occurrence."""


class Form:
    """One form of a secret: a sequence of elements."""

    __slots__ = ("elements", "longest")

    def __init__(self, elements: Iterable[Element]) -> None:
        self.elements = tuple(elements)
        self.longest = sum(max(map(len, element)) for element in self.elements)

    def end(self, text: bytes, start: int) -> int | None:
        """Where an occurrence that begins at `start` ends, None without one, and -1 when the text ends before that is known."""
        places = {start}
        undecided = False
        for element in self.elements:
            following: set[int] = set()
            for place in places:
                for one in element:
                    if text.startswith(one, place):
                        following.add(place + len(one))
                    elif len(text) - place < len(one) and one.startswith(text[place:]):
                        undecided = True
            if not following:
                return -1 if undecided else None
            places = following
        return max(places)


class Forms:
    """Everything that a secret is looked for as. It holds the secret: keep it no longer than that."""

    def __init__(self, secret: bytes) -> None:
        """`secret` is printable ASCII."""
        size = len(secret) if len(secret) <= WHOLE else max(WHOLE // 2, -(-len(secret) // PIECES))
        pieces = [secret[at : at + size] for at in range(0, len(secret), size)]
        if len(pieces) > 1 and len(pieces[-1]) < size // 2:
            pieces[-2:] = [pieces[-2] + pieces[-1]]
        self.forms = [form for piece in pieces for form in _forms(piece)]
        self.longest = max(form.longest for form in self.forms)
        self.found = re.compile(b"|".join(sorted({_prefix(form) for form in self.forms})), re.DOTALL)
        first = {one[:1] for form in self.forms for one in form.elements[0]}
        self.first = re.compile(b"[" + b"".join(re.escape(octet) for octet in sorted(first)) + b"]")

    def __repr__(self) -> str:
        return "Forms(hidden)"


class Scrubber:
    """Scrubs one stream of octets."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._came = b""
        """What is held back, as it came."""
        self._masked = bytearray()
        """The same, as it goes on."""
        self.found = 0
        """Occurrences that were taken out."""

    def feed(self, data: bytes) -> bytes:
        """Takes a piece; returns what can go on."""
        came = self._came + data
        masked = self._masked + data
        undecided = len(came)
        at = 0
        while (match := self._forms.found.search(came, at)) is not None:
            start = at = match.start()
            for form in self._forms.forms:
                end = form.end(came, start)
                if end is not None and end > 0:
                    masked[start:end] = MASK * (end - start)
                    self.found += 1
            at += 1
        for match in self._forms.first.finditer(came, max(0, len(came) - self._forms.longest)):
            if any(form.end(came, match.start()) == -1 for form in self._forms.forms):
                undecided = match.start()
                break
        self._came, self._masked = came[undecided:], masked[undecided:]
        return bytes(masked[:undecided])

    def finish(self) -> bytes:
        """What was held back, when nothing more comes."""
        rest, self._masked, self._came = bytes(self._masked), bytearray(), b""
        return rest


def scrubbed(forms: Forms, text: bytes) -> bytes:
    """A text that is there as a whole."""
    scrubber = Scrubber(forms)
    return scrubber.feed(text) + scrubber.finish()


def _forms(secret: bytes) -> list[Form]:
    text = secret.decode("ascii")
    found = [
        Form(_written(letter) for letter in text),
        Form((digit.lower().encode(), digit.upper().encode()) for digit in secret.hex()),
        Form((letter.encode("utf-16-le"),) for letter in text),
        Form((letter.encode("utf-16-be"),) for letter in text),
    ]
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + secret).rstrip(b"=")
        # The characters at both ends have bits of what stands before and behind.
        begin = (before * 8 + 5) // 6
        end = (before + len(secret)) * 8 // 6
        elements: list[Element] = []
        for octet in encoded[begin:end]:
            if elements:
                elements.append(_LINE_ENDS)
            elements.append(_in_base64(bytes((octet,))))
        found.append(Form(elements))
    return found


def _written(letter: str) -> Element:
    """How one character may be written."""
    number = ord(letter)
    spellings = [
        letter,
        f"\\\\u{number:04x}",
        f"\\u{number:04x}",
        f"\\u{number:04X}",
        f"\\x{number:02x}",
        f"\\x{number:02X}",
    ]
    spellings += [f"%{number:02x}", f"%{number:02X}", f"%25{number:02x}", f"%25{number:02X}"]
    spellings += [
        f"&#{number};",
        f"&#{number:03};",
        f"&#x{number:x};",
        f"&#x{number:X};",
        f"&#x{number:02x};",
        f"&#x{number:02X};",
    ]
    if letter in _NAMED:
        spellings.append(_NAMED[letter])
    if letter in _ESCAPED:
        spellings += [f"\\{letter}", f"\\\\{letter}", f"\\\\\\{letter}"]
    if letter == " ":
        spellings.append("+")
    return tuple(spelling.encode() for spelling in dict.fromkeys(spellings))


def _in_base64(letter: bytes) -> Element:
    if letter == b"+":
        return (b"+", b"-", b"%2B", b"%2b", b"\\u002B", b"\\u002b", b"&#43;", b"&plus;")
    if letter == b"/":
        return (b"/", b"_", b"%2F", b"%2f", b"\\/", b"\\u002F", b"\\u002f", b"&#47;", b"&sol;", b"&#x2F;")
    return (letter,)


def _prefix(form: Form) -> bytes:
    return b"".join(b"(?:" + b"|".join(re.escape(one) for one in element) + b")" for element in form.elements[:_PREFIX])
