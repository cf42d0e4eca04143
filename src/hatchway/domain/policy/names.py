"""Host names: the one grammar of guests and policies, and patterns that match whole labels.

A canonical name is what DNS, certificates and `Host` are compared with as text: A-labels of letters, digits and hyphens in lower
case, at least two, the last one no number, no dot at the end. Whatever needs more interpretation than that is refused: a resolver
somewhere else would interpret it differently.
"""

import re
import unicodedata

import msgspec

MAX_NAME = 253
MAX_LABEL = 63

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_TOGETHER = frozenset(
    {"LATIN", "CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "HANGUL", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"}
)
"""Scripts that are written together (UTS 39, highly restrictive)."""


class NameRefused(ValueError):
    """The text is no canonical name and cannot be made one: `cause`, and what to write instead."""

    def __init__(self, cause: str, remedy: str = "Write a name of A-labels, such as index.example.") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


def canonical_host(text: str) -> str:
    """The canonical form: lower case, one dot at the end taken off. Raises `NameRefused`.

    Refused are addresses in whatever notation (a name whose last label `inet_aton` would read as a number), names of one label,
    labels that are not letters, digits and inner hyphens in ASCII, and names beyond 253 octets.
    """
    if len(text) > MAX_NAME + 1:
        raise NameRefused(f"it is longer than {MAX_NAME} characters")
    if not text.isascii():
        raise NameRefused("it has characters beyond ASCII" + _hint(text))
    name = text.lower()
    name = name[:-1] if name.endswith(".") else name
    if not name:
        raise NameRefused("it is empty")
    if len(name) > MAX_NAME:
        raise NameRefused(f"it is longer than {MAX_NAME} characters")
    labels = name.split(".")
    for label in labels:
        if not label:
            raise NameRefused("it has an empty label")
        if len(label) > MAX_LABEL:
            raise NameRefused(f"a label is longer than {MAX_LABEL} characters")
        if not _LABEL.fullmatch(label):
            raise NameRefused(
                f"the label {label!r} is not made of letters, digits and hyphens between them",
                "Write the bare name: no scheme, port, path, user or escape.",
            )
    if _NUMBER.fullmatch(labels[-1]):
        raise NameRefused(
            "its last label is a number, so that it may be read as an address", "Addresses are given as `cidrs`."
        )
    if len(labels) < 2:
        raise NameRefused("it has one label only, which every network resolves in its own way", "Write the full name.")
    return name


def is_canonical(text: str) -> bool:
    """Whether the text is its own canonical form."""
    try:
        return canonical_host(text) == text
    except NameRefused:
        return False


def require_one_script(name: str) -> None:
    """Raises `NameRefused` for an A-label that is none, or whose letters are of scripts that are not written together."""
    for label in name.split("."):
        if not label.startswith("xn--"):
            continue
        try:
            shown = label[4:].encode("ascii").decode("punycode")
            again = shown.encode("punycode").decode("ascii")
        except (UnicodeError, OverflowError, ValueError):
            raise NameRefused(f"the label {label!r} is no valid A-label") from None
        if shown.isascii() or again != label[4:] or unicodedata.normalize("NFC", shown).lower() != shown:
            raise NameRefused(f"the label {label!r} is no valid A-label")
        scripts = {_script(letter) for letter in shown if letter.isalpha()}
        if len(scripts) > 1 and not scripts <= _TOGETHER:
            raise NameRefused(
                f"the label {label!r} mixes scripts ({', '.join(sorted(scripts)).lower()}), so that it may look like another name",
                "Use a name of one script.",
            )


def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split()[0]


def _hint(text: str) -> str:
    """The A-labels of a name, as far as they are plain to see."""
    if not all(letter.isalnum() or letter in ".-" for letter in text):
        return ""
    try:
        labels = [
            part if part.isascii() else "xn--" + part.encode("punycode").decode("ascii")
            for part in unicodedata.normalize("NFC", text).lower().split(".")
        ]
    except UnicodeError:
        return ""
    return f"; as A-labels it is {'.'.join(labels)}"


class HostPattern(msgspec.Struct, frozen=True):
    """`index.example`: that name alone. `*.x.example`: one label before it. `**.x.example`: one or more. The apex is never among them."""

    base: str
    """The canonical name, or what follows the stars."""
    stars: int = 0
    """0, 1 or 2."""

    @classmethod
    def parse(cls, text: str) -> "HostPattern":
        """Reads a pattern; raises `NameRefused`. A star stands for whole labels, at the beginning only."""
        stars = 2 if text.startswith("**.") else 1 if text.startswith("*.") else 0
        rest = text[stars + 1 :] if stars else text
        if "*" in rest:
            raise NameRefused(
                "a star stands for whole labels at the beginning",
                "Write `*.x.example` for one label before x.example, `**.x.example` for one or more.",
            )
        base = canonical_host(rest + ".a" if stars and "." not in rest.rstrip(".") else rest)
        if stars and "." not in rest.rstrip("."):
            raise NameRefused(
                f"it stands for every name below {base.removesuffix('.a')!r}, which anybody may register",
                "Name the domain whose names are meant.",
            )
        require_one_script(base)
        return cls(base, stars)

    def matches(self, host: str) -> bool:
        """Whether a canonical name is one of those."""
        if not self.stars:
            return host == self.base
        if not host.endswith("." + self.base):
            return False
        return self.stars == 2 or "." not in host[: -len(self.base) - 1]

    def covers(self, other: "HostPattern") -> bool:
        """Whether every name of the other is one of these."""
        if not other.stars:
            return self.matches(other.base)
        if not self.stars or (self.stars == 1 and other.stars == 2):
            return False
        return other.base == self.base or (self.stars == 2 and other.base.endswith("." + self.base))

    def overlaps(self, other: "HostPattern") -> bool:
        """Whether some name is one of both."""
        if not other.stars:
            return self.matches(other.base)
        if not self.stars:
            return other.matches(self.base)
        if self.base == other.base:
            return True
        return (self.stars == 2 and other.base.endswith("." + self.base)) or (
            other.stars == 2 and self.base.endswith("." + other.base)
        )

    def __str__(self) -> str:
        return f"{'*' * self.stars}.{self.base}" if self.stars else self.base
