"""Transactions against each other, from several control processes where the database has them: each as if it were alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import text
from tests.support import postgres
from tests.support.databases import database, where
from tests.unit.test_storage_transitions import new, running, seen

from hatchway.domain.errors import Conflict, HatchwayError, Unavailable
from hatchway.domain.lifecycle import State, Verb
from hatchway.storage import accepting, claims, ending, keys, leases, operations, outbox, sandboxes, server, settings
from hatchway.storage.database import Connection, Database
from hatchway.storage.idempotency import Answered, IdempotencyKey

__all__ = ["database", "where"]

A, B = "a" * 20, "b" * 20


@contextlib.asynccontextmanager
async def several(where: str) -> AsyncIterator[tuple[Database, ...]]:
    """The database as two control processes have it; the same one twice where there can be only one."""
    first = await Database.open(where, controller=A)
    second = await Database.open(where, controller=B) if first.shared else first
    try:
        await first.write(keys.ensure_project, "default")
        yield first, second
    finally:
        await first.close()
        await second.close()


async def test_of_many_creates_with_one_idempotency_key_one_is_made(where: str) -> None:
    key = IdempotencyKey(key="k", request_hash=b"1" * 32)
    async with several(where) as both:
        asked = [both[n % 2].write(accepting.accept_create, new(), key) for n in range(12)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        made = [one for one in outcomes if isinstance(one, accepting.Accepted)]
        assert len(made) == 1
        for other in outcomes:
            if other is not made[0]:
                assert isinstance(other, Answered)
                assert other.answer["sandbox"] == made[0].sandbox.id


async def test_of_many_verbs_one_takes_the_sandbox_and_a_delete_always_does(where: str) -> None:
    async with several(where) as both:
        row = await running(both[0])
        verbs = [Verb.PAUSE, Verb.STOP, Verb.SUSPEND, Verb.PAUSE, Verb.DELETE, Verb.STOP]
        outcomes = await asyncio.gather(
            *(both[n % 2].write(accepting.accept_verb, "default", row.id, verb, None) for n, verb in enumerate(verbs)),
            return_exceptions=True,
        )
        accepted = [one for one in outcomes if isinstance(one, accepting.Accepted)]
        refused = [one for one in outcomes if not isinstance(one, accepting.Accepted)]
        assert [one.operation.kind for one in accepted if one.operation.kind is Verb.DELETE] == [Verb.DELETE]
        assert len(accepted) <= 2
        assert all(isinstance(one, Conflict) and one.code == "operation_in_flight" for one in refused)
        left = await both[0].read(operations.unfinished)
        assert [one.kind for one in left] == [Verb.DELETE]


async def test_what_is_made_once_is_made_once(where: str) -> None:
    def once(connection: Connection, value: int) -> int:
        found = settings.get(connection, "one")
        if found is None:
            settings.put(connection, "one", value)
            return value
        return int(found)

    async with several(where) as both:
        got = await asyncio.gather(*(both[n % 2].write(once, n) for n in range(10)))
        assert len(set(got)) == 1
        await asyncio.gather(*(both[n % 2].write(keys.ensure_project, "new") for n in range(6)))


async def test_a_count_before_a_bound_is_not_passed_by_those_who_count_together(where: str) -> None:
    def add(connection: Connection) -> bool:
        if connection.execute(text("SELECT count(*) FROM sandboxes")).scalar_one() >= 5:
            return False
        accepting.accept_create(connection, new(), None)
        return True

    async with several(where) as both:
        made = await asyncio.gather(*(both[n % 2].write(add) for n in range(20)))
        assert made.count(True) == 5


async def test_a_reader_of_events_never_finds_an_older_one(where: str) -> None:
    async with several(where) as both:

        async def write(number: int) -> None:
            for _ in range(10):
                await both[number % 2].write(outbox.append, "default", "test", str(number), {})

        async def follow() -> list[int]:
            read: list[int] = []
            while len(read) < 100:
                more = await both[0].read(outbox.after_any, read[-1] if read else 0, 1000)
                read += [event.sequence for event in more]
            return read

        following = asyncio.create_task(follow())
        await asyncio.gather(*(write(number) for number in range(10)))
        read = await asyncio.wait_for(following, 60)
        everything = await both[0].read(outbox.after_any, 0, 1000)
        assert read == [event.sequence for event in everything]


async def test_whoever_waits_for_events_hears_of_those_of_others(where: str) -> None:
    async with several(where) as (first, second):
        heard = asyncio.Event()
        second.on_commit.add(heard.set)
        async with asyncio.timeout(60):
            while not heard.is_set():  # it may have begun to listen only now
                await first.write(outbox.append, "default", "test", "x", {})


async def test_a_lease_has_one_holder_until_it_expires(where: str) -> None:
    async with several(where) as (first, second):
        got = await asyncio.gather(
            *(one.write(leases.take, who, ["x"], 60.0) for one, who in ((first, A), (second, B)) * 5)
        )
        assert len({who for held, who in zip(got, (A, B) * 5, strict=True) if held}) == 1
        winner = A if got[0] else B
        loser = B if winner == A else A
        assert await first.read(leases.living) == {A, B}
        assert await first.write(leases.take, winner, ["x"], -1.0) == {"x"}, "it is its own to renew"
        assert await second.write(leases.take, loser, ["x"], 60.0) == {"x"}
        assert await first.read(leases.living) == {loser}
        await second.write(leases.end, loser)
        assert await first.read(leases.living) == frozenset()


async def test_operations_of_the_dead_are_claimed_by_one_and_those_of_the_living_by_nobody(where: str) -> None:
    async with several(where) as (first, second):
        for who in (A, B):
            await first.write(leases.take, who, [], 60.0)
        made = [await first.write(accepting.accept_create, new(), None) for _ in range(20)]
        if first.shared:
            assert {one.operation.id for one in made} == {
                one.id for one in await first.read(operations.unfinished) if one.controller_id == A
            }
            assert await second.write(claims.claim, B, ["node-one"], accepted_by=0.0) == []
            await first.write(leases.take, A, [], -1.0)
        elsewhere = await second.write(claims.claim, B, ["node-two"], accepted_by=0.0)
        assert elsewhere == [], "their node is not reached from there"
        taken = await asyncio.gather(
            *(second.write(claims.claim, who, ["node-one"], accepted_by=0.0) for who in (B, B, "c" * 20))
        )
        everyone = [operation.id for batch in taken for operation, _ in batch]
        assert sorted(set(everyone)) == sorted(one.operation.id for one in made)
        mine = {operation.id for operation, _ in (*taken[0], *taken[1])}
        for one in made:
            holds = await second.read(claims.holds, B, one.operation.id)
            assert holds == (one.operation.id in mine) or one.operation.id in {op.id for op, _ in taken[2]}
        late = await second.write(claims.claim, B, [], accepted_by=made[-1].operation.created_at + 1)
        assert {operation.id for operation, _ in late} <= {one.operation.id for one in made}, (
            "too old to wait for its node"
        )
        await second.write(claims.give_back_all, B)
        assert not await second.read(claims.holds, B, made[0].operation.id)


async def test_a_finished_operation_is_nobodys(where: str) -> None:
    async with several(where) as (first, _):
        row = await running(first)
        ended = (await first.read(operations.list_page, "default", target=row.id, limit=1))[0]
        assert not await first.read(claims.holds, A, ended.id)
        assert await first.write(claims.claim, B, ["node-one"], accepted_by=1e12) == []


# -- PostgreSQL alone: what only a server can do


@pytest.fixture
def url() -> Any:
    with postgres.database_url() as made:
        yield made


async def test_a_server_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    own = postgres.PostgresServer(durable=True)
    try:
        own.start()
        name = own.make()
        opened = await Database.open(own.url(name), controller=A)
        try:
            await opened.write(keys.ensure_project, "default")
            row = await running(opened)
            writing = [asyncio.create_task(opened.write(accepting.accept_create, new(), None)) for _ in range(20)]
            await asyncio.to_thread(own.stop)
            writing += [asyncio.create_task(opened.write(accepting.accept_create, new(), None)) for _ in range(5)]
            reading = asyncio.create_task(opened.read(sandboxes.get, "default", row.id))
            await asyncio.to_thread(own.start)
            assert (await reading).id == row.id
            made = await asyncio.gather(*writing)
            kept = await opened.read(sandboxes.list_page, "default", limit=100)
            assert {one.sandbox.id for one in made} | {row.id} == {one.id for one in kept}, "each once"
            heard = asyncio.Event()
            opened.on_commit.add(heard.set)
            other = await Database.open(own.url(name), controller=B)
            async with asyncio.timeout(60):
                while not heard.is_set():  # until it listens again
                    await other.write(outbox.append, "default", "test", "x", {})
            await other.close()

            await asyncio.to_thread(own.stop)
            monkeypatch.setattr(server, "RECONNECT_WITHIN_S", 0.1)
            with pytest.raises(Unavailable) as raised:
                await opened.write(keys.ensure_project, "x")
            assert raised.value.code == "database_unusable"
        finally:
            await opened.close()
    finally:
        own.close()


async def test_a_commit_whose_end_was_not_heard_is_looked_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await Database.open(url, controller=A)
    await opened.write(keys.ensure_project, "default")
    from sqlalchemy import exc
    from sqlalchemy.engine.base import RootTransaction

    real = RootTransaction.commit
    broken: list[str] = []

    def commit(self: RootTransaction) -> None:
        if not broken:
            broken.append("after")
            real(self)
            raise exc.OperationalError("COMMIT", {}, Exception("the connection is lost"), connection_invalidated=True)
        if broken == ["after", "before"]:
            broken.append("done")
            self.rollback()
            raise exc.OperationalError("COMMIT", {}, Exception("the connection is lost"), connection_invalidated=True)
        real(self)

    monkeypatch.setattr(RootTransaction, "commit", commit)
    try:
        first = await opened.write(accepting.accept_create, new(), None)
        broken.append("before")
        second = await opened.write(accepting.accept_create, new(), None)
        kept = await opened.read(sandboxes.list_page, "default", limit=100)
        assert {one.id for one in kept} == {first.sandbox.id, second.sandbox.id}
        assert len(kept) == 2
        assert broken == ["after", "before", "done"]
    finally:
        await opened.close()


async def test_what_the_server_refuses_has_a_code(url: str) -> None:
    opened = await Database.open(url)
    try:
        with pytest.raises(HatchwayError) as nul:
            await opened.write(keys.ensure_project, "a\0b")
        assert nul.value.code == "invalid_field"
        with pytest.raises(HatchwayError) as late:
            await opened.write(
                lambda connection: connection.execute(text("SET LOCAL statement_timeout = 10; SELECT pg_sleep(5)"))
            )
        assert late.value.code == "database_busy"
        with pytest.raises(HatchwayError) as odd:
            await opened.write(lambda connection: connection.execute(text("SELECT nothing FROM nowhere")))
        assert odd.value.code == "database_unusable"
    finally:
        await opened.close()


@pytest.mark.parametrize(
    "where",
    ["postgresql://user:hidden@127.0.0.1:1/x", "postgresql://user:hidden@/x?host=/nowhere", "postgresql://["],
)
async def test_a_server_that_is_not_there_is_told_at_once_and_without_the_password(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable) as raised:
        await Database.open(where)
    assert raised.value.code == "database_unusable"
    assert "hidden" not in f"{raised.value} {raised.value.cause} {raised.value.remedy}"


async def test_processes_that_start_together_migrate_once() -> None:
    with postgres.database_url(empty=True) as made:
        opened = await asyncio.gather(*(Database.open(made, controller=str(n) * 20) for n in range(4)))
        row = await running_on(opened)
        assert (await opened[3].read(sandboxes.get, "default", row)).state is State.RUNNING
        for one in opened:
            await one.close()


async def running_on(opened: list[Database]) -> str:
    await opened[0].write(keys.ensure_project, "default")
    accepted = await opened[1].write(accepting.accept_create, new(), None)
    ended = seen(accepted.sandbox, State.RUNNING)
    finished = await opened[2].write(ending.succeed, accepted.operation, ended, 1.0)
    assert finished is not None
    return accepted.sandbox.id
