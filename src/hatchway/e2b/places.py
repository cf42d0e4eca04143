"""How many requests go to sandboxes at once: of one sandbox, of one project, and in all. Each takes a connection here and one to a node."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from hatchway.e2b import refusals

OF_SANDBOX = 512
"""To commands and files; of its ports a sandbox has fewer, which its node bounds."""
OF_PROJECT = 2_048
IN_ALL = 4_096
"""Of which one project has half: the others always find a place."""


class Places:
    """The places, one for each request that is let in."""

    def __init__(self, of_sandbox: int = OF_SANDBOX, of_project: int = OF_PROJECT, in_all: int = IN_ALL) -> None:
        self._most = {"sandbox": of_sandbox, "project": of_project, "all": in_all}
        self._taken: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def taken(self, sandbox_id: str, project: str | None) -> Iterator[None]:
        """One is taken until the block is left. Raises `E2bError` 429."""
        wanted = (("sandbox", sandbox_id), ("project", project or ""), ("all", ""))
        if any(self._taken[one] >= self._most[one[0]] for one in wanted):
            raise refusals.too_many(sandbox_id)
        self._taken.update(wanted)
        try:
            yield
        finally:
            for one in wanted:
                self._taken[one] -= 1
                if not self._taken[one]:
                    del self._taken[one]
