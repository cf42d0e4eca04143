"""The table of methods in docs/e2b.md: what the guide says, and what the tests hold it to."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "e2b.md"
RENAMED = {
    "Pty.sendInput": "Pty.send_stdin",
    "Template.fromAWSRegistry": "Template.from_aws_registry",
    "Template.fromGCPRegistry": "Template.from_gcp_registry",
    "Template.toJSON": "Template.to_json",
}
"""Of the JavaScript SDK: what has another name there, besides the usual spelling."""


@dataclass(frozen=True)
class Row:
    """What the guide says of some methods."""

    methods: tuple[str, ...]
    status: str


def rows() -> list[Row]:
    """All rows; methods have the names of the Python SDK."""
    section = PAGE.read_text().split("\n## Methods\n")[1]
    made = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("yes", "alone", "no"):
            owners, names = (re.findall(r"`(\w+)`", cell) for cell in cells[:2])
            made.append(Row(tuple(f"{owner}.{name}" for owner in owners for name in names), cells[2]))
    return made


def said() -> dict[str, str]:
    """Method → status."""
    return {method: row.status for row in rows() for method in row.methods}


def in_python(method: str) -> str:
    """The name in the Python SDK of a method of the JavaScript one."""
    if method in RENAMED:
        return RENAMED[method]
    owner, _, name = method.partition(".")
    if owner == "E2B":
        return method  # a class
    return f"{owner}.{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()}"
