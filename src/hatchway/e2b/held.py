"""How much of what clients send, and of what waits for them, is in memory: for one owner, for one project, and in all.

A body that is small is not counted: the HTTP server holds as much of each connection before anybody is asked.
"""

from collections import Counter
from types import TracebackType

FREE = 64 * 1024
"""Octets of each share that are not counted."""


class Full(Exception):
    """There is no room for more. `bound` says which one was reached: `one`, `project`, `all`."""

    def __init__(self, bound: str) -> None:
        super().__init__(bound)
        self.bound = bound


class Held:
    """The octets that are held, by owner (a sandbox, a watcher) and by project."""

    def __init__(self, of_one: int, of_project: int, in_all: int) -> None:
        self._most = {"one": of_one, "project": of_project, "all": in_all}
        self._by: Counter[tuple[str, str]] = Counter()

    def share(self, owner: str, project: str) -> "Share":
        """A share of an owner, of nothing so far. To be closed."""
        return Share(self, owner, project)

    @property
    def octets(self) -> int:
        """All that are counted."""
        return self._by["all", ""]

    def _change(self, owner: str, project: str, more: int) -> None:
        wanted = (("one", owner), ("project", project), ("all", ""))
        for whose in wanted if more > 0 else ():
            if self._by[whose] + more > self._most[whose[0]]:
                raise Full(whose[0])
        for whose in wanted:
            self._by[whose] += more
            if not self._by[whose]:
                del self._by[whose]


class Share:
    """What one request, or one watcher, holds; as a context manager nothing any more at its end."""

    def __init__(self, held: Held, owner: str, project: str) -> None:
        self._held = held
        self._owner = owner
        self._project = project
        self._counted = 0

    def hold(self, octets: int) -> None:
        """It is so many now. Raises `Full`, and holds what it held."""
        counted = max(0, octets - FREE)
        self._held._change(self._owner, self._project, counted - self._counted)
        self._counted = counted

    def close(self) -> None:
        """It is nothing any more."""
        self.hold(0)

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:  # fmt: skip
        self.close()
