"""What came of a run, as a table of attempts and bypasses by class and condition, or as lines of JSON."""

import json
from collections.abc import Sequence

from hatchway.redteam.attacks import ATTACKS, CLASSES
from hatchway.redteam.attempts import BYPASS, INVALID, Attempt


def lines(attempts: Sequence[Attempt], seconds: float) -> str:
    """One object for each attempt, and one for the whole."""
    told = [one.line() for one in attempts]
    whole = {"attempts": len(attempts), **counts(attempts), "seconds": round(seconds, 1)}
    return "\n".join(json.dumps(one, ensure_ascii=False) for one in [*told, whole])


def counts(attempts: Sequence[Attempt]) -> dict[str, int]:
    """How many attacks there were, how many attempts got through, and how many were none."""
    return {
        "attacks": len({one.attack.id for one in attempts}),
        "bypasses": sum(one.verdict == BYPASS for one in attempts),
        "invalid": sum(one.verdict == INVALID for one in attempts),
    }


def table(attempts: Sequence[Attempt]) -> str:
    """Bypasses of attempts, by class and condition, and each attempt that is not as it should be."""
    conditions = list(dict.fromkeys(one.condition for one in attempts))
    rows = [["class", *conditions]]
    for kind in CLASSES.values():
        row = [kind]
        for condition in conditions:
            these = [one for one in attempts if one.attack.kind == kind and one.condition == condition]
            row.append(f"{sum(one.verdict == BYPASS for one in these)} of {len(these)}" if these else "-")
        if set(row[1:]) != {"-"}:
            rows.append(row)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(shown)


def named(attempts: Sequence[Attempt], verdicts: Sequence[str]) -> str:
    """The attempts with these verdicts, one a line."""
    return "\n".join(
        f"{one.verdict}  {one.attack.id} ({one.condition}): {one.attack.title}; {', '.join(one.where) or one.why}"
        for one in attempts
        if one.verdict in verdicts
    )


def listing() -> str:
    """All attacks, with the conditions in which they are made."""
    return "\n".join(f"{one.id}  {one.title}  [{' '.join(one.conditions)}]" for one in ATTACKS)
