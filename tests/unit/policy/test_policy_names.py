"""Host names: one canonical form, and patterns that match whole labels."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.domain.policy.names import HostPattern, NameRefused, canonical_host, require_one_script
from hatchway.domain.policy.suffixes import is_public_suffix, is_shared_suffix, shared_suffix_of

BASES = st.sampled_from(["x.example", "a.x.example", "b.a.x.example", "ax.example", "x.test"])
PATTERNS = st.builds(str.__add__, st.sampled_from(["", "*.", "**."]), BASES).map(HostPattern.parse)
HOSTS = st.builds(str.__add__, st.sampled_from(["", "a.", "b.", "a.b.", "evil"]), BASES)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("index.example", "index.example"),
        ("Index.EXAMPLE", "index.example"),
        ("index.example.", "index.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("1.2.3.example", "1.2.3.example"),
        ("a." * 126 + "a", "a." * 126 + "a"),
    ],
)
def test_t06_case_and_one_dot_at_the_end_make_no_difference(text: str, canonical: str) -> None:
    assert canonical_host(text) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "169.254.43518", "127.0.0.1", "0x7f000001", "a.0x", "a.0x7F", "1.2.3.4.",
        "①②⑦.0.0.1", "127。0。0。1", "[::1]", "::1", "fe80::1%eth0", "a.example:443", "user@a.example", "https://a.example", "a.example/x",
    ],
)  # fmt: skip
def test_n02_addresses_in_any_notation_are_no_names(text: str) -> None:
    with pytest.raises(NameRefused):
        canonical_host(text)


@pytest.mark.parametrize(
    "text",
    [
        "evil\0.example", "evil.example\0.index.example", "a..example", ".a.example", "a.example..", "", ".", "-a.example", "a-.example",
        "a_b.example", "a b.example", "a%2eb.example", "a\\.example", "é.example", "pypi\u200b.example", "ｉndex.example", "index.example\n",
        "a,b.example", "*.example.test", "x" * 64 + ".example", ".".join(["x" * 60] * 5), "localhost", "metadata",
    ],
)  # fmt: skip
def test_d13_d15_what_a_resolver_could_read_otherwise_is_no_name(text: str) -> None:
    with pytest.raises(NameRefused):
        canonical_host(text)


def test_d15_a_name_in_unicode_is_told_its_a_labels() -> None:
    with pytest.raises(NameRefused, match="xn--bcher-kva"):
        canonical_host("bücher.example")


@pytest.mark.parametrize(
    "name", ["xn--pypl-53dc.example", "xn--a-0hc.example", "xn--zz.example", "xn--abc-.example", "xn--.example"]
)
def test_labels_that_mix_scripts_or_are_none_are_no_hosts_of_a_policy(name: str) -> None:
    with pytest.raises(NameRefused):
        HostPattern.parse(name)


@pytest.mark.parametrize("name", ["xn--bcher-kva.example", "xn--e1afmkfd.example", "xn--r8jz45g.example"])
def test_labels_of_scripts_that_are_written_together_are(name: str) -> None:
    require_one_script(name)


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_the_canonical_form_is_canonical(text: str) -> None:
    try:
        name = canonical_host(text)
    except NameRefused:
        return
    assert canonical_host(name) == name
    assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", name)
    assert len(name) <= 253


@pytest.mark.parametrize(
    ("pattern", "host", "matches"),
    [
        ("x.example", "x.example", True),
        ("x.example", "a.x.example", False),
        ("*.x.example", "a.x.example", True),
        ("*.x.example", "x.example", False),
        ("*.x.example", "a.b.x.example", False),
        ("*.x.example", "evilx.example", False),
        ("*.x.example", "a.x.example.test", False),
        ("**.x.example", "a.x.example", True),
        ("**.x.example", "a.b.c.x.example", True),
        ("**.x.example", "x.example", False),
        ("**.x.example", "ax.example", False),
    ],
)
def test_g12_stars_stand_for_whole_labels(pattern: str, host: str, matches: bool) -> None:
    assert HostPattern.parse(pattern).matches(host) is matches


@pytest.mark.parametrize(
    "text",
    ["*", "**", "*.com", "**.test", "a*.x.example", "*a.x.example", "a.*.example", "*.*.x.example", "***.x.example"],
)
def test_g12_other_stars_are_refused(text: str) -> None:
    with pytest.raises(NameRefused):
        HostPattern.parse(text)


def naive(pattern: str, host: str) -> bool:
    if pattern.startswith("**."):
        expression = r"([^.]+\.)+" + re.escape(pattern[3:])
    elif pattern.startswith("*."):
        expression = r"[^.]+\." + re.escape(pattern[2:])
    else:
        expression = re.escape(pattern)
    return re.fullmatch(expression, host) is not None


@given(PATTERNS, PATTERNS, HOSTS)
@settings(max_examples=300, deadline=None)
def test_patterns_match_cover_and_overlap_as_their_names_do(
    pattern: HostPattern, other: HostPattern, host: str
) -> None:
    assert pattern.matches(host) is naive(str(pattern), host)
    assert HostPattern.parse(str(pattern)) == pattern
    assert pattern.overlaps(other) is other.overlaps(pattern)
    if pattern.matches(host) and other.matches(host):
        assert pattern.overlaps(other)
    if pattern.covers(other) and other.matches(host):
        assert pattern.matches(host)


def test_suffixes_of_registries_and_of_services() -> None:
    assert is_public_suffix("co.uk")
    assert is_public_suffix("com")
    assert is_public_suffix("test")
    assert not is_public_suffix("corp.test")
    assert is_shared_suffix("github.io")
    assert not is_public_suffix("github.io")
    assert shared_suffix_of("someone.github.io") == "github.io"
    assert shared_suffix_of("index.example") is None
