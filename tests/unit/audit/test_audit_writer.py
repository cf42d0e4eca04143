"""The audit writer as a process: killed at any moment, sent things again, on a full disk, flooded. What it acknowledged is there, once."""

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.audit_writer import AuditWriter, audit_writer

from hatchway.audit.client import MAX_KINDS, AuditClient
from hatchway.audit.journal import Limits
from hatchway.audit.verifying import verify_folder
from hatchway.domain.errors import Forbidden, HatchwayError, HostExhausted, InvalidRequest, Unavailable
from hatchway.egress.auditing import QUOTA_AT_ONCE, Recorder
from hatchway.wire.audit import Append, Appended, Entry, Health, Query, Records
from hatchway.wire.node import Empty
from hatchway.wire.paths import address
from hatchway.wire.rpc import Connection

WITHIN = 30.0


def entry(number: int = 0, **more: Any) -> Entry:
    return Entry(kind="egress.request", time=time.time(), project="default", data={"n": number}, **more)


@contextlib.asynccontextmanager
async def connected(writer: AuditWriter) -> Any:
    with address(writer.path) as reached:
        reader, stream = await asyncio.open_unix_connection(reached)
    connection = Connection(reader, stream)
    reading = asyncio.create_task(connection.run())
    try:
        yield connection
    finally:
        await connection.close()
        await reading


async def until(true: Any) -> None:
    async with asyncio.timeout(WITHIN):
        while not true():
            await asyncio.sleep(0.01)


def numbers(writer: AuditWriter, source: str) -> list[int]:
    return [one["number"] for one in writer.records() if one["source"] == source]


async def test_what_is_acknowledged_survives_every_kill_once_and_in_order(tmp_path: Path) -> None:
    with audit_writer(tmp_path, limits=Limits(segment=64 << 10, head_every=50)) as writer:
        client = AuditClient(writer.path, "egress-0")
        client.start()
        acknowledged = 0

        async def load(worker: int) -> None:
            nonlocal acknowledged
            for number in range(150):
                await client.durable(entry(worker * 1000 + number))
                acknowledged += 1

        loads = asyncio.gather(*(load(worker) for worker in range(8)))
        for kills in range(1, 6):
            await until(lambda kills=kills: acknowledged >= kills * 200)
            await asyncio.to_thread(writer.kill)
            before = acknowledged
            found = numbers(writer, client.source)
            assert len(found) >= before
            await asyncio.to_thread(writer.start)
        async with asyncio.timeout(WITHIN):
            await loads
        await client.close()
        assert writer.stop() == 0
        assert numbers(writer, client.source) == list(range(1, 1201))
        records = writer.records()
        assert [one["sequence"] for one in records] == list(range(1, len(records) + 1))
        assert sum(one["kind"] == "journal.opened" for one in records) == 5
        checked = verify_folder(writer.folder)
        assert checked.good, checked.findings
        assert checked.signed_to >= checked.last - 1


async def test_a_record_that_is_sent_again_is_there_once(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer:
        first = Append(source="node/abc", first=1, entries=(entry(1), entry(2)))
        async with connected(writer) as connection:
            assert (await connection.call("audit.append", first, Appended)).last == 2
            assert (await connection.call("audit.append", first, Appended)).last == 2
        await asyncio.to_thread(writer.kill)
        await asyncio.to_thread(writer.start)
        again = Append(source="node/abc", first=2, entries=(entry(2), entry(3)))
        async with connected(writer) as connection:
            asked = await connection.call("audit.append", Append(source="node/abc", first=1, entries=()), Appended)
            assert asked.last == 2
            assert (await connection.call("audit.append", again, Appended)).last == 3
        assert numbers(writer, "node/abc") == [1, 2, 3]


async def test_numbers_that_this_journal_never_saw_are_a_recorded_gap(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer, contextlib.suppress(asyncio.CancelledError):
        async with connected(writer) as connection:
            await connection.call("audit.append", Append(source="node/abc", first=7, entries=(entry(),)), Appended)
        gaps = [one["data"] for one in writer.records() if one["kind"] == "journal.gap"]
        assert gaps == [{"source": "node/abc", "from": 1, "to": 6}]


async def test_senders_are_known_across_segments(tmp_path: Path) -> None:
    with audit_writer(tmp_path, limits=Limits(segment=16 << 10)) as writer:
        async with connected(writer) as connection:
            await connection.call("audit.append", Append(source="broker/x", first=1, entries=(entry(),)), Appended)
            many = Append(source="node/abc", first=1, entries=tuple(entry(n) for n in range(200)))
            await connection.call("audit.append", many, Appended)
        assert len(list(writer.folder.glob("*.jsonl"))) > 1
        await asyncio.to_thread(writer.kill)
        await asyncio.to_thread(writer.start)
        async with connected(writer) as connection:
            await connection.call("audit.append", Append(source="broker/x", first=1, entries=(entry(),)), Appended)
        assert numbers(writer, "broker/x") == [1]


@pytest.mark.parametrize(("torn", "lines"), [(b'{"sequence":9', 0), (b'{"sequence":3,"x":1}\n', 1), (b"\0" * 512, 0)])
async def test_what_a_killed_writer_left_is_mended_and_recorded(tmp_path: Path, torn: bytes, lines: int) -> None:
    with audit_writer(tmp_path) as writer:
        async with connected(writer) as connection:
            await connection.call("audit.append", Append(source="node/a", first=1, entries=(entry(),)), Appended)
        await asyncio.to_thread(writer.kill)
        (segment,) = writer.folder.glob("*.jsonl")
        with segment.open("ab") as file:
            file.write(torn)
        await asyncio.to_thread(writer.start)
        repaired = [one["data"] for one in writer.records() if one["kind"] == "journal.repaired"]
        assert [(one["octets"], one["lines"]) for one in repaired] == [(len(torn), lines)]
        assert writer.stop() == 0
        # A line that was whole was there before: that somebody changed it stays visible, and what it was is kept.
        checked = verify_folder(writer.folder)
        assert checked.good is (lines == 0)
        assert len(list(writer.folder.glob("*.aside-*"))) == lines


async def test_nobody_records_under_anothers_name_or_reads_without_right(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer:
        async with connected(writer) as connection:
            for source in ("", "node", "node/", "node/a b", "node/" + "a" * 40, "\n/a", "journal"):
                with pytest.raises(Forbidden):
                    await connection.call("audit.append", Append(source=source, first=1, entries=(entry(),)), Appended)
            many = tuple(entry() for _ in range(2001))
            with pytest.raises(InvalidRequest):
                await connection.call("audit.append", Append(source="node/a", first=1, entries=many), Appended)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted: not shown without root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "small", folder], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=20)


async def fill_up(client: AuditClient) -> None:
    for number in range(2, 2000):
        await client.durable(entry(number, reason="x" * 64))


@needs_root
async def test_a_full_disk_refuses_and_says_so_and_goes_on_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    with audit_writer(tmp_path, small_disk / "audit") as writer:
        client = AuditClient(writer.path, "egress-0", window_s=0.2)
        client.start()
        await client.durable(entry(1))
        filler = small_disk / "filler"
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024))
        with pytest.raises(Unavailable) as caught:
            await fill_up(client)
        assert caught.value.code == "audit_unavailable"
        assert client.full
        with pytest.raises(Unavailable):
            client.record(entry())
        async with connected(writer) as connection:
            health = await connection.call("audit.health", Empty(), Health)
            assert not health.writable
            assert "full" in health.error
            with pytest.raises(HostExhausted) as refused:
                await connection.call(
                    "audit.append", Append(source="node/a", first=1, entries=(entry(reason="y" * 120),) * 40), Appended
                )
            assert refused.value.code == "audit_full"
        assert any(one["kind"] == "journal.refused" for one in writer.records())
        filler.unlink()
        await until(lambda: not client.full)
        await client.durable(entry(5000))
        (resumed,) = [one for one in writer.records() if one["kind"] == "journal.resumed"]
        assert resumed["data"]["refused"] >= 1
        await client.close()
        found = numbers(writer, client.source)
        assert found == list(range(1, len(found) + 1))
        assert writer.stop() == 0
        assert verify_folder(writer.folder).good


async def test_g08_a_flood_of_refusals_is_counted_exactly(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer:
        client = AuditClient(writer.path, "egress-0", window_s=3600.0)
        client.start()
        for number in range(20_000):
            client.record(entry(number % 3, decision="denied", reason="no_rule", sandbox_id="one"))
        # A flood that varies what it asks for is counted by its reason.
        for number in range(5_000):
            client.record(entry(number, decision="denied", reason="no_rule", sandbox_id="two"))
        assert await client.flush(WITHIN)
        records = [one for one in writer.records() if one["source"] == client.source]
        of_one = [one for one in records if one["sandbox_id"] == "one"]
        assert len(of_one) == 6
        assert sum(one["count"] for one in of_one) == 20_000
        of_two = [one for one in records if one["sandbox_id"] == "two"]
        assert len(of_two) == MAX_KINDS + 1
        assert sum(one["count"] for one in of_two) == 5_000
        folded = of_two[-1]
        assert folded["data"]["folded"] is True
        assert folded["time"] <= folded["data"]["last"]
        await client.close()


async def test_g08_what_a_sandbox_lets_happen_without_end_is_counted_exactly_and_its_octets_with_it(
    tmp_path: Path,
) -> None:
    """Not denials alone: connections, requests, failures of TLS and of dialling, questions beyond the rate."""
    with audit_writer(tmp_path) as writer:
        client = AuditClient(writer.path, "egress-0", window_s=3600.0)
        client.start()
        flooding, quiet = (Recorder(client, "default", name, 1, clock=lambda: 0.0) for name in ("flooding", "quiet"))
        for number in range(quota := int(QUOTA_AT_ONCE)):
            flooding.record(
                "egress.request", "allowed", data={"host": "a.example", "method": "GET", "path": str(number)}
            )
        assert client.waiting >= quota, "so many are recorded one by one"
        before = client.waiting
        for number in range(5_000):
            path = {"host": "a.example", "method": "GET", "path": str(number)}
            flooding.record("egress.request", "allowed", data=path)
            ended = {"host": "a.example", "bytes_out": 3, "bytes_in": number, "seconds": number}
            flooding.ended("egress.connection_ended", data=ended)
            error = {"host": f"{number}.example", "error": "unknown_ca"}
            flooding.ended("egress.tls_failed", "failed", reason="tls_client_failed", data=error, alike=True)
            flooding.ended("egress.dns", "denied", reason="dns_rate")
        quiet.record("egress.request", "allowed", data={"host": "b.example", "method": "GET", "path": "/"})
        flooding.ended("egress.policy", data={"revision": 2})
        assert client.waiting - before < 2 * MAX_KINDS
        assert await client.flush(WITHIN)
        records = [one for one in writer.records() if one["source"] == client.source]
        counts: dict[str, int] = {}
        for one in records:
            if one["sandbox_id"] == "flooding":
                counts[one["kind"]] = counts.get(one["kind"], 0) + one["count"]
        assert counts == {
            "egress.request": quota + 5_000,
            "egress.connection_ended": 5_000,
            "egress.tls_failed": 5_000,
            "egress.dns": 5_000,
            "egress.policy": 1,
        }
        ended_ones = [one["data"] for one in records if one["kind"] == "egress.connection_ended"]
        assert sum(one["bytes_out"] for one in ended_ones) == 15_000
        assert sum(one["bytes_in"] for one in ended_ones) == sum(range(5_000))
        folded = [one["data"] for one in records if one["kind"] == "egress.request" and one["count"] > 1]
        assert [(one["host"], one["method"], one["folded"]) for one in folded] == [("a.example", "GET", True)]
        (of_quiet,) = [one for one in records if one["sandbox_id"] == "quiet"]
        assert of_quiet["data"]["path"] == "/"
        (policy,) = [one for one in records if one["kind"] == "egress.policy"]
        assert policy["data"] == {"revision": 2}, "no flood hides what the operator did"
        await client.close()


async def test_a_counted_record_of_what_was_allowed_needs_room_too(tmp_path: Path) -> None:
    client = AuditClient(tmp_path / "nobody.sock", "egress-0", max_entries=1)
    client.record(entry(1))
    assert client.full
    with pytest.raises(Unavailable):
        client.record(entry(2, decision="allowed"), bounded=True)
    client.record(entry(2, decision="failed"), bounded=True)


async def test_a_sender_whose_bound_is_reached_refuses_and_still_counts_refusals(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer:
        writer.kill()
        client = AuditClient(writer.path, "node", max_entries=10)
        client.start()
        for number in range(10):
            client.record(entry(number))
        assert client.full
        with pytest.raises(Unavailable) as caught:
            client.record(entry())
        assert caught.value.code == "audit_unavailable"
        for _ in range(50):
            client.record(entry(decision="denied", reason="audit_full"))
        await asyncio.to_thread(writer.start)
        await until(lambda: not client.full and not client.waiting)
        assert await client.flush(WITHIN)
        assert sum(one["count"] for one in writer.records() if one["decision"] == "denied") == 50
        await client.close()


async def test_queries_find_by_every_field_and_go_on_where_they_ended(tmp_path: Path) -> None:
    with audit_writer(tmp_path, limits=Limits(segment=32 << 10)) as writer:
        kinds = ("egress.request", "sandbox.create", "files.read")
        entries = tuple(
            Entry(
                kind=kinds[number % 3],
                time=1000.0 + number,
                project=f"p{number % 4}",
                sandbox_id=f"s{number % 10}",
                decision="denied" if number % 5 == 0 else "allowed",
                data={"n": number},
            )
            for number in range(600)
        )
        async with connected(writer) as connection:
            for first in range(0, 600, 50):
                group = Append(source="node/a", first=first + 1, entries=entries[first : first + 50])
                await connection.call("audit.append", group, Appended)

            async def found(**fields: Any) -> list[int]:
                numbers: list[int] = []
                query = Query(limit=7, **fields)
                while True:
                    answer = await connection.call("audit.query", query, Records)
                    decoded = [json.loads(line) for line in answer.lines]
                    numbers += [one["data"]["n"] for one in decoded if one["source"] == "node/a"]
                    if query.newest:
                        if not answer.next_after:
                            return numbers
                        query = Query(limit=7, **{**fields, "before": answer.next_after})
                    elif answer.next_after >= answer.head:
                        return numbers
                    else:
                        query = Query(limit=7, **{**fields, "after": answer.next_after})

            def expected(true: Any) -> list[int]:
                return [n for n, one in enumerate(entries) if true(one)]

            assert len(list(writer.folder.glob("*.jsonl"))) > 3
            assert await found(project="p1") == expected(lambda one: one.project == "p1")
            assert await found(sandbox_id="s3") == expected(lambda one: one.sandbox_id == "s3")
            assert await found(kinds=("sandbox.", "files.")) == expected(lambda one: one.kind != kinds[0])
            assert await found(decision="denied", project="p2") == expected(
                lambda one: one.decision == "denied" and one.project == "p2"
            )
            assert await found(since_time=1100.0, before_time=1200.0) == list(range(100, 200))
            assert await found(project="none") == []
            newest = await found(project="p1", newest=True)
            assert newest == expected(lambda one: one.project == "p1")[::-1]


async def test_old_segments_go_with_a_signed_record_of_it(tmp_path: Path) -> None:
    with audit_writer(tmp_path, limits=Limits(segment=16 << 10, keep=64 << 10)) as writer:
        async with connected(writer) as connection:
            for first in range(1, 1001, 100):
                group = tuple(entry(number) for number in range(100))
                await connection.call("audit.append", Append(source="node/a", first=first, entries=group), Appended)
        assert writer.stop() == 0
        records = writer.records()
        assert records[0]["sequence"] > 1
        assert [one["sequence"] for one in records] == list(
            range(records[0]["sequence"], records[0]["sequence"] + len(records))
        )
        assert sum(path.stat().st_size for path in writer.folder.glob("*.jsonl")) < 128 << 10
        checked = verify_folder(writer.folder)
        assert checked.good, checked.findings
        assert checked.first == records[0]["sequence"]


async def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    with audit_writer(tmp_path) as writer:
        from hatchway.audit.journal import Journal

        with pytest.raises(HatchwayError) as caught:
            Journal.open(writer.folder)
        assert caught.value.code == "audit_in_use"
