"""Checking a journal: every kind of change that somebody could make is found, by the command too."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hatchway.audit import lines, ocsf, signing
from hatchway.audit.journal import Journal, Limits
from hatchway.audit.segments import listed, raw_lines
from hatchway.audit.verifying import verify_folder, verify_lines
from hatchway.cli.app import app
from hatchway.wire.audit import MAX_RECORD, Append, Entry

Raws = list[bytes]


def written(folder: Path, count: int = 60, **limits: Any) -> Journal:
    """A journal with that many records, closed again."""
    journal = Journal.open(folder, Limits(**{"head_every": 20, **limits}))
    for number in range(1, count + 1):
        entry = Entry(kind="egress.request", time=1000.0 + number, project="p", sandbox_id="s", data={"n": number})
        journal.append([Append(source="node/a", first=number, entries=(entry,))])
    journal.sign()
    journal.close()
    return journal


def all_lines(folder: Path) -> Raws:
    return [raw for _, path in listed(folder) for raw in raw_lines(path)]


def place(raws: Raws, kind: str, which: int = 0) -> int:
    return [number for number, raw in enumerate(raws) if b'"kind":"%b"' % kind.encode() in raw][which]


def rehashed(raw: bytes, **changes: Any) -> bytes:
    """The line with other values and its own hash put right, as somebody would who knows how."""
    record = json.loads(raw)
    record.update(changes)
    del record["hash"]
    body = json.dumps(record, separators=(",", ":")).encode()
    digest = lines.hashlib.sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body[:-1], digest.encode())


def rechained(raws: Raws, start: int) -> Raws:
    """Every line from there on put right behind the one before: a whole new history, without the key."""
    made = raws[:start]
    for raw in raws[start:]:
        made.append(rehashed(raw, previous=json.loads(made[-1])["hash"]))
    return made


def change_value(raws: Raws) -> Raws:
    raws[30] = raws[30].replace(b'"egress.request"', b'"egress.reqvest"')
    return raws


def change_and_rehash(raws: Raws) -> Raws:
    raws[30] = rehashed(raws[30], decision="allowed")
    return raws


def change_and_rechain(raws: Raws) -> Raws:
    raws[30] = rehashed(raws[30], decision="allowed")
    return rechained(raws, 31)


def leave_one_out(raws: Raws) -> Raws:
    return raws[:30] + raws[31:]


def leave_one_out_and_renumber(raws: Raws) -> Raws:
    rest = [rehashed(raw, sequence=json.loads(raw)["sequence"] - 1) for raw in raws[31:]]
    return rechained(raws[:30] + rest, 30)


def put_one_in(raws: Raws) -> Raws:
    return [*raws[:30], raws[29], *raws[30:]]


def exchange_two(raws: Raws) -> Raws:
    raws[30], raws[31] = raws[31], raws[30]
    return raws


def cut_off_the_beginning(raws: Raws) -> Raws:
    return raws[10:]


def another_beginning(raws: Raws) -> Raws:
    raws[0] = rehashed(raws[0], kind="journal.opened")
    return rechained(raws, 1)


def forge_a_head(raws: Raws) -> Raws:
    at = place(raws, "journal.head")
    raws[at] = rehashed(raws[at], data={"key": "0" * 16, "signature": "00" * 64})
    return rechained(raws, at + 1)


def tear_a_line(raws: Raws) -> Raws:
    raws[30] = raws[30][:50] + b"\n"
    return raws


def exchange_the_key(raws: Raws) -> Raws:
    other = signing.Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    raws[0] = rehashed(raws[0], data={"key": signing.key_id(other), "public": other})
    return rechained(raws, 1)


def invent_a_removal(raws: Raws) -> Raws:
    """Leaves the beginning out and says that retention did it."""
    first = json.loads(raws[10])
    removed = {
        "first": 1,
        "last": 10,
        "previous": lines.GENESIS,
        "last_hash": first["previous"],
        "octets": 1,
        "why": "age",
    }
    told = {"segments": [removed], "key": "0" * 16, "signature": "00" * 64}
    last = json.loads(raws[-1])
    made = rehashed(raws[-1], sequence=last["sequence"] + 1, previous=last["hash"], kind="journal.removed", data=told)
    return [*raws[10:], made]


CHANGES: dict[Callable[[Raws], Raws], set[str]] = {
    change_value: {"changed"},
    change_and_rehash: {"chain"},
    change_and_rechain: {"signature"},
    leave_one_out: {"gap"},
    leave_one_out_and_renumber: {"signature"},
    put_one_in: {"reordered"},
    exchange_two: {"gap", "reordered"},
    cut_off_the_beginning: {"beginning"},
    another_beginning: {"beginning", "signature"},
    forge_a_head: {"signature"},
    tear_a_line: {"unreadable"},
    exchange_the_key: {"key", "signature"},
    invent_a_removal: {"signature", "beginning"},
}


def test_what_was_not_touched_is_good(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    checked = verify_folder(tmp_path / "j", journal.public_key)
    assert checked.good, checked.findings
    assert checked.pinned
    assert (checked.first, checked.last) == (1, journal.sequence)
    assert checked.heads >= 3
    assert checked.signed_to == journal.sequence - 1
    assert verify_folder(tmp_path / "j").good


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_found(tmp_path: Path, change: Callable[[Raws], Raws]) -> None:
    journal = written(tmp_path / "j")
    raws = change(all_lines(tmp_path / "j"))
    checked = verify_lines(raws, journal.public_key)
    assert {finding.kind for finding in checked.findings} >= CHANGES[change], checked.findings
    exported = tmp_path / "exported.jsonl"
    exported.write_bytes(b"".join(raws))
    result = CliRunner().invoke(app, ["audit", "verify", str(exported), "--public-key", journal.public_key, "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["good"] is False


def test_an_end_that_was_cut_off_shows_against_a_head_that_was_noted(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    raws = all_lines(tmp_path / "j")[:-20]
    assert verify_lines(raws, journal.public_key).good  # nothing in what is left tells
    noted = (journal.sequence, journal.hash)
    checked = verify_lines(raws, journal.public_key, at_least=noted)
    assert [finding.kind for finding in checked.findings] == ["lacking"]
    assert verify_folder(tmp_path / "j", journal.public_key, at_least=noted).good
    other = verify_folder(tmp_path / "j", journal.public_key, at_least=(journal.sequence, "0" * 64))
    assert [finding.kind for finding in other.findings] == ["chain"]


def test_a_history_that_was_written_anew_shows_against_the_pinned_key_alone(tmp_path: Path) -> None:
    true = written(tmp_path / "true")
    written(tmp_path / "false")
    assert verify_folder(tmp_path / "false").good
    checked = verify_folder(tmp_path / "false", true.public_key)
    assert {finding.kind for finding in checked.findings} == {"key", "signature"}


def test_a_selection_is_checked_line_by_line(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    raws = all_lines(tmp_path / "j")[5:50:3]
    assert verify_lines(raws, journal.public_key, filtered=True).good
    raws[4] = change_value([*all_lines(tmp_path / "j")])[30]
    assert not verify_lines(raws, journal.public_key, filtered=True).good


def test_what_retention_removed_is_told_by_a_signed_record_and_a_removal_that_was_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "j"
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "_drop", lambda self, count: None)  # killed before it was done
        journal = written(folder, 200, segment=8 << 10, keep=24 << 10)
    assert all_lines(folder)[0].startswith(b'{"sequence":1,')
    assert verify_folder(folder, journal.public_key).good
    Journal.open(folder, Limits()).close()
    checked = verify_folder(folder, journal.public_key)
    assert checked.good, checked.findings
    assert checked.first > 1
    assert checked.removed[0]["first"] == 1


def test_the_command_reads_folders_and_files(tmp_path: Path) -> None:
    journal = written(tmp_path / "j")
    key = tmp_path / "key"
    key.write_text(journal.public_key + "\n")
    noted = f"{journal.sequence}:{journal.hash}"
    result = CliRunner().invoke(
        app, ["audit", "verify", str(tmp_path / "j"), "--public-key", str(key), "--head", noted]
    )
    assert result.exit_code == 0, result.output
    assert "good" in result.stdout
    result = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / "none")])
    assert result.exit_code == 1
    result = CliRunner().invoke(app, ["audit", "verify", str(tmp_path / "j"), "--public-key", "x"])
    assert result.exit_code == 2


# -- lines

HOSTILE = st.text(st.characters(), max_size=300) | st.sampled_from(
    ["\n", '","hash":"' + "0" * 64, "\x1b[2J", "\u202e\u2066", "\x00\x7f\x85", "a" * 5000, "\ud800"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(HOSTILE, inner, max_size=8),
    max_leaves=20,
)


@given(text=HOSTILE, data=st.dictionaries(HOSTILE, VALUES, max_size=8), when=st.floats())
@settings(max_examples=40, deadline=None)
def test_g07_no_value_breaks_out_of_its_line(text: str, data: dict[str, Any], when: float) -> None:
    entry = Entry(kind=text, time=when, project=text, sandbox_id=text, actor=text, reason=text, data=data)
    raw, digest = lines.line(entry, sequence=7, previous=lines.GENESIS, source="node/a", number=3, recorded=1.0)
    assert re.fullmatch(rb"[\x20-\x7e]+\n", raw)
    assert len(raw) <= MAX_RECORD + 200
    record = lines.read(raw)
    assert (record.sequence, record.hash, record.number) == (7, digest, 3)


@given(st.binary(max_size=400) | st.sampled_from([b"{}", b'{"sequence":1}', b""]))
@settings(max_examples=40, deadline=None)
def test_what_is_no_record_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(lines.Broken):
        lines.read(raw)


def test_long_values_keep_their_digest() -> None:
    path = "/" + "x" * 5000
    entry = Entry(kind="egress.request", time=1.0, data={"path": path})
    raw, _ = lines.line(entry, sequence=1, previous=lines.GENESIS, source="node/a", number=1, recorded=1.0)
    shown = lines.read(raw).data["path"]
    assert len(shown) <= lines.MAX_VALUE
    assert lines.hashlib.sha256(path.encode()).hexdigest() in shown


def test_records_become_events_of_ocsf(tmp_path: Path) -> None:
    expected = {
        "egress.request": (4002, 2, 3), "egress.connection": (4001, 2, 6), "egress.dns": (4003, 2, 6),
        "key.refused": (3002, 2, 1), "key.created": (3001, 2, 1), "files.written": (1001, 2, 3),
        "operation.accepted": (6003, 2, 1), "journal.repaired": (0, 2, 99),
    }  # fmt: skip
    for kind, (uid, status, activity) in expected.items():
        data = {"host": "index.example", "port": 443, "method": "GET", "path": "/simple/", "last": 2.0}
        entry = Entry(
            kind=kind, time=1.5, project="p", sandbox_id="s", decision="denied", reason="no_rule", count=4, data=data
        )
        raw, _ = lines.line(entry, sequence=9, previous=lines.GENESIS, source="node/a", number=1, recorded=1.0)
        made = ocsf.event(lines.read(raw), raw.decode().rstrip("\n"))
        assert (made["class_uid"], made["status_id"], made["activity_id"]) == (uid, status, activity)
        assert made["type_uid"] == uid * 100 + activity
        assert made["category_uid"] == uid // 1000
        assert made["time"] == 1500
        assert (made["count"], made["end_time"]) == (4, 2000)
        assert made["action_id"] == 2
        assert lines.read(made["raw_data"].encode()).hash == made["metadata"]["uid"]
        msgspec.json.encode(made)
