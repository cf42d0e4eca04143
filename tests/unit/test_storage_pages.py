"""A page of a list takes the same work wherever it lies and however long the list is: counted, not timed."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, event, insert
from tests.support.databases import database, where
from tests.unit.test_storage_transitions import new

from hatchway.domain.ids import new_id
from hatchway.storage import accepting, sandboxes
from hatchway.storage.database import Database
from hatchway.storage.rows import SandboxRow
from hatchway.storage.sandboxes import Filter
from hatchway.storage.tables import sandboxes as table

__all__ = ["database", "where"]

PAGE = 10


def _work(connection: Connection, wanted: Filter, **asked: Any) -> tuple[int, list[SandboxRow]]:
    """What the database did for one page: steps of SQLite's machine, rows that PostgreSQL's plan touched."""
    if connection.dialect.name == "sqlite":
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        raw: Any = connection.connection.dbapi_connection
        raw.set_progress_handler(step, 1)
        try:
            page = sandboxes.list_page(connection, "default", wanted, limit=PAGE, **asked)
        finally:
            raw.set_progress_handler(None, 1)
        return steps, page
    told: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        told.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    page = sandboxes.list_page(connection, "default", wanted, limit=PAGE, **asked)
    event.remove(connection, "before_cursor_execute", note)
    (statement, parameters) = told[0]
    plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
    return _touched(plan[0]["Plan"]), page


def _touched(plan: dict[str, Any]) -> int:
    own = int(plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * int(plan["Actual Loops"])
    return own + sum(_touched(child) for child in plan.get("Plans", []))


async def _add(database: Database, count: int, begin: float, **changes: Any) -> None:
    accepted = await database.write(accepting.accept_create, new(), None)
    made = msgspec.structs.asdict(accepted.sandbox)

    def fill(connection: Connection) -> None:
        rows = [
            {**made, "id": new_id(), "created_at": begin + number, "operation_id": None, "state": "running", **changes}
            for number in range(count)
        ]
        connection.execute(insert(table), rows)
        connection.exec_driver_sql("ANALYZE")  # as a server's autovacuum does it

    await database.write(fill)


@pytest.mark.parametrize("states", [(), ("running",), ("running", "failed", "deleted")])
async def test_a_page_takes_the_same_work_wherever_it_lies(database: Database, states: tuple[str, ...]) -> None:
    # Those that are deleted lie between, and before, what is listed.
    await _add(database, 100, 0.0)
    await _add(database, 100, 0.5, state="deleted")
    few, _ = await database.read(_work, Filter(states=states), behind=(50.0, ""))
    await _add(database, 2000, 1_000.0)
    await _add(database, 2000, 1_000.5, state="deleted")
    await _add(database, 200, 10_000.0, state="stopped")
    for before in (None, (2_500.0, ""), (1_100.0, ""), (50.0, "")):
        work, page = await database.read(_work, Filter(states=states), behind=before)
        assert len(page) == PAGE
        assert page == sorted(page, key=lambda row: (-row.created_at, row.id))
        assert work < 4 * few, (before, work, few)
    for behind in (None, (60.0, ""), (1_100.0, ""), (2_500.0, "")):
        work, page = await database.read(_work, Filter(states=states), behind=behind, ascending=True)
        assert len(page) == PAGE
        assert page == sorted(page, key=lambda row: (row.created_at, row.id))
        assert work < 4 * few, (behind, work, few)


@pytest.mark.parametrize("ascending", [False, True])
async def test_pages_together_are_the_list(database: Database, ascending: bool) -> None:
    await _add(database, 57, 0.0)
    await _add(database, 31, 0.25, state="failed")
    await _add(database, 20, 0.5, state="deleted")
    read: list[SandboxRow] = []
    while True:
        behind = (read[-1].created_at, read[-1].id) if read else None
        wanted = Filter(states=("running", "failed"))
        page = await database.read(sandboxes.list_page, "default", wanted, behind=behind, ascending=ascending, limit=7)
        if not page:
            break
        read += page
    assert len({row.id for row in read}) == len(read) == 57 + 31
    assert read == sorted(read, key=lambda row: (row.created_at, row.id), reverse=not ascending)
    assert await database.read(sandboxes.count, "default", Filter(states=("running", "failed"))) == 57 + 31
