"""Metrics, as JSON lines for programs or a table for people."""

import json
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One figure. `ratio` is value / floor, where there is a floor to compare with."""

    bench: str
    metric: str
    value: float
    unit: str
    runs: int
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the floor, rounded to two digits."""
        return round(self.value / self.floor, 2) if self.floor else None

    def as_json(self) -> str:
        """One line of JSON."""
        floor = None if self.floor is None else round(self.floor, 2)
        return json.dumps(
            {
                "bench": self.bench,
                "metric": self.metric,
                "value": round(self.value, 2),
                "unit": self.unit,
                "floor": floor,
                "ratio": self.ratio,
                "runs": self.runs,
            }
        )


def percentile(values: list[float], percent: float) -> float:
    """The value below which `percent` % of the values lie, interpolated."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(percent) - 1]


def show(metrics: list[Metric], *, as_json: bool) -> None:
    """Prints them."""
    if as_json:
        for metric in metrics:
            print(metric.as_json(), flush=True)
        return
    print(f"{'bench':8} {'metric':28} {'value':>10} {'unit':5} {'floor':>10} {'ratio':>6} {'runs':>5}")
    for metric in metrics:
        floor = "" if metric.floor is None else f"{metric.floor:.2f}"
        ratio = "" if metric.ratio is None else f"{metric.ratio:.2f}"
        print(
            f"{metric.bench:8} {metric.metric:28} {metric.value:10.2f} {metric.unit:5} {floor:>10} {ratio:>6} {metric.runs:5}"
        )
