"""The host's codec of the guest channel: against itself, against damage, and against the guest's codec in C."""

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hatchway.wire import channel
from hatchway.wire.channel import FrameReader, FrameType, Lost
from hatchway.wire.channel_fields import KINDS, Fields, Kind, Malformed, Tag, encode_fields

GUEST = Path(__file__).parents[2] / "guest"

# -- strategies

payloads = st.one_of(
    st.binary(max_size=200),
    st.binary(min_size=1, max_size=64).map(lambda piece: (piece * 70_000)[: channel.MAX_PAYLOAD]),
    st.sampled_from([channel.MAGIC * 9, channel.TRAILER * 9, channel.RESYNC[: channel.MAX_PAYLOAD]]),
)
frames = st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), payloads, st.integers(0, 255))


def _encode(frame: tuple[int, int, bytes, int]) -> bytes:
    kind, stream, payload, flags = frame
    return channel.encode_frame(kind, stream, payload, flags=flags)


def _split(octets: bytes, data: st.DataObject) -> Iterator[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(octets)), max_size=12), label="cuts"))
    for start, end in zip([0, *cuts], [*cuts, len(octets)], strict=True):
        yield octets[start:end]


def _read(reader: FrameReader, octets: bytes) -> list[tuple[int, int, bytes, int]]:
    return [(f.type, f.stream, bytes(f.payload), f.flags) for f in reader.feed(octets)]


text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=64)
_values = {
    Kind.U32: st.integers(0, 2**32 - 1),
    Kind.I32: st.integers(-(2**31), 2**31 - 1),
    Kind.U64: st.integers(0, 2**64 - 1),
    Kind.TEXT: text,
    Kind.OCTETS: st.binary(max_size=300).map(lambda octets: octets.replace(b"\0", b"")),
}


def _field(tag: Tag) -> st.SearchStrategy[tuple[Tag, int | str | bytes]]:
    values: st.SearchStrategy[int | str | bytes] = _values[KINDS[tag]]
    if tag is Tag.NONCE:
        values = st.binary(min_size=16, max_size=16)
    elif tag is Tag.MACHINE_ID:
        values = st.text("0123456789abcdef", min_size=32, max_size=32)
    elif tag is Tag.HOSTNAME:
        values = st.text("abc-", max_size=64)
    return st.tuples(st.just(tag), values)


fields = st.lists(st.sampled_from(Tag).flatmap(_field), max_size=20)

# -- frames


@given(st.lists(frames, max_size=6), st.data())
def test_frames_survive_any_split(sent: list[tuple[int, int, bytes, int]], data: st.DataObject) -> None:
    reader = FrameReader()
    received = []
    for piece in _split(b"".join(map(_encode, sent)), data):
        received += _read(reader, piece)
    assert received == sent


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_damage_is_noticed_or_stays_within_its_frame(
    sent: list[tuple[int, int, bytes, int]], data: st.DataObject
) -> None:
    octets = bytearray(b"".join(map(_encode, sent)))
    at = data.draw(st.integers(0, len(octets) - 1))
    octets[at] ^= data.draw(st.integers(1, 255))
    whole, end = 0, 0
    for frame in sent:
        end += channel.OVERHEAD + len(frame[2])
        if end > at:
            break
        whole += 1
    received = []
    lost = False
    try:
        for frame in FrameReader().feed(octets):
            received.append((frame.type, frame.stream, bytes(frame.payload), frame.flags))
    except Lost:
        lost = True
    assert received[:whole] == sent[:whole]
    start = end - channel.OVERHEAD - len(sent[whole][2])
    in_payload = channel.HEADER_SIZE <= at - start < channel.HEADER_SIZE + len(sent[whole][2])
    in_trailer = at >= end - len(channel.TRAILER)
    if in_payload:
        assert received[whole + 1 :] == sent[whole + 1 :]
    if in_trailer:
        assert lost
        assert len(received) == whole


@given(st.binary(min_size=16, max_size=4096))
def test_noise_is_lost_at_once(noise: bytes) -> None:
    if noise.startswith(channel.MAGIC):
        return
    with pytest.raises(Lost):
        list(FrameReader().feed(noise))


def test_a_length_beyond_the_bound_is_lost_before_it_is_waited_for() -> None:
    header = bytearray(channel.encode_frame(FrameType.READY, 0)[:16])
    header[12:16] = (channel.MAX_PAYLOAD + 1).to_bytes(4, "little")
    header[6:8] = b"\0\0"
    header[6:8] = channel.checksum(header).to_bytes(2, "little")
    with pytest.raises(Lost):
        list(FrameReader().feed(header))
    with pytest.raises(ValueError, match="at most 65536"):
        channel.encode_frame(FrameType.READY, 0, bytes(channel.MAX_PAYLOAD + 1))


def _hello_ack(nonce: bytes) -> bytes:
    return channel.encode_frame(
        FrameType.HELLO_ACK, 0, encode_fields([(Tag.VERSION, 1), (Tag.NONCE, nonce), (Tag.EPOCH, 7)])
    )


NONCE = bytes(range(100, 116))
stale = st.lists(
    st.one_of(
        st.binary(max_size=300),
        frames.map(_encode),
        st.tuples(frames.map(_encode), st.integers(0, 70_000)).map(lambda pair: pair[0][: pair[1]]),
        st.binary(min_size=16, max_size=16).filter(lambda nonce: nonce != NONCE).map(_hello_ack),
        # A header that announces much, the nonce where no answer is, and an answer that was cut off.
        st.just(channel.encode_frame(FrameType.HELLO_ACK, 0, bytes(channel.MAX_PAYLOAD))[:16]),
        st.just(NONCE),
        st.just(b"x" * 40 + NONCE),
        st.just(_hello_ack(NONCE)[:40]),
        st.just(_hello_ack(NONCE)[:25]),
    ),
    max_size=6,
).map(b"".join)


@given(stale, st.lists(frames, max_size=3), st.data())
def test_a_hunt_finds_the_answer_behind_whatever_was_left_in_the_stream(
    before: bytes, after: list[tuple[int, int, bytes, int]], data: st.DataObject
) -> None:
    reader = FrameReader()
    reader.hunt(NONCE)
    received = []
    octets = before + _hello_ack(NONCE) + b"".join(map(_encode, after))
    for piece in _split(octets, data):
        received += _read(reader, piece)
    assert received[0][0] == FrameType.HELLO_ACK
    assert Fields(received[0][2]).get_octets(Tag.NONCE) == NONCE
    assert received[1:] == after
    assert reader.skipped == len(before)


def test_the_nonce_where_an_answer_has_it_is_no_answer_without_what_stands_before_it() -> None:
    header = channel.encode_frame(FrameType.HELLO_ACK, 0, bytes(channel.MAX_PAYLOAD))[:16]
    reader = FrameReader()
    reader.hunt(NONCE)
    received = _read(reader, header + header + NONCE + _hello_ack(NONCE))
    assert [kind for kind, *_ in received] == [FrameType.HELLO_ACK]
    assert reader.skipped == 48


def test_a_hunt_is_bounded() -> None:
    reader = FrameReader()
    reader.hunt(NONCE, skippable=100_000)
    list(reader.feed(bytes(100_000)))
    with pytest.raises(Lost, match="no answer"):
        list(reader.feed(bytes(1_000)))


def test_a_hunt_begun_in_the_middle_of_a_batch_throws_the_rest_of_it_away() -> None:
    reader = FrameReader()
    ready = channel.encode_frame(FrameType.READY, 0)
    seen = 0
    for _ in reader.feed(ready * 3):
        seen += 1
        reader.hunt(NONCE)
    assert seen == 1
    assert [frame.type for frame in reader.feed(_hello_ack(NONCE) + ready)] == [FrameType.HELLO_ACK, FrameType.READY]


def test_receiving_into_the_buffer_never_runs_out_of_room() -> None:
    reader = FrameReader(2 * channel.MAX_FRAME)
    stream = b"".join(channel.encode_frame(1, n, bytes([n]) * (n * 997 % 65_537)) for n in range(200))
    at, streams = 0, []
    while at < len(stream):
        space = reader.buffer()
        assert len(space) >= channel.MAX_FRAME
        count = min(len(space), 50_021, len(stream) - at)
        space[:count] = stream[at : at + count]
        at += count
        for frame in reader.received(count):
            assert bytes(frame.payload) == bytes([frame.stream]) * (frame.stream * 997 % 65_537)
            streams.append(frame.stream)
    assert streams == list(range(200))


# -- payloads


@given(fields)
def test_fields_round_trip(sent: list[tuple[Tag, int | str | bytes]]) -> None:
    if any(tag is Tag.ENTROPY and isinstance(value, bytes) and len(value) > 512 for tag, value in sent):
        return
    decoded = Fields(encode_fields(sent))
    assert dict(decoded.items()) == dict(sent)
    for tag in (Tag.ARG, Tag.ENV):
        assert decoded.all(tag) == tuple(value for other, value in sent if other is tag)


@given(st.binary(max_size=400), fields, st.integers(0, 400))
def test_any_octets_are_fields_or_malformed(noise: bytes, sent: list[tuple[Tag, int | str | bytes]], cut: int) -> None:
    for octets in (noise, encode_fields(sent)[:cut] + noise):
        try:
            Fields(octets)
        except Malformed:
            continue


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (Tag.VERSION, b"\0" * 3),
        (Tag.EPOCH, b"\0" * 4),
        (Tag.STATUS, b"\0" * 8),
        (Tag.NONCE, b"\0" * 15),
        (Tag.KEY, b"a\0b"),
        (Tag.MESSAGE, b"\xff\xfe"),
        (Tag.ARG, b"a\0"),
        (Tag.MACHINE_ID, b"g" * 32),
        (Tag.HOSTNAME, b"h" * 65),
        (Tag.ENTROPY, b"e" * 513),
    ],
)
def test_values_that_are_not_of_their_type_are_malformed(tag: Tag, value: bytes) -> None:
    with pytest.raises(Malformed, match=tag.name):
        Fields(int(tag).to_bytes(2, "little") + len(value).to_bytes(4, "little") + value)


def test_unknown_tags_are_skipped_and_the_last_of_a_repeated_one_holds() -> None:
    unknown = (999).to_bytes(2, "little") + (3).to_bytes(4, "little") + b"\0\xff\0"
    decoded = Fields(encode_fields([(Tag.PID, 1)]) + unknown + encode_fields([(Tag.PID, 2)]))
    assert decoded.number(Tag.PID) == 2
    assert decoded.get_number(Tag.ROWS) is None
    with pytest.raises(Malformed, match="ROWS is missing"):
        decoded.number(Tag.ROWS)


@given(st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=500))
def test_data_frames_round_trip(tag: int, offset: int, octets: bytes) -> None:
    (frame,) = FrameReader().feed(channel.encode_output(3, tag, offset, octets))
    data = channel.decode_data(frame.payload)
    assert (data.tag, data.offset, bytes(data.data)) == (tag, offset, octets)


@pytest.mark.parametrize("payload", [b"", bytes(15), b"\1" + b"\0" * 6 + b"\1" + bytes(8)])
def test_data_frames_without_their_header_are_malformed(payload: bytes) -> None:
    with pytest.raises(Malformed):
        channel.decode_data(memoryview(payload))


@given(
    st.lists(
        st.one_of(text.map(str.encode), st.integers(0, 150_000).map(lambda size: b"x" * size)), min_size=1, max_size=6
    ),
    st.dictionaries(st.text("ABC_", min_size=1, max_size=5), text, max_size=4),
)
def test_a_spawn_of_any_size_is_frames_whose_payloads_joined_are_its_fields(
    argv: list[bytes], env: dict[str, str]
) -> None:
    octets = channel.encode_spawn(9, number=5, key="k", argv=argv, env=env, pty=(24, 80), timeout_ms=1500)
    parts = [(f.type, f.stream, f.flags, bytes(f.payload)) for f in FrameReader().feed(octets)]
    assert {(kind, stream) for kind, stream, _, _ in parts} == {(FrameType.SPAWN, 9)}
    assert [flags for _, _, flags, _ in parts] == [1] * (len(parts) - 1) + [0]
    assert len(parts) <= channel.MAX_SPAWN_FRAMES
    decoded = Fields(b"".join(payload for _, _, _, payload in parts))
    assert decoded.all(Tag.ARG) == tuple(argv)
    assert set(decoded.all(Tag.ENV)) == {f"{name}={value}" for name, value in env.items()}
    assert (decoded.number(Tag.SIZE), decoded.number(Tag.ROWS), decoded.number(Tag.COLS)) == (5, 24, 80)
    assert decoded.number(Tag.FLAGS) == channel.SpawnFlag.STDIN | channel.SpawnFlag.PTY
    assert decoded.number(Tag.TIMEOUT_MS) == 1500


LIMITS = (Tag.LIMIT_MEMORY, Tag.LIMIT_CPU_MS, Tag.LIMIT_NOFILE, Tag.LIMIT_PIDS, Tag.LIMIT_FSIZE)


@given(st.dictionaries(st.sampled_from(LIMITS), st.integers(0, 2**64 - 1)), st.booleans())
def test_a_spawn_carries_its_limits_and_says_what_is_builtin(limits: dict[Tag, int], builtin: bool) -> None:
    octets = channel.encode_spawn(
        9, number=5, key="k", argv=["files"], env={}, stdin=False, builtin=builtin, limits=limits.items()
    )
    (frame,) = FrameReader().feed(octets)
    decoded = Fields(frame.payload)
    assert {tag: value for tag in LIMITS if (value := decoded.get_number(tag)) is not None} == limits
    assert decoded.number(Tag.FLAGS) == (8 if builtin else 0)


@given(st.integers(1, 2**31 - 1), st.integers(1, 65_535), st.none() | st.sampled_from(["127.0.0.1", "::1"]))
def test_a_dial_names_its_connection_port_and_host(number: int, port: int, host: str | None) -> None:
    (frame,) = FrameReader().feed(channel.encode_dial(3, number=number, key="k", port=port, host=host))
    assert (frame.type, frame.stream) == (28, 3)
    decoded = Fields(frame.payload)
    assert (decoded.number(Tag.SIZE), decoded.number(Tag.PORT), decoded.get_text(Tag.HOST)) == (number, port, host)
    assert decoded.text(Tag.KEY, channel.MAX_KEY) == "k"


@pytest.mark.parametrize(
    ("number", "key", "port"), [(0, "k", 80), (2**31, "k", 80), (1, "", 80), (1, "k", 0), (1, "k", 65_536)]
)
def test_a_dial_beyond_its_bounds_is_refused(number: int, key: str, port: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 # each case has a text of its own
        channel.encode_dial(1, number=number, key=key, port=port)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": 2**31},
        {"key": ""},
        {"key": "k" * 65},
        {"argv": []},
        {"argv": ["a\0b"]},
        {"argv": ["x"] * 1025},
        {"argv": ["x" * (channel.MAX_SPAWN_OCTETS + 1)]},
        {"env": {"A=B": "c"}},
        {"env": {"": "c"}},
        {"cwd": "a\0"},
        {"timeout_ms": -1},
        {"pty": (-1, 80)},
    ],
)
def test_a_spawn_beyond_its_bounds_is_refused(change: dict[str, object]) -> None:
    good: dict[str, object] = {"number": 1, "key": "k", "argv": ["true"], "env": {}}
    channel.encode_spawn(1, **good)  # type: ignore[arg-type] # the cases are data
    with pytest.raises(ValueError):  # noqa: PT011 # each case has a text of its own
        channel.encode_spawn(1, **(good | change))  # type: ignore[arg-type] # the cases are data


def test_setup_fields_say_whether_the_environment_is_replaced() -> None:
    kept = Fields(encode_fields(channel.setup_fields(time_ns=5, entropy=b"e", hostname="h", machine_id="0" * 32)))
    assert kept.get_number(Tag.FLAGS) is None
    emptied = Fields(encode_fields(channel.setup_fields(env={})))
    assert emptied.number(Tag.FLAGS) == 1
    assert Fields(encode_fields(channel.setup_fields(env={"A": "1=2"}))).all(Tag.ENV) == ("A=1=2",)


# -- the guest's side, in C

_PARSER_BUFFER = channel.MAX_FRAME + 32768


class _Parser(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("dropped", ctypes.c_uint64),
        ("buffer", ctypes.c_uint8 * _PARSER_BUFFER),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("stream", ctypes.c_uint32),
        ("length", ctypes.c_uint32),
        ("payload", ctypes.c_void_p),
    )


class _Field(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_uint16), ("length", ctypes.c_uint32), ("value", ctypes.c_void_p))


class _FieldReader(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("end", ctypes.c_void_p), ("bad", ctypes.c_bool))


class _FieldWriter(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("end", ctypes.c_void_p), ("full", ctypes.c_bool))


class GuestCodec:
    """guest/frame.c and guest/fields.c, compiled for this host."""

    def __init__(self, library: Path) -> None:
        self._c = ctypes.CDLL(str(library))
        self._c.frame_space.restype = ctypes.c_void_p
        self._c.frame_commit.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._c.frame_next.restype = ctypes.c_bool
        self._c.frame_finish.restype = ctypes.c_size_t
        self._c.frame_finish.argtypes = (
            ctypes.c_void_p,
            ctypes.c_uint8,
            ctypes.c_uint8,
            ctypes.c_uint32,
            ctypes.c_uint32,
        )
        self._c.field_next.restype = ctypes.c_bool
        self._c.write_bytes.argtypes = (ctypes.c_void_p, ctypes.c_uint16, ctypes.c_char_p, ctypes.c_size_t)
        self._c.write_u32.argtypes = (ctypes.c_void_p, ctypes.c_uint16, ctypes.c_uint32)
        self._c.write_u64.argtypes = (ctypes.c_void_p, ctypes.c_uint16, ctypes.c_uint64)

    def parser(self) -> _Parser:
        return _Parser()

    def read(self, parser: _Parser, octets: bytes) -> list[tuple[int, int, bytes, int]]:
        frames = []
        room = ctypes.c_size_t()
        frame = _Frame()
        while octets:
            space = self._c.frame_space(ctypes.byref(parser), ctypes.byref(room))
            count = min(room.value, len(octets))
            assert count > 0
            ctypes.memmove(space, octets[:count], count)
            octets = octets[count:]
            self._c.frame_commit(ctypes.byref(parser), count)
            while self._c.frame_next(ctypes.byref(parser), ctypes.byref(frame)):
                payload = ctypes.string_at(frame.payload, frame.length)
                frames.append((frame.type, frame.stream, payload, frame.flags))
        return frames

    def encode(self, frame: tuple[int, int, bytes, int]) -> bytes:
        kind, stream, payload, flags = frame
        buffer = ctypes.create_string_buffer(channel.MAX_FRAME)
        ctypes.memmove(ctypes.addressof(buffer) + channel.HEADER_SIZE, payload, len(payload))
        size = self._c.frame_finish(buffer, kind, flags, stream, len(payload))
        return buffer.raw[:size]

    def fields(self, payload: bytes) -> tuple[list[tuple[int, bytes]], bool]:
        buffer = ctypes.create_string_buffer(payload, len(payload) + 1)
        start = ctypes.addressof(buffer)
        reader = _FieldReader(start, start + len(payload), False)
        field = _Field()
        found = []
        while self._c.field_next(ctypes.byref(reader), ctypes.byref(field)):
            found.append((field.tag, ctypes.string_at(field.value, field.length)))
        return found, reader.bad

    def write(self, sent: list[tuple[Tag, int | str | bytes]]) -> bytes:
        buffer = ctypes.create_string_buffer(65536)
        start = ctypes.addressof(buffer)
        writer = _FieldWriter(start, start + 65536, False)
        for tag, value in sent:
            if isinstance(value, int):
                wide = KINDS[tag] is Kind.U64
                (self._c.write_u64 if wide else self._c.write_u32)(
                    ctypes.byref(writer), tag, value % (2**64 if wide else 2**32)
                )
            else:
                octets = value.encode() if isinstance(value, str) else value
                self._c.write_bytes(ctypes.byref(writer), tag, octets, len(octets))
        assert not writer.full
        return buffer.raw[: writer.at - start]


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> GuestCodec:
    library = tmp_path_factory.mktemp("codec") / "codec.so"
    sources = [str(GUEST / name) for name in ("frame.c", "fields.c")]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), *sources], check=True, timeout=120)
    return GuestCodec(library)


@given(frame=frames)
def test_both_sides_write_the_same_octets(guest: GuestCodec, frame: tuple[int, int, bytes, int]) -> None:
    assert guest.encode(frame) == _encode(frame)


@given(sent=st.lists(frames, max_size=5), data=st.data())
def test_the_guest_reads_what_the_host_writes(
    guest: GuestCodec, sent: list[tuple[int, int, bytes, int]], data: st.DataObject
) -> None:
    parser = guest.parser()
    received = []
    for piece in _split(b"".join(map(_encode, sent)), data):
        received += guest.read(parser, piece)
    assert received == sent
    assert parser.dropped == 0


@settings(max_examples=200)
@given(cut=frames, at=st.integers(0, channel.MAX_FRAME), then=st.lists(frames, min_size=1, max_size=3))
def test_zeros_bring_the_guest_back_from_the_middle_of_any_frame(
    guest: GuestCodec, cut: tuple[int, int, bytes, int], at: int, then: list[tuple[int, int, bytes, int]]
) -> None:
    half = _encode(cut)
    half = half[: at % len(half)]
    parser = guest.parser()
    assert guest.read(parser, half) == []
    assert guest.read(parser, channel.RESYNC + b"".join(map(_encode, then))) == then


@given(sent=fields)
def test_both_sides_write_and_read_the_same_fields(
    guest: GuestCodec, sent: list[tuple[Tag, int | str | bytes]]
) -> None:
    payload = encode_fields(sent)
    assert guest.write(sent) == payload
    found, bad = guest.fields(payload)
    assert not bad
    assert [tag for tag, _ in found] == [int(tag) for tag, _ in sent]
    assert len(dict(found)) == len(dict(sent))
    assert dict(Fields(payload).items()) == {
        tag: Fields(guest.write([(tag, value)])).items()[0][1] for tag, value in sent
    }


def test_both_sides_have_the_same_numbers_and_bounds() -> None:
    """The C side's are in one header; what only one side knows is no protocol."""
    header = re.sub(r"/\*.*?\*/", "", (GUEST / "proto.h").read_text(), flags=re.DOTALL)
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z][A-Z0-9_]*) = (\d+)[,\s}]", header)}
    assert {name[2:]: value for name, value in numbers.items() if name.startswith("T_")} == FrameType.__members__
    assert {name[2:]: value for name, value in numbers.items() if name.startswith("F_")} == Tag.__members__
    flags = [numbers[f"SPAWN_{name}"] for name in ("STDIN", "PTY", "MERGE", "BUILTIN", "TIMEOUT_LEADER")]
    assert flags == [int(flag) for flag in channel.SpawnFlag]
    bounds = ("MAX_PROCS", "MAX_BUILTINS", "MAX_CONNECTIONS", "MAX_REQUESTS", "MAX_SPAWN_FRAMES", "MAX_KEY")
    assert [numbers[name] for name in bounds] == [
        channel.MAX_PROCESSES,
        channel.MAX_BUILTINS,
        channel.MAX_CONNECTIONS,
        channel.MAX_REQUESTS,
        channel.MAX_SPAWN_FRAMES,
        channel.MAX_KEY,
    ]


@given(octets=st.binary(max_size=200))
def test_both_sides_agree_on_where_fields_are_broken(guest: GuestCodec, octets: bytes) -> None:
    _, bad = guest.fields(octets)
    complaint = ""
    try:
        Fields(octets)
    except Malformed as error:
        complaint = str(error)
    # The host checks types as well, in passing; a field that ends beyond its payload is broken to both.
    assert bad == complaint.startswith("a field") or (bad and complaint)
