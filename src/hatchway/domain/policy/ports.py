"""Sets of ports."""

from collections.abc import Iterable

from hatchway.domain.policy.schema import Rule
from hatchway.domain.policy.vocabulary import Action, Protocol, TlsMode


class PortSet:
    """Ports and ranges of them; without any, all."""

    __slots__ = ("_ranges", "_single")

    def __init__(self, ports: Iterable[int | str] = ()) -> None:
        single: set[int] = set()
        ranges: list[tuple[int, int]] = []
        for port in ports:
            low, _, high = str(port).partition("-")
            if high:
                ranges.append((int(low), int(high)))
            else:
                single.add(int(low))
        self._single = frozenset(single)
        self._ranges = tuple(sorted(ranges)) if single or ranges else ((1, 65535),)

    def __contains__(self, port: int) -> bool:
        return port in self._single or any(low <= port <= high for low, high in self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PortSet) and self._single == other._single and self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash((self._single, self._ranges))

    @property
    def all(self) -> bool:
        """Whether it has every port."""
        return self._ranges == ((1, 65535),)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """All of them, as first and last ports, in their order."""
        return tuple(sorted([*((port, port) for port in self._single), *self._ranges]))

    @property
    def examples(self) -> tuple[int, ...]:
        """Some of them: each that is named, and the ends of ranges."""
        return tuple(sorted(self._single | {end for ends in self._ranges for end in ends}))

    def covers(self, other: "PortSet") -> bool:
        """Whether every port of the other is in this."""
        return all(port in self for port in other._single) and all(
            any(mine <= low and high <= most for mine, most in self._ranges)
            or all(port in self for port in range(low, high + 1))
            for low, high in other._ranges
        )

    def overlaps(self, other: "PortSet") -> bool:
        """Whether some port is in both."""
        return (
            any(port in other for port in self._single)
            or any(port in self for port in other._single)
            or any(low <= theirs[1] and theirs[0] <= high for low, high in self._ranges for theirs in other._ranges)
        )

    def __str__(self) -> str:
        if self.all:
            return "any port"
        return ", ".join([*map(str, sorted(self._single)), *(f"{low}-{high}" for low, high in self._ranges)])


def ports_of(rule: Rule) -> PortSet:
    """The ports of a rule; where it names none, those of what it speaks."""
    if rule.ports:
        return PortSet(rule.ports)
    if rule.action is Action.DENY or rule.protocol is Protocol.TCP:
        return PortSet()
    return PortSet((80,) if rule.tls.mode is TlsMode.NONE else (443,))
