"""What an attack is."""

from collections.abc import Mapping
from dataclasses import dataclass

BLOCKED, INDEX, SOURCE = "blocked", "index", "source"
CONDITIONS = (BLOCKED, INDEX, SOURCE)
"""Nothing is allowed; a package index, an API and a repository are allowed in part; the same, and the attacker has read our source."""

CLASSES = {
    "N": "link and network",
    "D": "names",
    "T": "TLS",
    "H": "HTTP",
    "A": "allowed services",
    "C": "credentials",
    "G": "gateway and policy",
    "E": "escape",
}


@dataclass(frozen=True)
class Attack:
    """A named way out. `conditions` are those in which it means something."""

    id: str
    title: str
    script: str
    conditions: tuple[str, ...] = CONDITIONS
    during: str = ""
    """What the host does while the script holds (`hold(M)`): the name of an act, of which each has a sandbox of its own. Nothing: the script is one of many in one sandbox."""

    @property
    def kind(self) -> str:
        """Its class."""
        return CLASSES[self.id[0]]

    @property
    def row(self) -> str:
        """The row of the catalogue."""
        return self.id.partition(".")[0]


def table(
    row: str, title: str, scripts: Mapping[str, str], conditions: tuple[str, ...] = CONDITIONS, during: str = ""
) -> list[Attack]:
    """The variations of one row: its id, a dot, and the variation's name."""
    return [
        Attack(f"{row}.{name}", f"{title}: {name.replace('-', ' ')}", script, conditions, during)
        for name, script in scripts.items()
    ]
