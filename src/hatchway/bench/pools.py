"""What the claim of a pool's member costs, against a bare restore in the same run; and how long the pool takes to be full again."""

import statistics
import time
from collections.abc import Callable

import httpx

from hatchway.bench.floor import make_floor
from hatchway.bench.options import Options
from hatchway.bench.report import Metric, percentile
from hatchway.client import Hatchway, config

NAME = "bench"
SIZE = 2
WARM_UP = 2
FULL_WITHIN_S = 300.0


def pools(options: Options) -> list[Metric]:
    """A creation that claims, from the request to running, and the refill behind it; each in turn with the floor."""
    claims: list[float] = []
    floors: list[float] = []
    refills: list[float] = []
    with Hatchway() as hatchway, _api() as http:
        path = f"/v1/pools/{NAME}"
        http.put(path, json={"template": "seed:latest", "size": SIZE}).raise_for_status()
        try:
            _full(http, path)  # with it comes the baked snapshot, which the floor restores too
            with make_floor(options.data_dir) as bare:
                for number in range(WARM_UP + options.runs):
                    options.progress(f"claim {number + 1} of {WARM_UP + options.runs}")
                    began = time.perf_counter()
                    sandbox = hatchway.sandboxes.create()
                    took = (time.perf_counter() - began) * 1e3
                    refilled = _full(http, path)
                    sandbox.delete()
                    base = bare.restore()
                    if number >= WARM_UP:
                        claims.append(took)
                        refills.append(refilled)
                        floors.append(base)
        finally:
            http.delete(path)
            _until(http, path, lambda answer: answer.status_code == 404)
    floor = statistics.median(floors)
    return [
        Metric("pools", "pool_claim", statistics.median(claims), "ms", options.runs, floor),
        Metric("pools", "pool_claim_p95", percentile(claims, 95), "ms", options.runs, floor),
        Metric("pools", "pool_refill", statistics.median(refills), "ms", options.runs, floor),
    ]


def _api() -> httpx.Client:
    found = config.find()
    headers = {} if found.key is None else {"authorization": f"Bearer {found.key}"}
    return httpx.Client(base_url=found.url, headers=headers, timeout=60)


def _full(http: httpx.Client, path: str) -> float:
    """Waits until every member is ready; returns how long that took, in milliseconds."""
    began = time.perf_counter()
    _until(http, path, lambda answer: answer.json()["pool"]["ready"] == SIZE)
    return (time.perf_counter() - began) * 1e3


def _until(http: httpx.Client, path: str, good: Callable[[httpx.Response], bool]) -> None:
    deadline = time.monotonic() + FULL_WITHIN_S
    while not good(answer := http.get(path)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the pool is not there yet: {answer.text}")
        time.sleep(0.01)
