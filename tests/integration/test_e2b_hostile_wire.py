"""The E2B wrapper's relay between hostile guests and hostile clients: what either says of lengths, and what cannot be passed on."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from dataplane_fixtures import agent, module_opened, module_plane
from dataplane_harness import Plane
from e2b_ground import Ground, opening
from ports_harness import answering, echo_heads, serving

__all__ = ["agent", "module_opened"]

pytestmark = pytest.mark.asyncio(loop_scope="module")
plane = module_plane

WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module")
async def ground(plane: Plane, tmp_path: Path) -> AsyncIterator[Ground]:
    """A wrapper of the test's own, before a sandbox that all share."""
    async with opening(plane, tmp_path) as made:
        yield made


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was written down as a fault of ours: a guest or a client must not be able to fill the log with that."""
    ours = ("uvicorn", "hatchway")
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR and one.name.startswith(ours)]


@pytest.mark.parametrize("status", ["304 Not Modified", "204 No Content"])
async def test_a_length_beside_a_status_without_a_body_is_none(ground: Ground, status: str, caplog: pytest.LogCaptureFixture):  # fmt: skip
    async with (
        serving(answering(f"HTTP/1.1 {status}\r\nContent-Length: 100\r\nETag: x\r\n\r\n".encode())) as port,
        ground.connected() as client,
    ):
        for _ in range(2):
            await client.send(ground.head(port))
            told, fields = await client.head()
            assert (told, fields["etag"]) == (int(status[:3]), "x")
            assert "content-length" not in fields
    assert faults(caplog) == []


@pytest.mark.parametrize("length", [1, 5, 1000])
async def test_a_length_beside_chunks_is_none(ground: Ground, length: int, caplog: pytest.LogCaptureFixture):
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n" % length
    )
    async with serving(answering(answer)) as port:
        status, fields, body = await ground.ask(ground.head(port))
    assert (status, body) == (200, b"whole")
    assert "content-length" not in fields
    assert faults(caplog) == []


@pytest.mark.parametrize("upgrade", [False, True])
async def test_what_cannot_be_passed_on_is_refused(ground: Ground, upgrade: bool, caplog: pytest.LogCaptureFixture):
    more = WEBSOCKET if upgrade else ()
    async with serving(echo_heads) as port:
        heads = [
            ground.head(port, *more, target="/\xe9"),
            ground.head(port, "X-Odd: a\x01b", *more),
            ground.head(port, "X-Odd: a\x7fb", *more),
        ]
        if upgrade:
            heads += [
                ground.head(port, "Content-Length: 5", *more) + b"12345",
                ground.head(port, "Transfer-Encoding: chunked", *more) + b"0\r\n\r\n",
            ]
        for head in heads:
            async with ground.connected() as client:
                await client.send(head)
                status, _ = await client.head()
            assert status in (200, 400), head
    assert faults(caplog) == []


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        (("Content-Length: 4", "Transfer-Encoding: chunked"), b"0\r\n\r\n" + SMUGGLED),
        (("Transfer-Encoding: chunked", "Transfer-Encoding: identity"), b"0\r\n\r\n" + SMUGGLED),
        (("Transfer-Encoding: xchunked",), b"0\r\n\r\n" + SMUGGLED),
        (("Transfer-Encoding:\x0bchunked",), b"0\r\n\r\n" + SMUGGLED),
        (("Content-Length: 1", "Content-Length: 35"), SMUGGLED),
        (("Content-Length: +5",), SMUGGLED),
        (("Content-Length : 5",), SMUGGLED),
        (("X: 1\nContent-Length: 5",), b"12345"),
        (("Transfer-Encoding: chunked",), b"5;a=b\n12345\r\n0\r\n\r\n" + SMUGGLED),
    ],
)
async def test_what_two_parsers_could_take_for_different_lengths_is_refused(ground: Ground, lines: tuple[str, ...], body: bytes):  # fmt: skip
    async with serving(echo_heads) as port, ground.connected() as client:
        await client.send(ground.head(port, *lines, method="POST") + body)
        assert (await client.head())[0] == 400


async def test_what_belongs_to_a_connection_stays_there_however_it_is_written(ground: Ground):
    lines = ("Transfer_Encoding: chunked", "Keep_Alive: 1", "Content-Length: 5")
    async with serving(echo_heads) as port:
        status, _, seen = await ground.ask(ground.head(port, *lines, method="POST") + b"0\r\n\r\n")
    assert status == 200
    assert b"_" not in seen, seen
