"""`hatchway doctor`: what this host offers, what is lacking, and what to do about it."""

import asyncio
import contextlib
import http.client
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError
from hatchway.launcher import cgroups, devices, network
from hatchway.node.images.host import missing_packages
from hatchway.node.images.store import Images
from hatchway.node.vmm import choice, firecracker_probe
from hatchway.node.vmm.probe import Finding, examine
from hatchway.node.vmm.seam import VmmError
from hatchway.supervisor import database, folder, profile, uids, wrapper
from hatchway.supervisor.settings import Settings, libexec
from hatchway.wire import audit, supervision
from hatchway.wire.node import Empty, NodeInfo
from hatchway.wire.rpc import call_once

NODE_WITHIN_S = 5.0
_MARKS = {"ok": "ok", "degraded": "degraded", "missing": "MISSING"}


def doctor(settings: Settings, *, as_json: bool) -> int:
    """Prints the findings; returns 1 when something is missing without which no sandbox runs."""
    findings = [*_installation(settings), *asyncio.run(_host(settings))]
    if as_json:
        found = [{"name": f.name, "status": f.status, "detail": f.detail, "remedy": f.remedy} for f in findings]
        print(json.dumps({"findings": found}, indent=2))
    else:
        for finding in findings:
            print(f"{_MARKS.get(finding.status, finding.status):9} {finding.name:18} {finding.detail}")
            if finding.remedy and finding.status != "ok":
                print(f"{'':28} remedy: {finding.remedy}")
    return 1 if any(finding.status == "missing" for finding in findings) else 0


async def _host(settings: Settings) -> list[Finding]:
    kernel = None
    images = Images(settings.images)
    for release in images.list():
        kernel = images.resolve_digest(release.digest).part("kernel")
    data = settings.data_dir
    while not data.exists():
        data = data.parent
    verdicts = settings.run if settings.run.is_dir() and os.access(settings.run, os.W_OK) else data
    found = await examine(data=data, verdicts=verdicts, kernel=kernel)
    found.append(_io_limits(data))
    found.append(await firecracker_probe.look(settings.vmm, verdicts, kernel))
    try:
        chosen = await choice.choose(settings.vmm, settings.node, verdicts, kernel)
        found.append(Finding("vmm", "ok", f"{chosen.driver}: {chosen.why}"))
    except VmmError as error:
        found.append(Finding("vmm", "missing", str(error), "docs/installation.md shows how to bring Firecracker."))
    return found


def _io_limits(data: Path) -> Finding:
    """Whether control groups can bound what VMs read and write; their monitors do in any case."""
    alone = "the machine monitors' own bounds hold alone"
    if not devices.disk_of(data.stat().st_dev):
        remedy = "Put the data folder on a file system that has a disk of its own."
        return Finding(
            "io limits", "degraded", f"{data} is on a file system that is on no disk of this host: {alone}.", remedy
        )
    for version, mounts in cgroups.mounted():
        if version == "v1" and "blkio" in mounts:
            return Finding(
                "io limits", "ok", "Control groups version 1: writes that go to the disk at once are bounded."
            )
        if version == "v2" and cgroups.has_io(mounts[""]):
            return Finding("io limits", "ok", "Control groups version 2.")
    return Finding(
        "io limits", "degraded", f"No control group bounds input and output: {alone}.", "Enable the controller `io`."
    )


def _slots(settings: Settings) -> Finding:
    """Whether VMs can have a network: a slot is made as the launcher makes one, and thrown away."""
    if not (nft := network.find_nft()):
        return Finding(
            "network slots", "degraded", "nft is not installed: sandboxes have no network.", "apt-get install nftables"
        )
    if settings.identity.rootless:
        return Finding("network slots", "ok", f"{nft}; `hatchway up` tries it in its user namespace.")
    try:
        shim = str(libexec("hatchway-shim"))
    except HatchwayError as error:
        return Finding("network slots", "degraded", error.cause, error.remedy)
    if why := network.Rules(shim, nft).lack():
        return Finding("network slots", "degraded", f"Sandboxes have no network: {why}", network.MODULES)
    return Finding("network slots", "ok", f"{nft}: namespace, tap, rules and sockets can be made.")


def _installation(settings: Settings) -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding("python", "ok", version)]
    for name in ("hatchway-agent", "hatchway-shim", "hatchway-ram.so"):
        try:
            findings.append(Finding(name, "ok", str(libexec(name))))
        except HatchwayError as error:
            findings.append(Finding(name, "missing", error.cause, error.remedy))
    missing = [package.name for package in missing_packages()]
    if missing:
        findings.append(
            Finding(
                "packages", "missing", " ".join(missing), f"apt-get install --no-install-recommends {' '.join(missing)}"
            )
        )
    else:
        findings.append(Finding("packages", "ok", "everything that builds a template is installed"))
    findings.append(_slots(settings))
    findings.append(_folder(settings))
    findings += _profile(settings)
    holder = folder.Lock(settings).holder()
    findings.append(Finding("service", "ok", f"up, pid {holder}" if holder else "not up"))
    if holder:
        findings += _warned(settings)
        findings.append(_journal(settings))
        findings.append(_wrapper(settings))
    if settings.identity.rootless:
        findings.append(
            Finding(
                "privileges",
                "degraded",
                "not root: VMs share your user id, templates cannot be built",
                "Run `hatchway up` as root for the full jail.",
            )
        )
    else:
        findings.append(_user_ids(settings))
    return findings


def _warned(settings: Settings) -> list[Finding]:
    """What the node of the running service warns of, and what the supervisor had to do."""
    told = supervision.read(settings.run)
    found = []
    for role, number in ({} if told is None else told.hung).items():
        remedy = f"{settings.log / role}.log says what came before."
        found.append(Finding("service", "degraded", f"{role} did not answer {number} times, and was killed.", remedy))
    try:
        answered = call_once(settings.run / "node.sock", "node.info", Empty(), within=NODE_WITHIN_S)
        info = msgspec.msgpack.decode(answered, type=NodeInfo)
    except (OSError, TimeoutError, HatchwayError, msgspec.MsgspecError) as error:
        return [*found, Finding("node", "degraded", f"it cannot be asked: {error}", "Run it as the service's user.")]
    warned = [Finding("node", "degraded", text, "docs/troubleshooting.md") for text in info.warnings]
    return [*found, *(warned or [Finding("node", "ok", f"{info.vmm}, {info.isolation}: it warns of nothing")])]


def _journal(settings: Settings) -> Finding:
    """Whether the running service can record what happens."""
    try:
        answered = call_once(settings.run / audit.SOCKET, "audit.health", Empty(), within=NODE_WITHIN_S)
        health = msgspec.msgpack.decode(answered, type=audit.Health)
    except (OSError, TimeoutError, HatchwayError, msgspec.MsgspecError) as error:
        remedy = f"{settings.log / 'audit.log'} says why; run this as the service's user."
        return Finding("audit", "degraded", f"the writer cannot be asked: {error}", remedy)
    if not health.writable:
        remedy = f"Free space on the file system of {settings.audit}, or keep less (`[audit]` in the settings)."
        return Finding("audit", "degraded", f"nothing can be recorded: {health.error}", remedy)
    return Finding("audit", "ok", f"{health.head} records, {health.octets >> 20} MiB, key {health.public_key}")


def _wrapper(settings: Settings) -> Finding:
    """Whether the running service answers as E2B does."""
    try:
        url = json.loads(settings.endpoint.read_bytes()).get("e2b")
    except (OSError, ValueError, AttributeError):
        url = None
    if url is None:
        return Finding("e2b", "ok", "switched off")
    try:
        status = wrapper.probe(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        remedy = f"{settings.log / 'e2b.log'} says more."
        return Finding("e2b", "degraded", f"{url} does not answer: {error or type(error).__name__}", remedy)
    if status != wrapper.HEALTHY:
        return Finding("e2b", "degraded", f"{url}/health answered {status}", "Look what listens there.")
    return Finding("e2b", "ok", f"{url} serves the API of E2B")


def _profile(settings: Settings) -> list[Finding]:
    """What `up` would refuse with these settings."""
    told = f"{settings.profile}, settings from {settings.config or 'nowhere: the defaults'}"
    refused = []
    with contextlib.suppress(HatchwayError):  # what is wrong with the user ids is another finding
        settings = replace(settings, uid_base=uids.base_of(settings))
    checks = (profile.check_listeners, database.check, database.password, profile.check_tls, profile.load_metrics)
    for check in (*checks, profile.check_folder):
        try:
            check(settings)
        except HatchwayError as error:
            refused.append(Finding("profile", "missing", error.cause, error.remedy))
        except OSError as error:
            refused.append(
                Finding("profile", "degraded", f"not everything could be looked at: {error}", "Run it as root.")
            )
    return refused or [Finding("profile", "ok", told)]


def _user_ids(settings: Settings) -> Finding:
    try:
        base = uids.base_of(settings)
    except HatchwayError as error:
        return Finding("privileges", "missing", error.cause, error.remedy)
    which = "from a range that is drawn when the data folder is made" if base is None else f"from {base} on"
    return Finding("privileges", "ok", f"root: every VM gets a user id of its own, {which}")


def _folder(settings: Settings) -> Finding:
    if not settings.data_dir.exists():
        return Finding("data folder", "ok", f"{settings.data_dir} (will be made)")
    try:
        folder.check(settings.data_dir, os.geteuid())
    except HatchwayError as error:
        return Finding("data folder", "missing", error.cause, error.remedy)
    return Finding("data folder", "ok", str(settings.data_dir))
