"""The words that documents, rules and verdicts share."""

from enum import StrEnum

import msgspec

TIERS = ("platform", "project", "template", "sandbox")
"""Where a document stands, the highest first."""


class Action(StrEnum):
    """What is done, the strictest last."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class Protocol(StrEnum):
    """What a rule speaks; later ones (`grpc graphql mcp postgres …`) are further members."""

    TCP = "tcp"
    TLS = "tls"
    HTTP = "http"
    WEBSOCKET = "websocket"
    GIT = "git"


HTTP_FAMILY = frozenset({Protocol.HTTP, Protocol.WEBSOCKET, Protocol.GIT})
"""What is made of requests, each of which is looked at."""


class TlsMode(StrEnum):
    """Whether the gateway ends TLS itself."""

    INTERCEPT = "intercept"
    PASSTHROUGH = "passthrough"
    NONE = "none"
    """The rule is for traffic in clear."""


class RuleRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rule stands."""

    tier: str
    document: str
    rule: str

    def __str__(self) -> str:
        return f"{self.tier}/{self.document}/{self.rule}"
