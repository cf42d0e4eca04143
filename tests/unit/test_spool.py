"""The spool keeps what was written, byte for byte, and accounts for what it does not keep."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.node.sessions.spool import STDERR, STDOUT, Cursor, Gap, Spool, SpoolLimits, Stream

SMALL = SpoolLimits(keep=64 * 1024, segment=4096, disk_reserve=0)


def read_all(stream: Stream, position: int = 0, limit: int = 1000) -> tuple[bytes, list[Gap]]:
    """Everything from `position` on, and the gaps that were met."""
    cursor = Cursor(stream, position)
    data, gaps = bytearray(), []
    try:
        while (chunk := cursor.peek(limit)) is not None:
            if isinstance(chunk, Gap):
                assert chunk.start == cursor.position < chunk.end
                gaps.append(chunk)
                cursor.position = chunk.end
            else:
                assert 0 < len(chunk) <= limit
                data += chunk
                cursor.position += len(chunk)
    finally:
        cursor.close()
    assert cursor.position == stream.end
    return bytes(data), gaps


def pattern(start: int, length: int) -> bytes:
    """Octets that tell their own offset."""
    return bytes((i * 131 + i // 251) % 256 for i in range(start, start + length))


def test_nothing_written_makes_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.seal()
    assert os.listdir(tmp_path) == []
    assert spool.stored() == (0, 0)


def test_what_is_appended_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, b"hello ")
    spool.append(STDOUT, 6, b"world")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"hello world"]


def test_both_streams_are_separate(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, b"out")
    spool.append(STDERR, 0, b"error")
    assert read_all(spool.streams[STDOUT])[0] == b"out"
    assert read_all(spool.streams[STDERR])[0] == b"error"


@pytest.mark.parametrize("sealed", [False, True])
def test_many_segments_read_back_from_any_offset(tmp_path: Path, sealed: bool) -> None:
    spool = Spool(tmp_path, SMALL)
    whole = pattern(0, 30_000)
    for start in range(0, len(whole), 777):
        spool.append(STDOUT, start, whole[start : start + 777])
    assert spool.streams[STDOUT].segments == 8
    if sealed:
        spool.seal()
    for position in (0, 1, 4095, 4096, 4097, 29_999, 30_000):
        assert read_all(spool.streams[STDOUT], position) == (whole[position:], [])


def test_a_resent_part_is_skipped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, b"abcdef")
    spool.append(STDOUT, 3, b"defghi")
    spool.append(STDOUT, 0, b"abc")
    assert read_all(spool.streams[STDOUT]) == (b"abcdefghi", [])


def test_an_offset_beyond_is_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, b"abc")
    spool.append(STDOUT, 10, b"xyz")
    assert read_all(spool.streams[STDOUT]) == (b"abcxyz", [Gap(3, 10, "lost")])


def test_an_absurd_offset_changes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 2**64 - 2, b"abcd")
    assert spool.stored() == (0, 0)
    assert os.listdir(tmp_path) == []


def test_beyond_the_bound_the_oldest_goes_and_the_gap_is_exact(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    whole = pattern(0, 200_000)
    for start in range(0, len(whole), 3000):
        spool.append(STDOUT, start, whole[start : start + 3000])
    stream = spool.streams[STDOUT]
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == spool.kept == stream.kept <= SMALL.keep
    assert on_disk > SMALL.keep - 2 * SMALL.segment
    data, gaps = read_all(stream)
    assert gaps == [Gap(0, 200_000 - on_disk, "bound")]
    assert data == whole[-on_disk:]


def test_a_flood_on_one_stream_spares_the_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDERR, 0, b"the reason why")
    for number in range(100):
        spool.append(STDOUT, number * 4000, bytes(4000))
    assert read_all(spool.streams[STDERR]) == (b"the reason why", [])


def test_gaps_after_gaps_do_not_make_files_without_bound(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    for number in range(1000):
        spool.append(STDOUT, number * 2, b"x")
    assert len(os.listdir(tmp_path)) <= 2 * 16 + 16
    data, gaps = read_all(spool.streams[STDOUT])
    assert len(data) == len(os.listdir(tmp_path))
    assert gaps[0].start == 0
    assert sum(gap.end - gap.start for gap in gaps) + len(data) == 1999


def test_a_reader_that_lags_reads_on_when_its_segment_was_dropped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, pattern(0, 4096))
    cursor = Cursor(spool.streams[STDOUT], 0)
    first = cursor.peek(100)
    assert first == pattern(0, 100)
    cursor.position = 100
    spool.append(STDOUT, 4096, pattern(4096, 100_000))
    missing = cursor.peek(100)
    assert isinstance(missing, Gap)
    assert (missing.start, missing.cause) == (100, "bound")
    cursor.position = missing.end
    assert cursor.peek(100) == pattern(missing.end, 100)
    cursor.close()


def test_a_segment_that_vanished_is_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, pattern(0, 10_000))
    spool.seal()
    os.unlink(spool.streams[STDOUT].path_of(4096))
    data, gaps = read_all(spool.streams[STDOUT])
    assert gaps == [Gap(4096, 8192, "unreadable")]
    assert data == pattern(0, 4096) + pattern(8192, 1808)


def test_below_the_disk_reserve_output_is_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SpoolLimits(keep=64 * 1024, segment=4096, disk_reserve=2**62))
    spool.append(STDOUT, 0, b"abc")
    spool.append(STDOUT, 3, b"def")
    assert spool.stored() == (6, 0)
    assert read_all(spool.streams[STDOUT]) == (b"", [Gap(0, 6, "disk_full")])
    assert os.listdir(tmp_path) == []


def test_a_folder_that_vanished_is_a_gap_and_no_crash(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "gone", SMALL)
    spool.append(STDOUT, 0, b"abc")
    assert read_all(spool.streams[STDOUT]) == (b"", [Gap(0, 3, "write_failed")])


def test_an_interrupted_last_segment_is_continued(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, pattern(0, 5000))
    again = Spool.open(tmp_path, SMALL)  # the first one was killed: no seal
    assert again.stored() == (5000, 0)
    again.append(STDOUT, 5000, pattern(5000, 5000))
    assert read_all(again.streams[STDOUT]) == (pattern(0, 10_000), [])
    assert len(os.listdir(tmp_path)) == 3


def test_an_empty_last_segment_is_cleaned_up(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, pattern(0, 4096))
    Path(spool.streams[STDOUT].path_of(4096)).touch()
    again = Spool.open(tmp_path, SMALL)
    assert again.stored() == (4096, 0)
    assert len(os.listdir(tmp_path)) == 1


def test_less_than_four_octets_at_the_border_of_segments_come_with_what_follows(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SMALL)
    spool.append(STDOUT, 0, pattern(0, 200_000)[:8192])
    spool.seal()
    cursor = Cursor(spool.streams[STDOUT], 4095)
    chunk = cursor.peek(1000)
    assert isinstance(chunk, bytes)
    assert len(chunk) >= 4
    assert chunk == pattern(4095, len(chunk))
    cursor.close()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([STDOUT, STDERR]),
            st.sampled_from([0, 0, 0, 0, 1, 50]),  # octets that are lost before
            st.integers(0, 9000),  # octets written
            st.sampled_from([False, False, False, True]),  # killed and read back afterwards
        ),
        max_size=30,
    )
)
def test_whatever_happens_every_octet_is_there_or_in_a_gap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder, SMALL)
    ends = {STDOUT: 0, STDERR: 0}
    for fd, lost, length, killed in steps:
        start = ends[fd] + lost
        spool.append(fd, start, pattern(start, length))
        if length:
            ends[fd] = start + length
        if killed:
            before = [read_all(stream)[0] for stream in spool.streams.values()]
            spool = Spool.open(folder, SMALL)
            assert [read_all(stream)[0] for stream in spool.streams.values()] == before
    assert spool.kept <= SMALL.keep
    for fd, stream in spool.streams.items():
        assert stream.end == ends[fd]
        cursor = Cursor(stream, 0)
        while (chunk := cursor.peek(1000)) is not None:
            if isinstance(chunk, Gap):
                cursor.position = chunk.end
            else:
                assert chunk == pattern(cursor.position, len(chunk))
                cursor.position += len(chunk)
        cursor.close()
