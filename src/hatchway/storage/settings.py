"""Settings of the installation, and the registry of its nodes."""

import time
from typing import Any

from sqlalchemy import Connection, insert, select, update

from hatchway.storage.tables import nodes, settings


def get(connection: Connection, key: str) -> Any:
    """The value, or None."""
    return connection.execute(select(settings.c.value).where(settings.c.key == key)).scalar_one_or_none()


def put(connection: Connection, key: str, value: Any) -> None:
    """Sets the value."""
    done = connection.execute(update(settings).where(settings.c.key == key).values(value=value))
    if done.rowcount == 0:
        connection.execute(insert(settings), {"key": key, "value": value})


def note_node(connection: Connection, node_id: str, address: str, info: dict[str, Any]) -> None:
    """Records that the node was connected just now, and what it says of itself."""
    now = time.time()
    values = {"address": address, "info": info, "seen_at": now}
    done = connection.execute(update(nodes).where(nodes.c.id == node_id).values(**values))
    if done.rowcount == 0:
        connection.execute(insert(nodes), {"id": node_id, "created_at": now, **values})
