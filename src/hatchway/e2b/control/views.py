"""What the API answers with: E2B's objects, made of ours. A member that SDKs need and that is missing is an exception at the user's."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from hatchway.domain.lifetimes import MAX_TIMEOUT_S
from hatchway.e2b import network
from hatchway.e2b.settings import Settings
from hatchway.e2b.version import ENVD_VERSION
from hatchway.e2b.wrapper import Wrapper

if TYPE_CHECKING:
    from hatchway.client.models import SandboxInfo, SandboxMetrics, Snapshot, Template

CLIENT_ID = "hatchway"
"""Once the name of a machine; SDKs of the first generation join it to the sandbox's id."""
TAG = "default"
"""What E2B calls the tag that is meant where none is named."""

_MICROSECOND = timedelta(microseconds=1)
PAUSED = ("suspended", "paused", "stopped")
"""Our states that are `paused` there: all from which a connect leads to `running`."""


def sandbox(wrapper: Wrapper, info: "SandboxInfo", settings: Settings, *, connected: bool = False) -> dict[str, Any]:
    """A sandbox as those who make or connect to it see it.

    Who connects gets its token also where nobody asks for one: of a sandbox that SDK 2.20 connected to, and one URL for everything, it sends
    nothing else, and the token says which it is.
    """
    tokens = wrapper.identity
    wrapper.links.note(info.id, tokens)
    shown = {
        "sandboxID": info.id,
        "templateID": settings.template,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "domain": wrapper.config.domain,
        "trafficAccessToken": None
        if network.way_in(settings.network).allow_public_traffic
        else tokens.traffic_token(info.id),
    }
    if settings.alias is not None:
        shown["alias"] = settings.alias
    if settings.secure or connected:
        shown["envdAccessToken"] = tokens.envd_token(info.id)
    return shown


def listed(info: "SandboxInfo", settings: Settings) -> dict[str, Any]:
    """A sandbox in a list."""
    shown: dict[str, Any] = {
        "sandboxID": info.id,
        "templateID": settings.template,
        "clientID": CLIENT_ID,
        "startedAt": time(info.created_at or 0.0),
        "endAt": time(ends_at(info)),
        "cpuCount": info.vcpus,
        "memoryMB": info.memory_mib,
        "diskSizeMB": info.disk_mib,
        "state": "paused" if info.state in PAUSED else "running",
        "envdVersion": ENVD_VERSION,
        "metadata": info.metadata,
    }
    if settings.alias is not None:
        shown["alias"] = settings.alias
    return shown


def detail(wrapper: Wrapper, info: "SandboxInfo", settings: Settings, *, token: bool) -> dict[str, Any]:
    """A sandbox with all that is told of it; `token`: to somebody who may have the right to its commands and files."""
    shown = listed(info, settings)
    shown["domain"] = wrapper.config.domain
    shown["lifecycle"] = {
        "autoResume": settings.auto_resume,
        "onTimeout": "kill" if info.on_timeout == "delete" else "pause",
    }
    shown["allowInternetAccess"] = settings.allow_internet_access
    if token:
        shown["envdAccessToken"] = wrapper.identity.envd_token(info.id)
    if settings.network is not None:
        shown["network"] = settings.network
    if info.state in PAUSED:
        shown["pauseMode"] = "filesystem" if info.state == "stopped" else "full"
    return shown


def ends_at(info: "SandboxInfo") -> float:
    """When its time is over; of a paused one when it was paused. One without a bound has a time that is never reached."""
    if info.state in PAUSED:
        return info.state_since or info.updated_at or 0.0
    return info.expires_at if info.expires_at is not None else (info.created_at or 0.0) + MAX_TIMEOUT_S


def metric(found: "SandboxMetrics", cpu_used_pct: float) -> dict[str, Any] | None:
    """One sample; None where the guest says nothing."""
    guest = found.guest
    if guest is None:
        return None
    cached = min(guest.memory_cached_bytes, guest.memory_total_bytes)
    return {
        "timestamp": time(found.observed_at),
        "timestampUnix": int(found.observed_at),
        "cpuCount": guest.cpus,
        "cpuUsedPct": round(cpu_used_pct, 2),
        "memUsed": max(0, guest.memory_total_bytes - guest.memory_available_bytes),
        "memTotal": guest.memory_total_bytes,
        "memCache": cached,
        "diskUsed": max(0, guest.disk_total_bytes - guest.disk_free_bytes),
        "diskTotal": guest.disk_total_bytes,
    }


def snapshot(kept: "Snapshot") -> dict[str, Any]:
    """A snapshot: what can be given for a template."""
    return {"snapshotID": snapshot_id(kept.id), "names": [f"{kept.name}:{TAG}"] if kept.name else []}


def snapshot_id(kept_id: str) -> str:
    """As E2B shows it, with its tag."""
    return f"{kept_id}:{TAG}"


def template(names: list[str], releases: "list[Template]", shape: tuple[int, int, int]) -> dict[str, Any]:
    """A template, which has been released at least once: `shape` is what a sandbox of it gets, vCPUs and MiB of memory and disk."""
    newest = max(releases, key=lambda release: release.created_at or 0.0)
    vcpus, memory_mib, disk_mib = shape
    return {
        "templateID": names[0],
        "buildID": build_id(newest),
        "cpuCount": vcpus,
        "memoryMB": memory_mib,
        "diskSizeMB": disk_mib,
        "public": True,
        "aliases": names,
        "names": names,
        "createdAt": time(min(release.created_at or 0.0 for release in releases)),
        "updatedAt": time(newest.created_at or 0.0),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(releases),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
        **({"description": newest.description} if newest.description else {}),
    }


def build_id(release: "Template") -> str:
    """The id of a release, a UUID that follows from its digest."""
    digits = release.digest.removeprefix("sha256:")[:32]
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def time(seconds: float) -> str:
    """Unix seconds as RFC 3339: the last microsecond that is not behind them, so that who compares with it finds what it was of."""
    found = datetime.fromtimestamp(round(seconds, 6), UTC)
    while found.timestamp() > seconds:
        found -= _MICROSECOND
    while (later := found + _MICROSECOND).timestamp() <= seconds:
        found = later
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")
