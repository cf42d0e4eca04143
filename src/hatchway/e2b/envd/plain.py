"""The small rest of the agent's plain HTTP: whether it is there, what it uses, its environment."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from hatchway.client import SandboxMetrics
from hatchway.client import errors as ours
from hatchway.client.aio import AsyncSandbox
from hatchway.e2b.envd import environment
from hatchway.e2b.envd.endings import RUNNING
from hatchway.e2b.envd.requests import Request
from hatchway.e2b.errors import E2bError

MIB = 1024 * 1024
SAMPLE_S = 0.2
"""Between two looks at the CPU time, where nobody has looked before."""
MAX_AGE_S = 60.0
MAX_SAMPLES = 4096
ENV_WITHIN_S = 15.0
MAX_ENV = 256 * 1024
_OF_A_PROCESS = frozenset({"HOME", "LOGNAME", "USER", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "TERM"})


@dataclass
class Plain:
    """What is kept for it: when a sandbox was last looked at, and its CPU time then."""

    _samples: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    async def health(self, request: Request) -> None:
        """Raises `E2bError` 502 where the sandbox does not run by now."""
        try:
            handle = await request.sandboxes.look(request.sandbox_id)
        except ours.NotFound:
            raise request.not_found() from None
        if handle.state != RUNNING:
            raise request.not_found()

    async def envs(self, request: Request) -> dict[str, str]:
        """The environment that every process of the sandbox begins with, but for what depends on its user."""
        sandbox = await request.sandbox()
        told = environment.of(sandbox.info)
        done = await sandbox.run(
            ["/usr/bin/env", "-0"], env=told, user="root", cwd="/", timeout=ENV_WITHIN_S, max_output=MAX_ENV
        )
        if done.exit_code != 0:
            raise E2bError(500, "the environment of the sandbox cannot be read")
        pairs = (entry.partition("=") for entry in done.stdout.split("\0") if entry)
        return {name: value for name, _, value in pairs if name not in _OF_A_PROCESS}

    async def metrics(self, request: Request) -> dict[str, object]:
        """What the sandbox uses."""
        sandbox = await request.sandbox()
        now = await self._asked(request, sandbox)
        before = self._samples.get(sandbox.id)
        if before is None or now.observed_at <= before[0] or now.observed_at - before[0] > MAX_AGE_S:
            before = (now.observed_at, _cpu_s(now))
            await asyncio.sleep(SAMPLE_S)
            now = await self._asked(request, sandbox)
        self._keep(sandbox.id, now)
        guest = now.guest
        assert guest is not None  # `_asked` has seen to it
        passed = max(now.observed_at - before[0], 1e-3)
        used = max(_cpu_s(now) - before[1], 0.0) / passed * 100 / max(guest.cpus, 1)
        taken = max(guest.memory_total_bytes - guest.memory_available_bytes, 0)
        return {
            "ts": int(time.time()),
            "cpu_count": guest.cpus,
            "cpu_used_pct": round(min(used, 100.0), 2),
            "mem_total_mib": guest.memory_total_bytes // MIB,
            "mem_used_mib": taken // MIB,
            "mem_total": guest.memory_total_bytes,
            "mem_used": taken,
            "mem_cache": guest.memory_cached_bytes,
            "disk_used": max(guest.disk_total_bytes - guest.disk_free_bytes, 0),
            "disk_total": guest.disk_total_bytes,
        }

    async def _asked(self, request: Request, sandbox: AsyncSandbox) -> SandboxMetrics:
        found = await sandbox.metrics()
        if found.guest is not None:
            return found
        if found.state != RUNNING:
            raise request.not_found()
        raise E2bError(500, f"the sandbox does not say what it uses: {found.guest_error}")

    def _keep(self, sandbox_id: str, found: SandboxMetrics) -> None:
        self._samples[sandbox_id] = (found.observed_at, _cpu_s(found))
        self._samples.move_to_end(sandbox_id)
        while len(self._samples) > MAX_SAMPLES:
            self._samples.popitem(last=False)


def _cpu_s(found: SandboxMetrics) -> float:
    guest = found.guest
    return 0.0 if guest is None else guest.cpu_user_s + guest.cpu_system_s
