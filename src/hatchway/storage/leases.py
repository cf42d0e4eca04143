"""Leases: which control process lives, and which one leads in what only one may do at a time.

A lease is held until it expires and renewed long before. The clock is the database's, so that those of the hosts need not agree.
"""

import time
from collections.abc import Iterable

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from hatchway.storage.tables import leases

CONTROLLER = "controller"
"""Where a connection keeps the id of the control process that it is of; not there, or None, where there is only one."""
_ALIVE = "controller/"


def owner(connection: Connection) -> str | None:
    """The id of the control process that this connection is of."""
    found: str | None = connection.info.get(CONTROLLER)
    return found


def now(connection: Connection) -> float:
    """Unix seconds by the database's clock."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
    return time.time()


def take(connection: Connection, holder: str, names: Iterable[str], ttl_s: float) -> frozenset[str]:
    """Takes or renews the life of the control process `holder` and the leases `names`; returns those of `names` that it holds."""
    at = now(connection)
    return frozenset(
        name
        for name in sorted((f"{_ALIVE}{holder}", *names))
        if _take(connection, holder, name, at, ttl_s) and not name.startswith(_ALIVE)
    )


def _take(connection: Connection, holder: str, name: str, at: float, ttl_s: float) -> bool:
    values = {"holder": holder, "expires_at": at + ttl_s}
    free = or_(leases.c.holder == holder, leases.c.expires_at < at)
    if connection.execute(update(leases).where(leases.c.name == name, free).values(**values)).rowcount:
        return True
    if connection.execute(select(leases.c.name).where(leases.c.name == name)).one_or_none() is not None:
        return False
    connection.execute(insert(leases), {"name": name, **values})
    return True


def end(connection: Connection, holder: str) -> None:
    """Gives up everything that a control process holds, its life too; others need not wait for it to expire."""
    connection.execute(delete(leases).where(leases.c.holder == holder))


def sweep(connection: Connection, older_than_s: float) -> None:
    """Forgets what expired so long ago."""
    connection.execute(delete(leases).where(leases.c.expires_at < now(connection) - older_than_s))


def living(connection: Connection) -> frozenset[str]:
    """The ids of the control processes that live."""
    query = select(leases.c.holder).where(leases.c.name.startswith(_ALIVE), leases.c.expires_at >= now(connection))
    return frozenset(connection.execute(query).scalars())
