"""How much of each rule a sandbox has used: connections, requests and octets, within the bounds that the rule sets (`Rate`)."""

from collections.abc import Callable

from hatchway.domain.policy.schema import Rate
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.vocabulary import Protocol, RuleRef
from hatchway.egress.bounds import HOUR, MINUTE, Budget

MAX_RULES = 2048
"""Rules whose use is remembered; the policies of a sandbox have fewer that are used at once."""


class _Use:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.connections = Budget(MINUTE, clock)
        self.requests = Budget(MINUTE, clock)
        self.bytes_out = Budget(HOUR, clock)
        self.open = 0


class Rates:
    """The use of one sandbox. It outlasts a change of policy: a rule that keeps its place keeps its use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._uses: dict[RuleRef | None, _Use] = {}

    def connect(self, terms: Terms | None) -> str:
        """Counts a connection; returns why it may not be, or nothing. Each that may is ended by `disconnect`."""
        uses = [self._use(one) for one in _counting(terms)]
        for use, rate in uses:
            if rate.concurrent is not None and use.open >= rate.concurrent:
                return f"the rule allows {rate.concurrent} connections at a time"
        for use, rate in uses:
            if rate.connections_per_min is not None and not use.connections.take(1, rate.connections_per_min):
                return f"the rule allows {rate.connections_per_min} connections a minute"
        for use, _ in uses:
            use.open += 1
        return ""

    def disconnect(self, terms: Terms | None) -> None:
        """A connection that was let through is over."""
        for one in _counting(terms):
            self._use(one)[0].open -= 1

    def request(self, terms: Terms | None) -> str:
        """Counts a request; returns why it may not be, or nothing."""
        for one in _counting(terms):
            limit = None if one is None else one.rate.requests_per_min
            if limit is not None and not self._use(one)[0].requests.take(1, limit):
                return f"the rule allows {limit} requests a minute"
        return ""

    def send(self, terms: Terms | None, octets: int) -> str:
        """Counts octets to the outside; returns why they may not go, or nothing."""
        for one in _counting(terms):
            if one is None:
                continue
            limit, frames = one.rate.bytes_out_per_hour, one.websocket.bytes_out_per_hour
            if one.protocol is Protocol.WEBSOCKET and frames is not None:
                limit = frames if limit is None else min(frames, limit)
            if limit is not None and not self._use(one)[0].bytes_out.take(octets, limit):
                return f"the rule allows {limit} octets an hour"
        return ""

    def _use(self, terms: Terms | None) -> tuple[_Use, Rate]:
        rule = None if terms is None else terms.rule
        use = self._uses.get(rule)
        if use is None:
            while len(self._uses) >= MAX_RULES:
                idle = next((one for one, known in self._uses.items() if not known.open), None)
                if idle is None:
                    break
                del self._uses[idle]
            use = self._uses[rule] = _Use(self._clock)
        return use, Rate() if terms is None else terms.rate


def _counting(terms: Terms | None) -> tuple[Terms | None, ...]:
    """Whose bounds count: the rule's own, and those of the ceilings' rules above it."""
    return (terms,) if terms is None else (terms, *terms.under)
