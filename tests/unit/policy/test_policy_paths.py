"""Paths: what was matched is what is forwarded, and every server that decodes once or not at all sees the same."""

import re
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.paths import (
    PathIndex,
    PathPattern,
    PathRefused,
    SegmentGlob,
    canonical_path,
    segments_of,
    split_further,
)


@pytest.mark.parametrize(
    ("raw", "canonical"),
    [
        ("/", "/"),
        ("/simple/x/", "/simple/x/"),
        ("/%73imple/%7euser", "/simple/~user"),
        ("/a%2dfile%2Etxt", "/a-file.txt"),
        ("/torch-2.0%2bcpu.whl", "/torch-2.0%2Bcpu.whl"),
        ("/torch-2.0+cpu.whl", "/torch-2.0+cpu.whl"),
        ("/b%c3%bccher", "/b%C3%BCcher"),
        ("/a%20b", "/a%20b"),
        ("/{x}|y", "/%7Bx%7D%7Cy"),
        ("/100%25", "/100%25"),
        ("/@scope%2fname", "/@scope%2Fname"),
        ("/...", "/..."),
        ("/.hidden/x..y", "/.hidden/x..y"),
    ],
)
def test_h28_the_canonical_form(raw: str, canonical: str) -> None:
    assert canonical_path(raw) == canonical


@pytest.mark.parametrize(
    "raw",
    [
        "", "x", "*", "//", "//x", "/a//b", "/simple/../upload", "/simple/./x", "/..", "/.", "/a/..", "/%2e%2e/x", "/%2e/x", "/.%2e/x", "/%2E%2e",
        "/a%2f..%2fb", "/a%2F%2e%2e", "/%2Fx", "/a%2F", "/a%2F%2Fb", "/a;b=/..", "/a;x", "/a%3bx", "/a\\b", "/a%5cb", "/a%5C..%5Cb",
        "/%00", "/a%0d%0ax", "/a%7f", "/\x00", "/a b", "/a\tb", "/é", "/%252e%252e/x", "/%25%32%65", "/a%252Fb", "/%", "/%2", "/%zz", "/a%u002e",
        "/%c0%ae%c0%ae/x", "/%c0%af", "/%ff", "/%ed%a0%80", "/%e2%80%ae", "/a%ef%bc%8fb", "/%ef%bc%8e%ef%bc%8e", "/a%e2%80%a6", "/a%ef%bc%85b",
        "/a?b", "/a#b", "/" + "a" * 9000, "/" + "a/" * 300, "/x%c2%85",
    ],
)  # fmt: skip
def test_h28_what_servers_read_in_more_than_one_way_is_refused(raw: str) -> None:
    with pytest.raises(PathRefused):
        canonical_path(raw)


WIRE = st.text("aZ0-._~!$&'()*+,=:@/%2eEfF5cCbB{}|\"<>^`\\;?#c3ü \x00", max_size=30).map(lambda text: "/" + text)


@given(WIRE)
@settings(max_examples=500, deadline=None)
def test_h28_what_is_forwarded_is_canonical_and_decodes_to_what_was_matched(raw: str) -> None:
    try:
        path = canonical_path(raw)
    except PathRefused:
        return
    assert canonical_path(path) == path
    assert re.fullmatch(r"(/([A-Za-z0-9._~!$&'()*+,=:@-]|%[0-9A-F]{2})*)+", path)
    # A server that decodes once, before or after it splits at slashes, or that resolves dots, comes to what was matched.
    segments = segments_of(path)
    once = unquote(path, errors="strict")
    assert once == unquote(raw, errors="strict")
    assert [unquote(part) for part in path[1:].split("/")] == [segment.replace("%2F", "/") for segment in segments]
    assert once[1:].split("/") == list(split_further(segments))
    assert not {".", ".."} & set(once.split("/"))
    assert "//" not in once
    assert not set(";\\?#\0") & set(unquote(path.replace("%3F", "").replace("%23", "")))
    assert unquote(once) == once  # decoding twice changes nothing


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("/simple/**", "/simple", True),
        ("/simple/**", "/simple/", True),
        ("/simple/**", "/simple/x/y", True),
        ("/simple/**", "/simplex", False),
        ("/simple/*/", "/simple/x/", True),
        ("/simple/*/", "/simple/x", False),
        ("/simple/*/", "/simple/x/y/", False),
        ("/a/**/z", "/a/z", True),
        ("/a/**/z", "/a/b/c/z", True),
        ("/a/**/z", "/a/b/c", False),
        ("/*.whl", "/x.whl", True),
        ("/*.whl", "/x/y.whl", False),
        ("/a*b*c", "/abc", True),
        ("/a*b*c", "/axxbyyc", True),
        ("/a*b*c", "/acb", False),
        ("/ab*ba", "/aba", False),
        ("/**", "/", True),
        ("/", "/", True),
        ("/", "/x", False),
        ("/b\u00fccher/*", "/b%C3%BCcher/x", True),
        ("/a%2Ab", "/a*b", True),
        ("/a%2Ab", "/axb", False),
        ("/%73imple", "/simple", True),
        ("/@*%2F*", "/@scope%2Fname", True),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert PathPattern.parse(pattern).matches(path) is matches


@pytest.mark.parametrize(
    "text",
    [
        "",
        "simple",
        "/a//b",
        "/a/../b",
        "/a**",
        "/**/**",
        "/%zz",
        "/a?b",
        "/a;b",
        "/**/a/**/b/**/c/**/d/**",
        "/.",
        "/%2e%2e/*",
    ],
)
def test_other_patterns_are_refused(text: str) -> None:
    with pytest.raises(PathRefused):
        PathPattern.parse(text)


def expression(pattern: str) -> str:
    """The pattern as a regular expression over a canonical path: another way to the same answer."""
    made = ""
    for part in pattern[1:].split("/"):
        if part == "**":
            made += "(/[^/]*)*"
        else:
            made += "/" + "[^/]*".join(map(re.escape, part.split("*")))
    return made


SEGMENTS = st.sampled_from(["a", "b", "ab", "*", "a*", "*b", "a*b", "*a*", "ab*ba", "**"])
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=5).map(
    lambda parts: re.sub(r"(/[*][*])+(?=/|$)", "/**", "/" + "/".join(parts))
)
PATHS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6).map(lambda parts: "/" + "/".join(parts))


@given(st.lists(PATTERNS, min_size=1, max_size=6, unique=True), PATHS)
@settings(max_examples=150, deadline=None)
def test_h42_many_patterns_at_once_match_as_each_does_alone(patterns: list[str], path: str) -> None:
    index: PathIndex[str] = PathIndex()
    for pattern in patterns:
        index.add(PathPattern.parse(pattern), pattern)
    found = list(index.find(segments_of(path)))
    assert sorted(found) == sorted(pattern for pattern in patterns if re.fullmatch(expression(pattern), path))
    for pattern in patterns:
        assert str(PathPattern.parse(pattern)) == pattern
        assert PathPattern.parse(pattern).matches(path) is (pattern in found)


class Counting(str):
    """A segment that counts how often it is searched."""

    searched = 0

    def find(self, *where: object) -> int:  # type: ignore[override]  # only counted
        Counting.searched += 1
        return super().find(*where)  # type: ignore[arg-type]


def test_h42_a_pattern_with_many_stars_searches_once_for_each_piece() -> None:
    glob = SegmentGlob(("", *"a" * 50, "b"))
    Counting.searched = 0
    assert not glob.matches(Counting("a" * 49 + "cb"))
    assert Counting.searched <= 50
