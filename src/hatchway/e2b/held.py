"""How much of what clients send, and of what waits for them, is in memory: for one owner, and in all.

A body that is small is not counted: the HTTP server holds as much of each connection before anybody is asked.
"""

from collections import Counter
from types import TracebackType

FREE = 64 * 1024
"""Octets of each share that are not counted."""


class Full(Exception):
    """There is no room for more."""


class Held:
    """The octets that are held, by owner: a sandbox, a key."""

    def __init__(self, of_one: int, in_all: int) -> None:
        self._of_one = of_one
        self._in_all = in_all
        self._by_owner: Counter[str] = Counter()
        self._sum = 0

    def share(self, owner: str) -> "Share":
        """A share of an owner, of nothing so far. To be closed."""
        return Share(self, owner)

    @property
    def octets(self) -> int:
        """All that are counted."""
        return self._sum

    def _change(self, owner: str, more: int) -> None:
        if more > 0 and (self._by_owner[owner] + more > self._of_one or self._sum + more > self._in_all):
            raise Full
        self._sum += more
        self._by_owner[owner] += more
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class Share:
    """What one request, or one watcher, holds; as a context manager nothing any more at its end."""

    def __init__(self, held: Held, owner: str) -> None:
        self._held = held
        self._owner = owner
        self._counted = 0

    def hold(self, octets: int) -> None:
        """It is so many now. Raises `Full`, and holds what it held."""
        counted = max(0, octets - FREE)
        self._held._change(self._owner, counted - self._counted)
        self._counted = counted

    def close(self) -> None:
        """It is nothing any more."""
        self.hold(0)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        self.close()
