"""Which isolation there is was tried, not assumed; every sandbox says it, and another one is refused."""

import json

import pytest
from conftest import Service

from hatchway.client import HatchwayError

pytestmark = pytest.mark.vm


def test_the_verdict_on_kvm_decides(service: Service) -> None:
    verdicts = json.loads((service.data_dir / "run" / "kvm-verdicts.json").read_text())
    assert verdicts[-1]["detail"], "it says what happened"
    offered, other = ("hardware", "emulated") if verdicts[-1]["works"] else ("emulated", "hardware")
    with service.client() as hatchway:
        with hatchway.sandboxes.create(require_isolation=offered) as sandbox:
            assert sandbox.info.isolation == offered
        with pytest.raises(HatchwayError) as refused:
            hatchway.sandboxes.create(require_isolation=other)
        assert refused.value.code == "isolation_unavailable"
        assert refused.value.remedy
