"""Checks records without asking the process that wrote them: chain, signatures, gaps, and what was removed.

What a check proves: of the records up to the last signed head, none was changed, left out, put in or moved by anybody without the key. What
is behind that head is chained only. That the end was cut off shows against a head that was noted elsewhere (`at_least`), and that
the whole was written anew against a public key that was (`public`).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hatchway.audit import lines, segments, signing
from hatchway.audit.lines import GENESIS, OWN, Broken, Record

MAX_FINDINGS = 100


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as the writer left it.

    `kind`: `unreadable changed gap reordered chain beginning signature key removal repaired missing lacking`.
    """

    kind: str
    sequence: int
    message: str


class Checked(msgspec.Struct, kw_only=True):
    """What was found in the records, from `first` to `last`."""

    first: int = 0
    last: int = 0
    last_hash: str = ""
    records: int = 0
    signed_to: int = 0
    """The last record that a signed head covers; those behind it are chained only."""
    heads: int = 0
    public: str = ""
    """The key that the signatures were checked with."""
    pinned: bool = False
    """Whether the caller named it; else it is the one that the journal itself names."""
    removed: list[dict[str, Any]] = []
    """What retention removed, as far as the records tell, each with its signature checked."""
    refusals: int = 0
    """Records that a full disk refused, as the journal says itself: their senders kept them, or let nothing happen."""
    filtered: bool = False
    """The records are a selection: what lies between them is not there to be checked."""
    findings: list[Finding] = []

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


class Checker:
    """Takes lines in their order; `end` gives the result. With `filtered` sequences may be left out, and each line is checked by itself."""

    def __init__(self, public: str | None = None, *, filtered: bool = False) -> None:
        self.result = Checked(public=public or "", pinned=public is not None, filtered=filtered)
        self._before: Record | None = None
        self._beginning: Record | None = None
        self._removals: list[dict[str, Any]] = []

    def take(self, raw: bytes) -> None:
        """The next line."""
        expected = 1 if self._before is None else self._before.sequence + 1
        try:
            if not raw.endswith(b"\n"):
                raise Broken("it has no end")
            record = lines.read(raw)
        except Broken as error:
            self._find(
                "unreadable" if b'"hash"' not in raw else "changed",
                expected,
                f"Line {self.result.records + 1}: {error}.",
            )
            self.result.records += 1
            self._before = None
            return
        self.result.records += 1
        if self._before is not None:
            self._compare(self._before, record)
        elif self._beginning is None:
            self._beginning = record
            self.result.first = record.sequence
        self._before = record
        self.result.last, self.result.last_hash = record.sequence, record.hash
        if record.source == OWN:
            self._own(record)

    def end(self, at_least: tuple[int, str] | None = None) -> Checked:
        """What was found. `at_least`: a head that was seen earlier, which must be among the records."""
        first = self._beginning
        if first is not None and not self.result.filtered:
            self._check_beginning(first)
        if at_least is not None and self.result.last < at_least[0]:
            self._find(
                "lacking",
                self.result.last,
                f"The records end with {self.result.last}; {at_least[0]} was there: the end was cut off.",
            )
        return self.result

    def expect(self, record_hash: str, sequence: int) -> None:
        """For a head that was noted elsewhere: the record `sequence` must have this hash. Called when it was just taken."""
        if self._before is not None and self._before.sequence == sequence and self._before.hash != record_hash:
            self._find("chain", sequence, f"Record {sequence} is another one than was noted.")

    def _compare(self, before: Record, record: Record) -> None:
        if record.sequence == before.sequence + 1:
            if record.previous != before.hash:
                self._find("chain", record.sequence, f"Record {record.sequence} does not follow on {before.sequence}.")
        elif record.sequence <= before.sequence:
            self._find("reordered", record.sequence, f"Record {record.sequence} stands behind {before.sequence}.")
        elif not self.result.filtered:
            missing = record.sequence - before.sequence - 1
            self._find("gap", record.sequence, f"{missing} records before {record.sequence} are not there.")

    def _own(self, record: Record) -> None:
        match record.kind:
            case "journal.begun" | "journal.opened":
                self._key(record)
            case "journal.head":
                self._head(record)
            case "journal.removed":
                self._removal(record)
            case "journal.repaired" if record.data.get("lines"):
                self._find(
                    "repaired",
                    record.sequence,
                    f"Before record {record.sequence} the writer found {record.data['lines']} lines that did not fit the chain.",
                )
            case "journal.resumed":
                self.result.refusals += int(record.data.get("refused", 0))

    def _key(self, record: Record) -> None:
        named = str(record.data.get("public", ""))
        if not self.result.public:
            self.result.public = named
        elif named != self.result.public:
            self._find("key", record.sequence, f"Record {record.sequence} names another key: {named[:64]}.")

    def _head(self, record: Record) -> None:
        signature = str(record.data.get("signature", ""))
        if not self.result.public:
            return  # an export that begins later does not name the key, and none was given
        if signing.head_is_signed(self.result.public, signature, record.sequence, record.previous):
            self.result.heads += 1
            self.result.signed_to = record.sequence - 1
        else:
            self._find("signature", record.sequence, f"The signature of the head {record.sequence} is not the key's.")

    def _removal(self, record: Record) -> None:
        statement = {"segments": record.data.get("segments", [])}
        signature = str(record.data.get("signature", ""))
        if self.result.public and not signing.removal_is_signed(self.result.public, signature, statement):
            self._find("signature", record.sequence, f"The removal {record.sequence} is not signed by the key.")
            return
        self.result.removed += statement["segments"]

    def _check_beginning(self, first: Record) -> None:
        if first.sequence == 1:
            if first.previous != GENESIS or first.kind != "journal.begun":
                self._find("beginning", 1, "The first record is not the beginning of a journal.")
            return
        for one in self.result.removed:
            if one.get("last") == first.sequence - 1 and one.get("last_hash") == first.previous:
                return
        self._find(
            "beginning",
            first.sequence,
            f"The records begin with {first.sequence}, and no signed record says that those before were removed.",
        )

    def _find(self, kind: str, sequence: int, message: str) -> None:
        if len(self.result.findings) < MAX_FINDINGS:
            self.result.findings.append(Finding(kind=kind, sequence=sequence, message=message))


def verify_lines(
    raws: Iterable[bytes],
    public: str | None = None,
    *,
    filtered: bool = False,
    at_least: tuple[int, str] | None = None,
) -> Checked:
    """Checks lines; see the module."""
    checker = Checker(public, filtered=filtered)
    for raw in raws:
        checker.take(raw)
        if at_least is not None:
            checker.expect(at_least[1], at_least[0])
    return checker.end(at_least)


def verify_folder(folder: Path, public: str | None = None, *, at_least: tuple[int, str] | None = None) -> Checked:
    """Checks the segments of a journal, which may be in use. Raises `OSError`."""
    return verify_lines(_whole_lines(folder), public, at_least=at_least)


def verify_file(
    file: Path, public: str | None = None, *, filtered: bool = False, at_least: tuple[int, str] | None = None
) -> Checked:
    """Checks an exported file. Raises `OSError`."""
    return verify_lines(segments.raw_lines(file), public, filtered=filtered, at_least=at_least)


def _whole_lines(folder: Path) -> Iterator[bytes]:
    paths = [path for _, path in segments.listed(folder)]
    for number, path in enumerate(paths, 1):
        for raw in segments.raw_lines(path):
            if number == len(paths) and not raw.endswith(b"\n"):
                return  # the writer is at it, or was killed at it: nobody was told that it is there
            yield raw
