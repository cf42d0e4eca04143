"""Rules made ready for matching: what each is about, and the conditions that a request must meet."""

import copy
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote_plus, urlencode

from hatchway.domain.policy.addresses import AddressKind, Network, parse_network
from hatchway.domain.policy.checks import hosts_of, networks_of, protocol_of, tls_of
from hatchway.domain.policy.forms import NEVER_METHODS, seconds_of
from hatchway.domain.policy.names import HostPattern
from hatchway.domain.policy.paths import PathPattern, SegmentGlob, segments_of, split_further
from hatchway.domain.policy.ports import ports_of
from hatchway.domain.policy.schema import Ask, BuiltIn, Document, RequestMatch, Rule
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Request
from hatchway.domain.policy.vocabulary import HTTP_FAMILY, Action, Protocol, RuleRef, TlsMode

NEVER_ENDS = float("inf")
_KINDS = {
    BuiltIn.PUBLIC: AddressKind.PUBLIC,
    BuiltIn.PRIVATE: AddressKind.PRIVATE,
    BuiltIn.LINK_LOCAL: AddressKind.LINK_LOCAL,
    BuiltIn.METADATA: AddressKind.METADATA,
}
_PAIR = re.compile(r"%(?![0-9A-Fa-f]{2})")
ANYTHING = (PathPattern.parse("/**"),)


class Asked:
    """A request, and what matching needs of it, made once."""

    __slots__ = ("_loose", "_strict", "further", "request", "segments", "slash")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.segments = segments_of(request.path)
        self.slash = "%2F" in request.path
        self.further = split_further(self.segments) if self.slash else self.segments
        self._strict: list[tuple[str, str]] | bool | None = False
        self._loose: list[tuple[str, str]] | None = None

    def parameters(self) -> list[tuple[str, str]] | None:
        """The parameters of the query; None where servers may disagree about them."""
        if isinstance(self._strict, bool):
            self._strict = _strictly(self.request.query)
        return self._strict

    def any_parameters(self) -> list[tuple[str, str]]:
        """All that some server may take for a parameter."""
        if self._loose is None:
            parts = re.split("[&;?]", self.request.query)
            split = (part.partition("=") for part in parts)
            self._loose = [(unquote_plus(name), unquote_plus(value)) for name, _, value in split]
        return self._loose


def _strictly(query: str) -> list[tuple[str, str]] | None:
    if ";" in query or "?" in query or _PAIR.search(query) or not query.isascii():
        return None
    made = []
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        try:
            made.append((unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")))
        except UnicodeDecodeError:
            return None
    return made


class Values:
    """Named patterns: of parameters or headers."""

    __slots__ = ("_named", "_required")

    def __init__(self, patterns: Mapping[str, tuple[str, ...]]) -> None:
        self._named = [
            (SegmentGlob(tuple(name.split("*"))), [SegmentGlob(tuple(value.split("*"))) for value in values])
            for name, values in patterns.items()
        ]
        self._required = frozenset(name for name, values in patterns.items() if "*" not in name and "" not in values)

    def admit(self, pairs: list[tuple[str, str]] | None) -> bool:
        """Whether each pair fits one of these, and those that must be there are."""
        return (
            pairs is not None
            and self._required <= {name for name, _ in pairs}
            and all(self._fits(name, value) for name, value in pairs)
        )

    @property
    def example(self) -> tuple[tuple[str, str], ...]:
        """Pairs that these admit, the required ones alone."""
        return tuple(
            ("any".join(name.pieces), "any".join(values[0].pieces))
            for name, values in self._named
            if len(name.pieces) == 1 and not any(value.pieces == ("",) for value in values)
        )

    def any_of(self, pairs: Iterator[tuple[str, str]]) -> bool:
        """Whether a pair fits one of these."""
        return any(self._fits(name, value) for name, value in pairs)

    def _fits(self, name: str, value: str) -> bool:
        return any(
            pattern.matches(name) and any(one.matches(value) for one in values) for pattern, values in self._named
        )


class HeaderValues(Values):
    """Named patterns of headers. A header is looked up with `_` taken for `-`, since servers that hand headers on as variables do so; one that has
    to be there is there as it is spelled in the policy. Several lines of one name are also looked at as the one line that they stand for."""

    __slots__ = ("_spelled",)

    def __init__(self, patterns: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__({_plain(name): values for name, values in patterns.items()})
        self._spelled = frozenset(name for name, values in patterns.items() if "*" not in name and "" not in values)

    def admit_named(self, pairs: tuple[tuple[str, str], ...]) -> bool:
        """Whether what has one of these names fits, however it is divided into lines, and those that must be there are."""
        if not self._spelled <= {name for name, _ in pairs}:
            return False
        lines: dict[str, list[str]] = {}
        for name, value in pairs:
            if any(pattern.matches(_plain(name)) for pattern, _ in self._named):
                lines.setdefault(_plain(name), []).append(value)
        return all(
            self._fits(name, value)
            for name, values in lines.items()
            for value in (values if len(values) == 1 else [*values, ", ".join(values)])
        )

    def any_of(self, pairs: Iterator[tuple[str, str]]) -> bool:
        """Whether a value fits one of these: of a line, of several together, or of a list in one."""
        lines: dict[str, list[str]] = {}
        for name, value in pairs:
            lines.setdefault(_plain(name), []).append(value)
        return any(
            self._fits(name, one)
            for name, values in lines.items()
            for value in [*values, ", ".join(values)]
            for one in (value, *map(str.strip, value.split(",")))
        )

    @property
    def example(self) -> tuple[tuple[str, str], ...]:
        """Headers that these admit, the required ones alone, spelled as in the policy."""
        spelled = {_plain(name): name for name in self._spelled}
        return tuple((spelled.get(name, name), value) for name, value in super().example)


def _plain(name: str) -> str:
    return name.replace("_", "-")


class CompiledRule:
    """One rule of one document, or what its `http.deny` denies."""

    __slots__ = (
        "action",
        "ask",
        "by_name",
        "conditional",
        "encoded_slash",
        "entries",
        "expires",
        "hosts",
        "kinds",
        "networks",
        "observe_until",
        "order",
        "ports",
        "protocol",
        "reason",
        "ref",
        "rehome",
        "special_ports",
        "terms",
        "tls",
        "versions",
    )

    def __init__(
        self, document: Document, rule: Rule, ref: RuleRef, rank: int, terms: Terms, *, sub_deny: bool
    ) -> None:
        """`rank`: of its tier, 0 the highest. `sub_deny`: made of `http.deny` of a rule that allows or asks."""
        self.ref = ref
        self.action = Action.DENY if sub_deny else rule.action
        denies = self.action is Action.DENY
        self.hosts = tuple(map(HostPattern.parse, hosts_of(document, rule)))
        self.networks: tuple[Network, ...] = tuple(map(parse_network, networks_of(document, rule)))
        self.by_name = rule.to.by_name and not denies
        self.kinds = frozenset(_KINDS[BuiltIn(name)] for name in rule.to.groups if name not in document.groups)
        self.ports = ports_of(rule)
        self.special_ports = rule.special_ports is not None and rank <= 1
        self.protocol = (None if sub_deny else rule.protocol) if denies else protocol_of(rule)
        self.tls = None if denies else tls_of(rule)
        ends = [seconds_of(date) for date in (rule.expires, rule.tls.expires) if date is not None]
        self.expires = min(ends, default=NEVER_ENDS)
        self.observe_until = (
            seconds_of(document.expires) if document.mode == "observe" and document.expires is not None else 0.0
        )
        self.conditional = denies and (
            sub_deny or bool(rule.http.deny) or rule.git is not None or rule.protocol in HTTP_FAMILY
        )
        self.terms = terms
        self.ask: Ask = rule.ask
        self.reason = rule.reason
        self.rehome = rule.resolve.rehome
        self.versions = rule.http.versions
        self.encoded_slash = rule.http.encoded_slash
        self.order = (rank, ref.document, ref.rule)
        self.entries = tuple(self._entries(rule, sub_deny))

    def on(self, terms: Terms) -> "CompiledRule":
        """The rule on other terms."""
        other = copy.copy(self)
        other.terms = terms
        return other

    def active(self, now: float) -> bool:
        """Whether it has not ended."""
        return now < self.expires

    def _entries(self, rule: Rule, sub_deny: bool) -> Iterator["Entry"]:
        denies = self.action is Action.DENY
        if not denies and self.protocol not in HTTP_FAMILY:
            return
        if denies and (sub_deny or rule.http.deny):
            for match in rule.http.deny:
                yield Entry.of(self, match)
        elif rule.protocol is Protocol.GIT:
            yield from self._git(rule)
        elif not denies and rule.http.allow:
            for match in rule.http.allow:
                yield Entry.of(self, match)
        else:
            yield Entry(self, ANYTHING)

    def _git(self, rule: Rule) -> Iterator["Entry"]:
        git = rule.git
        operations = git.operations if git else ("fetch", "push") if self.action is Action.DENY else ("fetch",)
        named = tuple(map(PathPattern.parse, git.repositories)) if git else ANYTHING
        paths = tuple(dict.fromkeys(made for path in named for made in (path, path.with_suffix(".git"))))
        for operation in operations:
            service = "git-upload-pack" if operation == "fetch" else "git-receive-pack"
            references = tuple(path.then("info", "refs") for path in paths)
            if self.action is Action.DENY:
                yield Entry(self, references, query=Values({"service": (service,)}))
                yield Entry(self, tuple(path.then(service) for path in paths))
            else:
                yield Entry(self, references, methods=frozenset({"GET"}), exact_query=f"service={service}")
                yield Entry(
                    self, tuple(path.then(service) for path in paths), methods=frozenset({"POST"}), exact_query=""
                )


class Entry:
    """One alternative among a rule's conditions for requests."""

    __slots__ = ("exact_query", "headers", "methods", "paths", "query", "rule", "specificity")

    def __init__(
        self,
        rule: CompiledRule,
        paths: tuple[PathPattern, ...],
        *,
        methods: frozenset[str] | None = None,
        query: Values | None = None,
        exact_query: str | None = None,
        headers: HeaderValues | None = None,
    ) -> None:
        self.rule = rule
        self.paths = paths
        self.methods = methods
        self.query = query
        self.exact_query = exact_query
        self.headers = headers
        self.specificity = min(path.specificity for path in paths)

    @classmethod
    def of(cls, rule: CompiledRule, match: RequestMatch) -> "Entry":
        """An entry of `http.allow` or `http.deny`."""
        methods: frozenset[str] | None = frozenset(match.methods)
        if not match.methods and rule.action is not Action.DENY:
            methods = frozenset({"GET", "HEAD"})
        elif not match.methods or "*" in match.methods:
            methods = None
        return cls(
            rule,
            tuple(map(PathPattern.parse, match.paths)),
            methods=methods,
            query=Values(match.query) if isinstance(match.query, dict) else None,
            exact_query="" if match.query == "none" else None,
            headers=HeaderValues(match.headers) if match.headers is not None else None,
        )

    @property
    def example_query(self) -> str:
        """A query that fits."""
        return urlencode(self.query.example) if self.query is not None else ""

    @property
    def example_headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that fit."""
        return self.headers.example if self.headers is not None else ()

    def objection(self, asked: Asked, now: float) -> str | None:
        """Why the entry is not about a request whose path fits; None when it is. The codes are those of verdicts."""
        request, rule = asked.request, self.rule
        if request.port not in rule.ports:
            return "port_not_allowed"
        if not rule.active(now):
            return "expired"
        return self._denial_objection(asked) if rule.action is Action.DENY else self._objection(asked)

    def _denial_objection(self, asked: Asked) -> str | None:
        request = asked.request
        if self.rule.protocol is Protocol.WEBSOCKET and not request.websocket:
            return "websocket_not_allowed"
        if self.methods is not None and request.method not in self.methods:
            return "method_not_allowed"
        if self.query is not None and not self.query.any_of(iter(asked.any_parameters())):
            return "query_not_allowed"
        if self.exact_query is not None and request.query != self.exact_query:
            return "query_not_allowed"
        if self.headers is not None and not self.headers.any_of(iter(request.headers)):
            return "header_not_allowed"
        return None

    def _objection(self, asked: Asked) -> str | None:
        request, rule = asked.request, self.rule
        if request.tls != (rule.tls is TlsMode.INTERCEPT):
            return "clear_required" if request.tls else "tls_required"
        if request.websocket != (rule.protocol is Protocol.WEBSOCKET):
            return "websocket_not_allowed" if request.websocket else "protocol_not_allowed"
        if request.version not in rule.versions and not (request.version == "1.0" and "1.1" in rule.versions):
            return "version_not_allowed"
        if asked.slash and not rule.encoded_slash:
            return "path_ambiguous"
        if request.method in NEVER_METHODS or (self.methods is not None and request.method not in self.methods):
            return "method_not_allowed"
        if self.exact_query is not None and request.query != self.exact_query:
            return "query_not_allowed"
        if self.query is not None and not self.query.admit(asked.parameters()):
            return "query_not_allowed"
        if self.headers is not None and not self.headers.admit_named(request.headers):
            return "header_not_allowed"
        return None
