"""Paths of requests: one canonical form, which is both what is matched and what is forwarded, and patterns over its segments.

A canonical path is itself a path as it goes over the wire: `%41` is written `A`, `%c3` as `%C3`, and what may not stand in a path as
an escape. What servers are known to read in more than one way is refused, not repaired. Matching looks at the segments with their
escapes decoded once, which is what a server sees that decodes once; the encoded slash alone stays `%2F` and matches only where a
rule says so.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_PATH = 8192
MAX_SEGMENTS = 256
MAX_DEEP = 4
"""How many `**` a pattern may have."""

_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_MAY_STAND = frozenset("!$&'()*+,=:@")
"""Delimiters that may stand in a path as themselves; some servers do not take them for the same as their escapes, so each stays as it came."""
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_TWICE = re.compile(r"%25[0-9A-Fa-f]{2}")
_SPECIAL = frozenset("/\\.;%?#")


class PathRefused(ValueError):
    """The path can be read in more than one way, or is none: `cause` says how."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


def canonical_path(raw: str) -> str:
    """The form that is decided on and forwarded; `raw` is the target's path without its query. Raises `PathRefused`.

    Canonical already is what it returns: it answers the same for it. Refused are what does not begin with `/`, empty segments, `.`
    and `..` in any writing, `;`, backslashes, control characters, escapes that are none or escape an escape, octets that are not
    UTF-8, and letters that compatibility forms turn into one of these.
    """
    if not raw.startswith("/"):
        raise PathRefused("it does not begin with a slash")
    if len(raw) > MAX_PATH:
        raise PathRefused(f"it is longer than {MAX_PATH} characters")
    if raw == "/":
        return raw
    parts = raw[1:].split("/")
    if len(parts) > MAX_SEGMENTS:
        raise PathRefused(f"it has more than {MAX_SEGMENTS} segments")
    if "" in parts[:-1]:
        raise PathRefused("it has an empty segment")
    path = "/" + "/".join(map(_canonical_segment, parts))
    if len(path) > MAX_PATH:
        raise PathRefused(f"it is longer than {MAX_PATH} characters")
    return path


def _canonical_segment(raw: str) -> str:
    if _UNRESERVED.issuperset(raw):
        if raw in (".", ".."):
            raise PathRefused("it has a dot segment")
        return raw
    made: list[str] = []
    at = 0
    while at < len(raw):
        letter = raw[at]
        if letter == "%":
            match = _ESCAPE.match(raw, at)
            if match is None:
                raise PathRefused("it has a percent sign that begins no escape")
            value = chr(int(match[1], 16))
            made.append(value if value in _UNRESERVED else f"%{match[1].upper()}")
            at += 3
            continue
        if not "\x21" <= letter <= "\x7e" or letter in "?#":
            raise PathRefused("it has a character that may not stand in a path")
        made.append(letter if letter in _UNRESERVED or letter in _MAY_STAND else f"%{ord(letter):02X}")
        at += 1
    segment = "".join(made)
    if _TWICE.search(segment):
        raise PathRefused("it has an escape of an escape")
    for part in segment.split("%2F"):
        _require_plain(part)
    if segment.startswith("%2F") or segment.endswith("%2F") or "%2F%2F" in segment:
        raise PathRefused("it has an empty segment beside an encoded slash")
    return segment


def _require_plain(segment: str) -> None:
    shown = _decoded(segment)
    if shown in (".", ".."):
        raise PathRefused("it has a dot segment")
    if "\\" in shown or ";" in shown:
        raise PathRefused("it has a backslash or a semicolon")
    if shown.isascii():
        if not shown.isprintable():
            raise PathRefused("it has a control character")
        return
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Cf") for letter in shown):
        raise PathRefused("it has a control character")
    plain = unicodedata.normalize("NFKC", shown)
    if sum(letter in _SPECIAL for letter in plain) != sum(letter in _SPECIAL for letter in shown):
        raise PathRefused("it has a letter that some servers take for a delimiter")


def _decoded(segment: str) -> str:
    if "%" not in segment:
        return segment
    octets = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), segment).encode("latin-1")
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        raise PathRefused("its escapes are not UTF-8") from None


def segments_of(path: str) -> tuple[str, ...]:
    """The segments of a canonical path, decoded once; an encoded slash stays `%2F`. `/` has one empty segment, `/a/` ends with one."""
    parts = path[1:].split("/")
    if "%" not in path:
        return tuple(parts)
    return tuple("%2F".join(map(_decoded, part.split("%2F"))) for part in parts)


def split_further(segments: Sequence[str]) -> tuple[str, ...]:
    """The segments as a server sees them that takes an encoded slash for a slash: what is denied is denied in both readings."""
    return tuple(part for segment in segments for part in segment.split("%2F"))


class SegmentGlob(msgspec.Struct, frozen=True):
    """One segment of a pattern: literal pieces with a `*` (any run of characters) between each two."""

    pieces: tuple[str, ...]

    def matches(self, segment: str) -> bool:
        """Whether the segment fits, in time linear in its length: leftmost search of each piece is right for such patterns."""
        first, last = self.pieces[0], self.pieces[-1]
        if len(self.pieces) == 1:
            return segment == first
        if len(segment) < len(first) + len(last) or not segment.startswith(first) or not segment.endswith(last):
            return False
        at, end = len(first), len(segment) - len(last)
        for piece in self.pieces[1:-1]:
            at = segment.find(piece, at, end)
            if at < 0:
                return False
            at += len(piece)
        return True


DEEP = None
"""`**`: any number of segments, none among them."""


class PathPattern(msgspec.Struct, frozen=True):
    """`/simple/*/x`: `*` stands for characters of one segment. `/simple/**`: `/simple` and all below. No other signs."""

    segments: tuple[SegmentGlob | None, ...]

    @classmethod
    def parse(cls, text: str) -> "PathPattern":
        """Reads a pattern, which is a canonical path but for its stars; a star itself is written `%2A`. Raises `PathRefused`."""
        if not text.startswith("/"):
            raise PathRefused("it does not begin with a slash")
        if len(text) > MAX_PATH:
            raise PathRefused(f"it is longer than {MAX_PATH} characters")
        segments: list[SegmentGlob | None] = []
        parts = text[1:].split("/")
        if "" in parts[:-1]:
            raise PathRefused("it has an empty segment")
        for part in parts:
            if part == "**":
                if segments and segments[-1] is DEEP:
                    raise PathRefused("it has `**` twice in a row")
                segments.append(DEEP)
            elif "**" in part:
                raise PathRefused("`**` stands for whole segments")
            else:
                pieces = part.split("*")
                segments.append(SegmentGlob(tuple(_pattern_piece(piece, whole=len(pieces) == 1) for piece in pieces)))
        if len(segments) > MAX_SEGMENTS or segments.count(DEEP) > MAX_DEEP:
            raise PathRefused(f"it has more than {MAX_SEGMENTS} segments, or `**` more than {MAX_DEEP} times")
        return cls(tuple(segments))

    def matches(self, path: str) -> bool:
        """Whether a canonical path fits."""
        return any(PathIndex.of((self,)).find(segments_of(path)))

    @property
    def specificity(self) -> tuple[int, int, int]:
        """The smaller, the more closely it says which paths are meant."""
        deep = self.segments.count(DEEP)
        stars = sum(len(segment.pieces) - 1 for segment in self.segments if segment is not None)
        return deep, stars, -len(self.segments)

    def then(self, *names: str) -> "PathPattern":
        """The pattern with further literal segments behind it."""
        return PathPattern(self.segments + tuple(SegmentGlob((name,)) for name in names))

    def with_suffix(self, suffix: str) -> "PathPattern":
        """The pattern whose last segment goes on with `suffix`; itself where that is `**`."""
        last = self.segments[-1]
        if last is DEEP:
            return self
        return PathPattern((*self.segments[:-1], SegmentGlob((*last.pieces[:-1], last.pieces[-1] + suffix))))

    def __str__(self) -> str:
        return "/" + "/".join(
            "**" if segment is DEEP else "*".join(map(_quoted, segment.pieces)) for segment in self.segments
        )


def _pattern_piece(text: str, *, whole: bool) -> str:
    """A literal piece, decoded; the same is refused as in a path. One beside a star may be a dot."""
    if not text:
        return text
    escaped = "".join(
        letter if letter.isascii() else "".join(f"%{octet:02X}" for octet in letter.encode("utf-8", "replace"))
        for letter in text
    )
    if whole:
        return segments_of("/" + _canonical_segment(escaped))[0]
    return segments_of("/" + _canonical_segment(f"x{escaped}x"))[0][1:-1]


def _quoted(text: str) -> str:
    return "%2F".join(
        "".join(
            letter
            if letter in _UNRESERVED or (letter in _MAY_STAND and letter != "*")
            else "".join(f"%{octet:02X}" for octet in letter.encode())
            for letter in part
        )
        for part in text.split("%2F")
    )


class _Node(Generic[T]):
    __slots__ = ("deep", "ends", "globs", "literals", "loops")

    def __init__(self, loops: bool = False) -> None:
        self.literals: dict[str, _Node[T]] = {}
        self.globs: dict[SegmentGlob, _Node[T]] = {}
        self.deep: _Node[T] | None = None
        self.ends: list[T] = []
        self.loops = loops


class PathIndex(Generic[T]):
    """Many patterns at once, each with what it stands for. Literal segments are looked up; nothing is ever tried twice."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    @staticmethod
    def of(patterns: Iterable[PathPattern]) -> "PathIndex[bool]":
        """An index that tells whether one of the patterns fits."""
        index: PathIndex[bool] = PathIndex()
        for pattern in patterns:
            index.add(pattern, True)
        return index

    def add(self, pattern: PathPattern, value: T) -> None:
        """Adds a pattern."""
        node = self._root
        for segment in pattern.segments:
            if segment is DEEP:
                if node.deep is None:
                    node.deep = _Node(loops=True)
                node = node.deep
            elif len(segment.pieces) == 1:
                node = node.literals.setdefault(segment.pieces[0], _Node())
            else:
                node = node.globs.setdefault(segment, _Node())
        node.ends.append(value)

    def find(self, segments: Sequence[str]) -> Iterator[T]:
        """What the patterns stand for that fit these segments. A pattern is found once, however many ways it fits."""
        active = self._with_deep({id(self._root): self._root})
        for segment in segments:
            reached: dict[int, _Node[T]] = {}
            for node in active.values():
                if node.loops:
                    reached[id(node)] = node
                following = node.literals.get(segment)
                if following is not None:
                    reached[id(following)] = following
                for glob, behind in node.globs.items():
                    if glob.matches(segment):
                        reached[id(behind)] = behind
            if not reached:
                return
            active = self._with_deep(reached)
        for node in active.values():
            yield from node.ends

    @staticmethod
    def _with_deep(nodes: dict[int, _Node[T]]) -> dict[int, _Node[T]]:
        for node in list(nodes.values()):
            if node.deep is not None:
                nodes[id(node.deep)] = node.deep
        return nodes
