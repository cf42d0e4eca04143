"""The name server of a sandbox: one shape of question, a decision, an address of ours, and never a question to anybody else."""

import ipaddress
import struct

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.egress.client_hello import Malformed
from hatchway.egress.dns import Refusal, Responder, canonical
from hatchway.egress.synthetic import NamesExhausted, SyntheticNames, is_synthetic

ALLOWED = {"index.example", "files.index.example"}


def _responder(bound: int = 64) -> tuple[Responder, list[str]]:
    asked: list[str] = []

    def decide(name: str) -> Refusal | None:
        asked.append(name)
        return None if name in ALLOWED else Refusal("no_rule", f"no rule is about {name}")

    return Responder(SyntheticNames(bound), decide), asked


def _ask(name: str, kind: str = "A", *, edns: bool = False, responder: Responder | None = None) -> dns.message.Message:
    query = dns.message.make_query(name, kind, use_edns=0 if edns else -1)
    outcome = (responder or _responder()[0]).answer(query.to_wire())
    assert outcome.answer is not None
    assert len(outcome.answer) <= 512
    answer = dns.message.from_wire(outcome.answer)
    assert query.is_response(answer)
    return answer


def _raw(*, flags: int = 0x0100, counts: tuple[int, int, int, int] = (1, 0, 0, 0), body: bytes) -> bytes:
    return struct.pack(">6H", 7, flags, *counts) + body


def _name(*labels: bytes) -> bytes:
    return b"".join(bytes((len(label),)) + label for label in labels) + b"\x00"


QUESTION = _name(b"index", b"example") + struct.pack(">2H", 1, 1)


def test_an_allowed_name_gets_an_address_of_the_synthetic_range_and_always_the_same():
    responder, _ = _responder()
    first, second = (_ask("index.example", responder=responder) for _ in range(2))
    assert first.rcode() == dns.rcode.NOERROR
    address = first.answer[0][0].address
    assert is_synthetic(address)
    assert second.answer[0][0].address == address
    assert _ask("index.example").answer[0][0].address == address, "another sandbox, or a later process"


def test_the_case_of_the_question_comes_back_and_does_not_matter():
    responder, _ = _responder()
    mixed = _ask("InDeX.ExAmPlE", responder=responder)
    assert str(mixed.question[0].name) == "InDeX.ExAmPlE."
    assert mixed.answer[0][0].address == _ask("index.example", responder=responder).answer[0][0].address


def test_a_denied_name_is_refused_and_says_why():
    answer = _ask("other.example", edns=True)
    assert answer.rcode() == dns.rcode.REFUSED
    assert not answer.answer
    (option,) = answer.options
    assert isinstance(option, dns.edns.EDEOption)
    assert option.code == dns.edns.EDECode.BLOCKED
    assert option.text == "blocked by policy: no rule is about other.example"


def test_d03_a_name_that_carries_data_is_decided_here_and_asked_of_nobody():
    responder, asked = _responder()
    label = "c2VjcmV0LWRhdGEtMDEyMzQ1Njc4OQ"
    assert _ask(f"{label}.evil.example", responder=responder).rcode() == dns.rcode.REFUSED
    assert asked == [f"{label.lower()}.evil.example"], (
        "the decision is a function call; the room imports no client of DNS"
    )


@pytest.mark.parametrize("kind", ["HTTPS", "SVCB", "AAAA"])
def test_d11_types_that_would_lead_around_the_address_have_no_data(kind):
    answer = _ask("index.example", kind)
    assert answer.rcode() == dns.rcode.NOERROR
    assert not answer.answer


@pytest.mark.parametrize("kind", ["HTTPS", "AAAA", "TXT", "PTR"])
def test_d11_a_denied_name_is_refused_for_every_type(kind):
    assert _ask("other.example", kind).rcode() == dns.rcode.REFUSED


@pytest.mark.parametrize(
    "labels",
    [
        (b"evil\x00", b"index", b"example"),
        (b"evil.index", b"example"),
        (b"index.example",),
        (b"index", b"example\x00"),
        (b"index ", b"example"),
        (b"index\\046example", b"example"),
        (b"*", b"index", b"example"),
    ],
)
def test_d13_labels_are_compared_as_octets(labels):
    responder, asked = _responder()
    outcome = responder.answer(_raw(body=_name(*labels) + struct.pack(">2H", 1, 1)))
    assert outcome.answer is not None
    assert dns.message.from_wire(outcome.answer, ignore_trailing=True).rcode() == dns.rcode.REFUSED
    assert outcome.refusal is not None
    assert outcome.refusal.reason == "dns_name"
    assert not asked
    assert "\x00" not in outcome.name


@pytest.mark.parametrize("label", ["index\u200b", "ｉｎｄｅｘ", "índex", "index\u00ad"])
def test_d15_names_that_another_reading_would_make_allowed_are_no_names(label):
    responder, asked = _responder()
    outcome = responder.answer(_raw(body=_name(label.encode(), b"example") + struct.pack(">2H", 1, 1)))
    assert outcome.refusal is not None
    assert outcome.refusal.reason == "dns_name"
    assert not asked


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.0.0.1", "0177.1", "x.0x7f", "x.1"])
def test_n02_numbers_are_no_names(host):
    with pytest.raises(Malformed):
        canonical(tuple(part.encode() for part in host.split(".")))


@pytest.mark.parametrize("kind", ["TXT", "NULL", "ANY", "MX", "SRV", "CNAME", "NS", "SOA"])
def test_d17_nothing_else_than_addresses_is_answered(kind):
    answer = _ask("index.example", kind)
    assert answer.rcode() == dns.rcode.REFUSED
    assert not answer.answer


def test_d18_only_addresses_that_were_given_out_have_names():
    responder, _ = _responder()
    address = _ask("index.example", responder=responder).answer[0][0].address
    reverse = ipaddress.ip_address(address).reverse_pointer
    found = _ask(reverse, "PTR", responder=responder)
    assert str(found.answer[0][0].target) == "index.example."
    for other in ("9.9.18.198.in-addr.arpa", "8.8.8.8.in-addr.arpa", "d.a.t.a.ip6.arpa", "x.18.198.in-addr.arpa"):
        assert _ask(other, "PTR", responder=responder).rcode() == dns.rcode.REFUSED


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (_raw(counts=(2, 0, 0, 0), body=QUESTION + QUESTION), dns.rcode.FORMERR),
        (_raw(counts=(0, 0, 0, 0), body=b""), dns.rcode.FORMERR),
        (_raw(counts=(1, 1, 0, 0), body=QUESTION), dns.rcode.FORMERR),
        (_raw(counts=(1, 0, 1, 0), body=QUESTION), dns.rcode.FORMERR),
        (_raw(body=QUESTION + b"junk"), dns.rcode.FORMERR),
        (_raw(flags=0x2900, body=QUESTION), dns.rcode.NOTIMP),
        (_raw(flags=0x2000, body=QUESTION), dns.rcode.NOTIMP),
        (_raw(flags=0x0300, body=QUESTION), dns.rcode.FORMERR),
        (_raw(body=_name(b"index", b"example") + struct.pack(">2H", 1, 3)), dns.rcode.REFUSED),
        (_raw(body=_name(b"index", b"example") + struct.pack(">2H", 1, 255)), dns.rcode.REFUSED),
        (_raw(counts=(1, 0, 0, 1), body=QUESTION + b"\x00" + struct.pack(">2HIH", 250, 255, 0, 0)), dns.rcode.FORMERR),
        (_raw(counts=(1, 0, 0, 1), body=QUESTION + b"\x00" + struct.pack(">2HIH", 41, 512, 0, 9)), dns.rcode.FORMERR),
        (_raw(counts=(1, 0, 0, 1), body=QUESTION + b"\x00" + struct.pack(">2HIH", 41, 512, 1 << 16, 0)), None),
    ],
)
def test_d20_one_plain_question_or_none(message, code):
    responder, asked = _responder()
    outcome = responder.answer(message)
    assert outcome.answer is not None
    assert not asked
    if code is None:
        assert dns.message.from_wire(outcome.answer).rcode() == dns.rcode.BADVERS
    else:
        assert outcome.answer[3] & 15 == code


@pytest.mark.parametrize("kind", [251, 252, 255])
def test_d20_transfers_are_refused(kind):
    outcome = _responder()[0].answer(_raw(body=_name(b"index", b"example") + struct.pack(">2H", kind, 1)))
    assert outcome.answer is not None
    assert outcome.answer[3] & 15 == dns.rcode.REFUSED


def test_d20_a_response_is_no_question_and_gets_no_answer():
    responder, asked = _responder()
    assert responder.answer(_raw(flags=0x8180, body=QUESTION)).answer is None
    assert not asked


def test_d21_the_table_is_bounded_and_never_binds_an_address_anew():
    names = SyntheticNames(256)
    bound = {f"n{number}.wild.example": names.bind(f"n{number}.wild.example") for number in range(256)}
    assert len(set(bound.values())) == 256
    with pytest.raises(NamesExhausted):
        names.bind("one-more.wild.example")
    for name, address in bound.items():
        assert names.bind(name) == address
        assert names.name_of(str(address)) == name


def test_d21_a_full_table_is_told_to_the_client():
    responder, _ = _responder(bound=1)
    _ask("index.example", responder=responder)
    answer = _ask("files.index.example", edns=True, responder=responder)
    assert answer.rcode() == dns.rcode.REFUSED
    assert "1 names have addresses" in answer.options[0].text


def test_names_known_before_leave_half_of_the_table_for_others():
    names = SyntheticNames(10)
    names.bind_all(f"n{number}.example" for number in range(50))
    assert len(names) == 5


def test_two_names_on_one_address_keep_one_each(monkeypatch):
    monkeypatch.setattr("hatchway.egress.synthetic._home", lambda name: int(ipaddress.ip_address("198.19.255.254")))
    names = SyntheticNames(3)
    found = {str(names.bind(name)) for name in ("a.example", "b.example", "c.example")}
    assert found == {"198.19.255.254", "198.18.0.1", "198.18.0.2"}
    assert not names.is_home("d.example", "198.19.255.254")


@pytest.mark.parametrize(
    "body",
    [
        b"\xc0\x0c" + struct.pack(">2H", 1, 1),
        b"\x05index\xc0\x0c" + struct.pack(">2H", 1, 1),
        b"\x40" + b"a" * 64 + b"\x00" + struct.pack(">2H", 1, 1),
        b"\x3f" + b"a" * 10,
        b"",
        _name(*[b"a" * 60] * 4, b"a" * 12) + struct.pack(">2H", 1, 1),
        _name(b"index", b"example"),
    ],
)
def test_d24_pointers_and_lengths_beyond_the_end_are_no_question(body):
    responder, asked = _responder()
    outcome = responder.answer(_raw(body=body))
    assert outcome.answer is not None
    assert outcome.answer[3] & 15 == dns.rcode.FORMERR
    assert not asked


def test_d24_more_than_512_octets_are_no_question():
    query = dns.message.make_query(
        "index.example", "A", use_edns=0, options=[dns.edns.GenericOption(65001, b"x" * 600)]
    )
    outcome = _responder()[0].answer(query.to_wire())
    assert outcome.answer is not None
    assert outcome.answer[3] & 15 == dns.rcode.FORMERR


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_answered_or_dropped(message):
    outcome = _responder()[0].answer(message)
    if outcome.answer is not None:
        assert len(outcome.answer) <= 512
        dns.message.from_wire(outcome.answer)


@given(st.lists(st.binary(min_size=1, max_size=63), min_size=1, max_size=4), st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_name_is_decided_on_is_the_name_that_was_asked(labels, edns):
    """A library reads the same octets in its own way: where it finds an allowed name, so did we, and the other way round."""
    body = _name(*labels) + struct.pack(">2H", 1, 1) + (b"\x00" + struct.pack(">2HIH", 41, 1232, 0, 0) if edns else b"")
    message = _raw(counts=(1, 0, 0, int(edns)), body=body)
    responder, asked = _responder()
    responder.answer(message)
    if asked:
        parsed = dns.message.from_wire(message)
        assert str(parsed.question[0].name).lower() == asked[0] + "."
