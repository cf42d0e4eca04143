"""A service as it runs on this host: its guests, its roles' processes, and what lies in its data folder."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import time
from pathlib import Path

from hatchway.chaos.model import Divergence
from hatchway.chaos.roles import Roles, starttime
from hatchway.client import AsyncHatchway, HatchwayError

ROLES = ("control", "node", "launcher", "audit", "broker", "egress-0", "e2b")
MEMORY, DISK = "/dev/shm/chaos", "/var/tmp/chaos"
WITHIN_S = 120.0


class HostGround(Roles):
    """`acts.Ground` of the service in a data folder. It looks only after the sandboxes that it was asked about."""

    def __init__(self, data_dir: Path, hatchway: AsyncHatchway) -> None:
        super().__init__(data_dir)
        self._node = data_dir / "node"
        self._hatchway = hatchway
        self._seen: set[str] = set()
        self._kept: set[str] = set()

    async def write(self, sandbox_id: str, text: str) -> None:
        """See `acts.Ground`."""
        word = shlex.quote(text)
        await self._in_guest(sandbox_id, f"echo {word} >{MEMORY}; echo {word} >{DISK}; sync")

    async def read(self, sandbox_id: str) -> tuple[str, str]:
        """See `acts.Ground`."""
        output = await self._in_guest(sandbox_id, f"cat {MEMORY} 2>/dev/null || echo; cat {DISK} 2>/dev/null || echo")
        memory, disk = output.split("\n")[:2]
        return memory, disk

    async def _in_guest(self, sandbox_id: str, command: str) -> str:
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                sandbox = await self._hatchway.sandboxes.get(sandbox_id)
                done = await sandbox.run(["sh", "-c", command], timeout=60)
            except HatchwayError as error:
                why = f"{error.code}: {error.cause}"
            else:
                if done.exit_code == 0:
                    return done.stdout
                why = f"{done.exit_code}: {done.stderr}"
            if time.monotonic() > until:
                raise Divergence(f"A command in {sandbox_id} did not succeed: {why}")
            await asyncio.sleep(0.1)

    async def die(self, sandbox_id: str, *, shut_down: bool) -> None:
        """See `acts.Ground`."""
        if shut_down:
            sandbox = await self._hatchway.sandboxes.get(sandbox_id)
            with contextlib.suppress(HatchwayError):
                await sandbox.run(["sh", "-c", "sync; echo o >/proc/sysrq-trigger; sleep 60"], user="root", timeout=60)
            return
        shim = self._shim(sandbox_id)
        if shim is None:
            raise Divergence(f"{sandbox_id} has no machine.")
        os.kill(_child(shim), signal.SIGKILL)

    async def strays(self, states: dict[str, str], snapshots: set[str]) -> list[str]:
        """See `acts.Ground`."""
        self._seen |= states.keys()
        self._kept |= snapshots
        found: list[str] = []
        for name in self._seen:
            state, shim = states.get(name), self._shim(name)
            if (shim is not None) != (state in ("running", "paused")):
                found.append(f"{name} is {state}, and its machine is {shim}")
            elif shim is None and (self._run / "vm" / name).exists():
                found.append(f"a run folder of {name}, which is {state}")
            if state is None and (self._node / "sandboxes" / name).exists():
                found.append(f"a folder of {name}, which is not there")
        for name in self._kept:
            if (self._node / "snapshots" / name).exists() != (name in snapshots):
                found.append(f"the folder of the snapshot {name}, which is {'' if name in snapshots else 'not '}there")
        forks = self._node / "sandboxes" / ".forks"
        return [*found, *(f"a capture that branches were made from: {path}" for path in forks.glob("*"))]

    def _shim(self, sandbox_id: str) -> int | None:
        """The process of a machine that lives."""
        try:
            record = json.loads((self._run / "vm" / sandbox_id / "launch.json").read_bytes())
        except FileNotFoundError:
            return None
        return int(record["shim_pid"]) if starttime(record["shim_pid"]) == record["shim_starttime"] else None


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
