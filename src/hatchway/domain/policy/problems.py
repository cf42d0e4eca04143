"""What is wrong with a document: all of it at once, each with its place and what to do."""

from collections.abc import Sequence

import msgspec

from hatchway.domain.errors import Unprocessable

MAX_PROBLEMS = 100


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake."""

    place: str
    """`rules[3].to.hosts[0]`; empty for the document as a whole."""
    code: str
    cause: str
    remedy: str
    line: int | None = None
    """Where it was written, from 1; YAML only."""

    def __str__(self) -> str:
        return f"{self.place or 'document'}: {self.cause} {self.remedy}"


class PolicyError(Unprocessable):
    """The document is refused as a whole: `problems` says why."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        super().__init__(
            "invalid_policy",
            f"The policy has a problem at {first.place or 'its beginning'}{more}: {first.cause}",
            first.remedy,
            problems=[msgspec.to_builtins(problem) for problem in problems[:MAX_PROBLEMS]],
        )
        self.problems = tuple(problems)
