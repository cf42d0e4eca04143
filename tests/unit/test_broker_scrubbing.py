"""A secret in a response: found in every form that services echo it in, however it is cut, and nothing else is changed or delayed."""

import base64
import contextlib
import html
import json
import os
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.broker.scrubbing import Form, Forms, Scrubber, scrubbed

SECRET = b'ghp_C4n4ry/Secret+Value="quoted"&<s>\\end'
FORMS = Forms(SECRET)
TEXT = SECRET.decode()

ENCODINGS = {
    "bare": SECRET,
    "percent": urllib.parse.quote(TEXT, safe="").encode(),
    "percent, as in a form": urllib.parse.quote_plus(TEXT).encode(),
    "percent, slashes left": urllib.parse.quote(TEXT).encode(),
    "percent in lower case": b"".join(b"%%%02x" % octet for octet in SECRET),
    "percent, every character": b"".join(b"%%%02X" % octet for octet in SECRET),
    "percent twice": urllib.parse.quote(urllib.parse.quote(TEXT, safe=""), safe="").encode(),
    "JSON": json.dumps(TEXT)[1:-1].encode(),
    "JSON, slashes escaped": json.dumps(TEXT)[1:-1].replace("/", "\\/").encode(),
    "JSON, every character": "".join(f"\\u{ord(letter):04x}" for letter in TEXT).encode(),
    "JSON in JSON": json.dumps(json.dumps(TEXT))[3:-3].encode(),
    "HTML": html.escape(TEXT).encode(),
    "HTML, numbers": "".join(f"&#{ord(letter)};" for letter in TEXT).encode(),
    "hexadecimal": SECRET.hex().encode(),
    "HEXADECIMAL": SECRET.hex().upper().encode(),
    "UTF-16": TEXT.encode("utf-16-le"),
    "backslashes and x": "".join(f"\\x{ord(letter):02x}" for letter in TEXT).encode(),
}


def leaks(output: bytes, secret: bytes = SECRET) -> bool:
    """Whether a run of eight octets of the secret can be had from an output, by undoing what a reader would."""
    seen = [
        output,
        urllib.parse.unquote_to_bytes(output),
        html.unescape(output.decode("latin-1")).encode("latin-1", "replace"),
    ]
    for before in range(4):
        cut = output[before:]
        for alphabet in (b"+/", b"-_"):
            octets = bytes(octet for octet in cut if chr(octet).isalnum() or octet in alphabet)
            seen.append(base64.b64decode(octets[: len(octets) // 4 * 4], altchars=alphabet))
    with contextlib.suppress(ValueError):
        seen.append(bytes.fromhex(output.decode()))
    runs = [secret[at : at + 8] for at in range(len(secret) - 7)]
    return any(run in text for run in runs for text in seen)


@pytest.mark.parametrize("name", ENCODINGS)
def test_c03_every_encoding_is_found(name: str) -> None:
    around = b"before " + ENCODINGS[name] + b" behind"
    clean = scrubbed(FORMS, around)
    assert clean == b"before " + b"*" * len(ENCODINGS[name]) + b" behind"


@pytest.mark.parametrize("alphabet", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes])
@pytest.mark.parametrize("before", [b"", b"u", b"us", b"user:", b"x" * 50])
def test_c03_base64_at_every_alignment(alphabet: object, before: bytes) -> None:
    encoded = alphabet(before + SECRET + b"tail")  # type: ignore[operator]
    assert leaks(encoded)
    clean = scrubbed(FORMS, b'{"auth": "' + encoded + b'"}')
    assert not leaks(clean)
    assert clean.startswith(b'{"auth": "')
    assert len(clean) == len(encoded) + 12


def test_c03_basic_pair_is_found() -> None:
    pair = base64.b64encode(b"bot:" + SECRET)
    assert not leaks(scrubbed(FORMS, b"Authorization: Basic " + pair + b"\r\n"))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ENCODINGS)),
    st.binary(max_size=40),
    st.lists(st.integers(1, 23), min_size=1, max_size=30),
)
def test_c03_however_it_is_cut(name: str, around: bytes, cuts: list[int]) -> None:
    body = around + ENCODINGS[name] + around
    whole = scrubbed(FORMS, body)
    scrubber, out, at = Scrubber(FORMS), b"", 0
    for size in [*cuts, *([7] * len(body))]:
        out += scrubber.feed(body[at : at + size])
        at += size
    out += scrubber.finish()
    assert out == whole
    assert len(out) == len(body)
    assert b"*" * min(len(ENCODINGS[name]), 8) in out


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_what_has_no_secret_passes_as_it_is(body: bytes, size: int) -> None:
    scrubber = Scrubber(FORMS)
    out = b"".join(scrubber.feed(body[at : at + size]) for at in range(0, len(body), size)) + scrubber.finish()
    assert out == body or SECRET[:8] in body


def test_an_event_is_not_held_back() -> None:
    """A stream of events is passed on at once: only what may become the secret waits."""
    scrubber = Scrubber(FORMS)
    assert scrubber.feed(b"data: {}\n\n") == b"data: {}\n\n"
    assert scrubber.feed(b"data: " + SECRET[:10]) == b"data: "
    assert scrubber.feed(b"!\n\n") == SECRET[:10] + b"!\n\n"


def test_one_octet_at_a_time() -> None:
    scrubber = Scrubber(FORMS)
    body = b"x" + SECRET + b"y" + SECRET
    out = b"".join(scrubber.feed(body[at : at + 1]) for at in range(len(body))) + scrubber.finish()
    assert out == b"x" + b"*" * len(SECRET) + b"y" + b"*" * len(SECRET)


@pytest.mark.parametrize("size", [129, 300, 1000, 4096])
def test_parts_of_a_long_secret_are_found(size: int) -> None:
    secret = base64.b64encode(os.urandom(size))[:size]
    forms = Forms(secret)
    assert scrubbed(forms, secret) == b"*" * size
    assert not leaks(scrubbed(forms, base64.b64encode(secret)), secret[100:])
    half = scrubbed(forms, secret[: size * 3 // 4])
    assert half.count(b"*") >= size // 8


def test_a_hostile_body_costs_no_more_than_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings of the secret without end: each is compared as far as it goes, and no further."""
    compared = 0
    end = Form.end

    def counted(form: Form, text: bytes, start: int) -> int | None:
        nonlocal compared
        compared += 1
        return end(form, text, start)

    monkeypatch.setattr(Form, "end", counted)
    body = SECRET[:-1] * 800
    scrubbed(FORMS, body)
    once, compared = compared, 0
    scrubbed(FORMS, body * 4)
    assert 0 < compared < 5 * once


def test_nothing_shows_what_it_is() -> None:
    assert TEXT not in repr(FORMS)
