"""`hatchway bench policy`: what a decision costs with many rules against few. It needs no service."""

import statistics
import time
from collections.abc import Callable, Sequence

from hatchway.bench.report import Metric
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import Policy, compile_policy
from hatchway.domain.policy.reading import canonical, stored
from hatchway.domain.policy.schema import Destination, Document, Http, RequestMatch, Rule
from hatchway.domain.policy.verdicts import Flow, Request

FEW, MANY = 10, 1000
DECISIONS = 300


def policy(runs: int) -> list[Metric]:
    """Decisions at 1,000 rules, with those at 10 as the floor, in turn; microseconds each, the median of the runs' medians.

    `hosts`: each rule for a host of its own; `paths`: all for one host, each for a path of its own; `wildcards`: each for names below a
    domain of its own. Allowed and denied requests, and connections.
    """
    metrics = []
    for name, document in {"hosts": _hosts, "paths": _paths, "wildcards": _wildcards}.items():
        few, many = (_compiled(document(count)) for count in (FEW, MANY))
        for stage, decide in {"request": _request, "denied": _denied, "connect": _connect}.items():
            times: dict[int, list[float]] = {FEW: [], MANY: []}
            for _ in range(runs):
                for count, compiled in ((FEW, few), (MANY, many)):
                    times[count].append(_time(decide(compiled, name, count)))
            value, floor = statistics.median(times[MANY]), statistics.median(times[FEW])
            metrics.append(Metric("policy", f"{stage}_{name}", value, "us", runs, floor))
    text = canonical(_hosts(MANY))
    metrics.append(Metric("policy", "stored_to_policy", _time([lambda: _compiled(stored(text))] * 3) / 1e3, "ms", 3))
    return metrics


def _time(calls: Sequence[Callable[[], object]]) -> float:
    """The median of the calls, in microseconds."""
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def _compiled(document: Document) -> Policy:
    return compile_policy([TieredDocument(tier="sandbox", name="bench", document=document)])


def _rule(number: int, host: str, path: str) -> Rule:
    allow = (RequestMatch(methods=("GET",), paths=(path,)),)
    return Rule(id=f"r{number}", to=Destination(hosts=(host,)), http=Http(allow=allow))


def _hosts(count: int) -> Document:
    return Document(version=1, rules=tuple(_rule(number, f"h{number}.example", "/p/**") for number in range(count)))


def _paths(count: int) -> Document:
    return Document(version=1, rules=tuple(_rule(number, "one.example", f"/p/{number}/**") for number in range(count)))


def _wildcards(count: int) -> Document:
    return Document(version=1, rules=tuple(_rule(number, f"**.h{number}.example", "/p/**") for number in range(count)))


def _host(name: str, number: int) -> str:
    return {"hosts": f"h{number}.example", "paths": "one.example", "wildcards": f"a.b.h{number}.example"}[name]


def _request(compiled: Policy, name: str, count: int) -> list[Callable[[], object]]:
    return _requests(compiled, name, count, "GET")


def _denied(compiled: Policy, name: str, count: int) -> list[Callable[[], object]]:
    return _requests(compiled, name, count, "POST")


def _requests(compiled: Policy, name: str, count: int, method: str) -> list[Callable[[], object]]:
    def call(number: int) -> Callable[[], object]:
        path = f"/p/{number}/x" if name == "paths" else "/p/x"
        request = Request(host=_host(name, number), port=443, tls=True, method=method, path=path)
        return lambda: compiled.request(request, 0.0)

    return [call(at * 7919 % count) for at in range(DECISIONS)]


def _connect(compiled: Policy, name: str, count: int) -> list[Callable[[], object]]:
    def call(number: int) -> Callable[[], object]:
        flow = Flow(host=_host(name, number), port=443)
        return lambda: compiled.connect(flow, 0.0)

    return [call(at * 7919 % count) for at in range(DECISIONS)]
