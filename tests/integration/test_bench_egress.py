"""`hatchway bench egress` measures what it says: a small run, whose figures are not looked at but for being there."""

import os
import shutil

import pytest

from hatchway.bench.egress import measured


def test_every_figure_is_measured_through_a_real_gateway() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root: that the bench of the gateway runs was not shown")
    metrics = {metric.metric: metric for metric in measured(1, "", idle=5, seconds=0.1)}
    for name in ("requests", "handshakes", "latency", "tcp"):
        assert metrics[f"{name}_direct"].value > 0
        assert metrics[f"{name}_gateway"].floor == metrics[f"{name}_direct"].value
    assert {"gateway_idle", "p99_beside_flood"} <= metrics.keys()
