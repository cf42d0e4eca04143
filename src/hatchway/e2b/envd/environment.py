"""What processes are told of the sandbox that they run in, in the variables that E2B's agent has for it.

It is told to each when it starts, and not to the sandbox when it is made: a fork is another sandbox, with the environment of the first.
"""

from collections.abc import Mapping

from hatchway.client.models import SandboxInfo
from hatchway.e2b import settings


def of(sandbox: SandboxInfo) -> dict[str, str]:
    """The variables; `sandbox` has its annotations."""
    told = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox.id}
    kept = settings.of(sandbox.annotations)
    return told if kept is None else {**told, "E2B_TEMPLATE_ID": kept.template}


def asked_for(env: Mapping[str, str], sandbox: SandboxInfo) -> dict[str, str]:
    """Of a process's environment what whoever started it asked for."""
    told = of(sandbox)
    return {name: value for name, value in env.items() if told.get(name) != value}
