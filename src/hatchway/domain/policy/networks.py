"""Rules for networks with all names in them: `to: {cidrs: […], by_name: true}`.

A name that no rule is about is given an address where such a rule is; what it resolves to is then judged by the networks of the rule, as
`Terms.within` of its verdict. In a document that is a ceiling, such a rule admits names likewise, on the condition that they are in its networks.
"""

from collections.abc import Iterable, Sequence

import msgspec

from hatchway.domain.policy.addresses import Network
from hatchway.domain.policy.rules import CompiledRule


def as_names(rules: Sequence[CompiledRule]) -> CompiledRule:
    """The first of these rules, as it is for a connection to a name: any network of any of them will do."""
    first = min(rules, key=lambda rule: rule.order)
    return first.on(msgspec.structs.replace(first.terms, within=(_networks(rules),)))


def _networks(rules: Iterable[CompiledRule]) -> tuple[Network, ...]:
    return tuple(network for rule in rules for network in rule.networks)
