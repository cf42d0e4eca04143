"""`hatchway chaos`: random kills of a running service's processes while a random walk compares what it shows with what must be."""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from hatchway.chaos.api import Api
from hatchway.chaos.ground import ROLES, HostGround
from hatchway.chaos.kills import show, storm
from hatchway.chaos.model import Divergence
from hatchway.chaos.walk import Walk
from hatchway.client import AsyncHatchway
from hatchway.domain.errors import Internal, InvalidRequest, Unavailable

SEEDS = 2**31
SLOW = {"plain": 25, "happen": 2, "crowd": 4, "write": 16}
"""Kinds of steps whose weight is another one where a machine takes seconds to boot."""
SMALL = {"memory_mib": 256}


def run(data_dir: Path, *, kills: int, only: Sequence[str], seed: int | None, as_json: bool) -> int:
    """Kills so many processes; returns the exit status. Raises `HatchwayError`."""
    unknown = [role for role in only if role not in ROLES]
    if unknown:
        raise InvalidRequest("unknown_role", f"There is no role {unknown[0]!r}.", f"There are: {', '.join(ROLES)}.")
    try:
        url, key = _found(data_dir)
    except (OSError, ValueError, KeyError) as error:
        raise Unavailable(
            "not_up", f"No service is up on {data_dir}: {error}", "`hatchway up` first, or name its --data-dir."
        ) from error
    seed = random.randrange(SEEDS) if seed is None else seed
    try:
        asyncio.run(_run(data_dir, url, key, kills, list(only) or list(ROLES), seed, as_json))
    except Divergence as error:
        raise Internal(
            "divergence", str(error), f"The same walk again: --seed {seed}. The logs of the roles say more."
        ) from error
    return 0


async def _run(data_dir: Path, url: str, key: str, kills: int, roles: list[str], seed: int, as_json: bool) -> None:
    api = Api(url, key)
    async with AsyncHatchway(url, key) as hatchway:
        ground = HostGround(data_dir, hatchway)
        walk = Walk(api, ground, seed, tolerant=True, new=SMALL, weights=SLOW, most=4)
        try:
            await walk.look_away()
            tolls = await storm(walk, ground, roles, kills, _progress)
            await walk.end()
        finally:
            _progress("")
            await walk.leave()
            await api.close()
    show(tolls, walk, as_json=as_json)


def _found(data_dir: Path) -> tuple[str, str]:
    url = str(json.loads((data_dir / "endpoint.json").read_bytes())["api"])
    return url, (data_dir / "dev.key").read_text(encoding="ascii").strip()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
