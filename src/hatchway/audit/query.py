"""Finds records in the segments of a journal, reading no more than its index says may hold some, and never more than a bound at once."""

from collections.abc import Iterator, Sequence

from hatchway.audit import segments
from hatchway.audit.lines import Broken, Record, read
from hatchway.audit.segments import EVERY, Segment
from hatchway.wire.audit import Query, Records

MAX_LIMIT = 1000
MAX_READ = 16 << 20
"""Octets that one query reads; what it has not reached yet, the next one does."""
MAX_ANSWER = 4 << 20


def find(found: Sequence[Segment], query: Query) -> Records:
    """The records that match; `next_after` tells how far was looked, also where nothing matched. Raises `OSError`."""
    head = found[-1].index.last
    lines: list[bytes] = []
    limit, read_octets, answer, at = min(query.limit, MAX_LIMIT), 0, 0, query.after
    if query.newest:
        at = min(head + 1, query.before or head + 1)
    for octets, records in _blocks(found, query, at):
        for raw, record in records:
            at = record.sequence
            if not _matches(record, query):
                continue
            lines.append(raw.removesuffix(b"\n"))
            answer += len(raw)
            if len(lines) >= limit or answer >= MAX_ANSWER:
                return Records(lines=tuple(lines), next_after=at, head=head)
        read_octets += octets
        if read_octets >= MAX_READ:
            return Records(lines=tuple(lines), next_after=at, head=head)
    return Records(lines=tuple(lines), next_after=0 if query.newest else max(head, query.after), head=head)


def _blocks(found: Sequence[Segment], query: Query, at: int) -> Iterator[tuple[int, list[tuple[bytes, Record]]]]:
    """The records in the order of the query, block by block, with the octets that each took to read."""
    for segment in reversed(found) if query.newest else found:
        index = segment.index
        if not (index.first < at if query.newest else index.last > at) or not _may_hold(segment, query):
            continue
        places = list(enumerate(index.offsets))
        ends = [*index.offsets[1:], index.octets]
        for number, start in reversed(places) if query.newest else places:
            first = index.first + number * EVERY
            if not (first < at if query.newest else first + EVERY > at):
                continue
            records = []
            for raw in segments.raw_lines(segment.path, start, ends[number]):
                record = _read(raw, query)
                if record is not None and (record.sequence < at if query.newest else record.sequence > at):
                    records.append((raw, record))
            yield ends[number] - start, records[::-1] if query.newest else records


def _read(raw: bytes, query: Query) -> Record | None:
    """A record that may match; others are not worth decoding."""
    for name, wanted in (("project", query.project), ("sandbox_id", query.sandbox_id), ("decision", query.decision)):
        if wanted is not None and b'"%b":"%b"' % (name.encode(), wanted.encode("ascii", "replace")) not in raw:
            return None
    try:
        return read(raw)
    except Broken:
        return None  # a check says so; a query shows what can be read


def _may_hold(segment: Segment, query: Query) -> bool:
    index = segment.index
    return (
        segments.covers(segment, query.project, query.sandbox_id)
        and segments.has_kind(segment, query.kinds)
        and (query.since_time is None or index.last_time >= query.since_time)
        and (query.before_time is None or index.first_time < query.before_time)
    )


def _matches(record: Record, query: Query) -> bool:
    return (
        query.project in (None, record.project)
        and query.sandbox_id in (None, record.sandbox_id)
        and query.decision in (None, record.decision)
        and (not query.kinds or record.kind.startswith(query.kinds))
        and (query.since_time is None or record.time >= query.since_time)
        and (query.before_time is None or record.time < query.before_time)
    )
