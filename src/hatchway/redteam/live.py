"""The stage of a running service: a sandbox of it, and what its client and its operator can do meanwhile."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatchway.client import Hatchway, HatchwayError, InvalidRequest, Sandbox, Unprocessable
from hatchway.redteam.acts import EVERY_S, SETTLE_S, wait
from hatchway.redteam.attempts import Attempt, given, guest_program
from hatchway.redteam.ground import PLACE, Ground
from hatchway.redteam.live_host import LiveHost
from hatchway.redteam.marks import new_mark
from hatchway.redteam.use import Use, disk_mib, memory_mib, neighbours

MEMORY_MIB = 256
SERVED_WITHIN_S = 60.0
"""While a guest floods: an emulated client on a busy machine needs ten seconds for a request, with and without a flood."""
MARKED = "hatchway-redteam"
"""In the metadata of every sandbox of a run."""
PROGRAM = "/root/attacks.pyz"
CARRIERS = ("egress", "broker")
NOTHING: Mapping[str, Any] = {"version": 1}
LIMITS: Mapping[str, int] = {"bytes": 16 << 20, "entries": 1000}
_LOOK = """
import os, re
found = set()
for line in open('/proc/partitions').read().splitlines()[2:]:
    major, minor, _, name = line.split()
    path = '/dev/.look-' + name
    os.mknod(path, 0o60600, os.makedev(int(major), int(minor)))
    with open(path, 'rb', buffering=0) as file:
        kept, left = b'', 384
        while left and (data := file.read(1 << 20)):
            left -= 1
            found |= set(re.findall(rb'hx[0-9a-f]{12}z', kept + data))
            kept = data[-16:]
for name in ('/usr/bin/env', '/etc/passwd', '/etc/hostname'):
    found |= set(re.findall(rb'hx[0-9a-f]{12}z', open(name, 'rb').read()))
for one in found:
    print(one.decode())
"""


class Service:
    """The service under attack, as its operator knows it: the data folder, and the processes."""

    def __init__(self, data_dir: Path, images: Path | None = None) -> None:
        self.data_dir = data_dir
        self.images = images or Path(os.environ.get("HATCHWAY_IMAGES_DIR") or data_dir / "images")

    def roles(self) -> dict[str, int]:
        """The processes by their roles."""
        found: dict[str, int] = json.loads((self.data_dir / "run" / "roles.json").read_bytes())
        return found

    def users(self) -> frozenset[int]:
        """The users of those who carry requests; never root, whose routes are everybody's."""
        carriers = {pid for role, pid in self.roles().items() if role.partition("-")[0] in CARRIERS}
        return frozenset({Path(f"/proc/{pid}").stat().st_uid for pid in carriers} - {0})

    def use(self) -> Use:
        """What it takes of this host."""
        kept = [self.data_dir / name for name in ("audit", "control", "log")]
        return Use(neighbours(), memory_mib(self.roles().values()), disk_mib(kept))


class LiveStage:
    """One sandbox; `policy` is what allows something, and empty where nothing is allowed."""

    every_s = EVERY_S
    settle_s = SETTLE_S

    def __init__(self, hatchway: Hatchway, service: Service, ground: Ground, policy: Mapping[str, Any]) -> None:
        self.ground = ground
        self.folders: Sequence[Path] = [service.data_dir]
        self._hatchway = hatchway
        self._service = service
        self._policy = dict(policy)
        self._sandbox = self._new()
        self._source: Sandbox | None = None
        self._quiet: Sandbox | None = None
        self._host: LiveHost | None = None
        self._before = service.use()

    def _new(self, policy: Mapping[str, Any] | None = None) -> Sandbox:
        wanted = self._policy if policy is None else policy
        return self._hatchway.sandboxes.create(
            memory_mib=MEMORY_MIB, policy=wanted, metadata={MARKED: MARKED}, timeout=300
        )

    def begin(self, attempts: Sequence[Attempt], at_once: int) -> None:
        """Starts the program; it goes on by itself."""
        files = self._sandbox.files
        files.mkdir(PLACE, parents=True, user="root")
        files.write(PROGRAM, guest_program(), user="root")
        files.write(f"{PLACE}/given", given(self.ground.facts(), attempts, at_once=at_once), user="root")
        command = f"setsid python3 -I {PROGRAM} <{PLACE}/given >{PLACE}/told 2>{PLACE}/errors &"
        self._sandbox.run(["sh", "-c", command], user="root", timeout=60)

    def waiting(self, step: str) -> int:
        """Those that wait for it and those that are over."""
        listed = self._say(f"ls {PLACE}; cat {PLACE}/told")
        held = re.findall(rf"held-(hx\w+z)-{step}\n", listed)
        told = re.findall(r'"mark": "(hx\w+z)"', listed)
        return len({*held, *told})

    def printed(self) -> str:
        """What it has told."""
        return self._say(f"cat {PLACE}/told")

    def _say(self, command: str) -> str:
        with contextlib.suppress(HatchwayError):
            return self._sandbox.run(["sh", "-c", command], user="root", timeout=60).stdout
        return ""

    def go(self, step: str) -> None:
        """Writes the file that they wait for."""
        self._sandbox.files.write(f"{PLACE}/go-{step}", b"", user="root")

    def _put(self, policy: Mapping[str, Any]) -> None:
        self._sandbox.update(policy=dict(policy))
        wait(self._applied)

    def _applied(self) -> bool:
        policy = self._sandbox.refresh().policy
        return policy is not None and policy["applied_revision"] == policy["revision"]

    def narrow(self) -> None:
        """Nothing is allowed any more."""
        self._put(NOTHING)

    def pause(self) -> None:
        """Narrowed while it stands still."""
        self._sandbox.pause()
        self._sandbox.update(policy=dict(NOTHING))
        self._sandbox.resume()
        wait(self._applied)

    def suspend(self) -> None:
        """Narrowed while it is no machine."""
        self._sandbox.suspend()
        self._sandbox.update(policy=dict(NOTHING))
        self._sandbox.restore()
        wait(self._applied)

    def fork(self) -> None:
        """Goes on in a branch, beside its source."""
        self._source = self._sandbox
        (self._sandbox,) = self._sandbox.fork(1)

    def rollback(self) -> None:
        """Goes on from where it was a moment ago."""
        kept = self._sandbox.snapshot("full")
        self._sandbox.rollback(kept)

    def reload(self, number: int) -> None:
        """The same, but for its description and a rule that is about something else."""
        rule = {"id": "unused", "to": {"hosts": [f"n{number}.test"]}}
        rules = [*self._policy.get("rules", ()), rule]
        self._put({**self._policy, "description": f"{number}", "rules": rules})

    def kill(self) -> None:
        """Kills gateways and broker, as a fault would."""
        before = self._service.roles()
        for role, pid in before.items():
            if role.partition("-")[0] in CARRIERS:
                os.kill(pid, signal.SIGKILL)

        def back() -> bool:
            now = self._service.roles()
            return all(now.get(role) not in (None, pid) for role, pid in before.items() if role.partition("-")[0] in CARRIERS)  # fmt: skip

        wait(back)
        wait(self._applied)

    def refuse(self, step: str) -> None:
        """What is taken all the same comes into force."""
        with contextlib.suppress(InvalidRequest, Unprocessable):
            self._put(document(step, self.ground))

    def authorities(self) -> Sequence[str]:
        """Those of the branch, of its source, and of a sandbox of its own."""
        self._quiet = self._quiet or self._new(NOTHING)
        read = ["cat", "/run/hatchway/ca.crt"]
        these = [one for one in (self._sandbox, self._source, self._quiet) if one is not None]
        return [one.run(read, user="root", timeout=60).stdout for one in these]

    def tree(self, mark: str) -> str:
        """In the guest."""
        return f"{PLACE}/tree-{mark}"

    def download(self, remote: str, local: Path) -> None:
        """As a client does."""
        with contextlib.suppress(HatchwayError):
            self._sandbox.files.download(
                remote, local, user="root", max_bytes=LIMITS["bytes"], max_entries=LIMITS["entries"]
            )

    def upload(self, local: Path, remote: str) -> None:
        """As a client does."""
        with contextlib.suppress(HatchwayError):
            self._sandbox.files.upload(local, remote, user="root")

    def shared(self, marks: Sequence[str]) -> Mapping[str, str]:
        """What a new sandbox reads on its disks, and what is in the files that all are made from."""
        found: dict[str, str] = {}
        with self._new(NOTHING) as other:
            read = other.run(["python3", "-I", "-c", _LOOK], user="root", timeout=300)
            if read.exit_code:
                return dict.fromkeys(marks, f"nobody knows: {read.stderr[-200:]}")
            found |= dict.fromkeys(read.stdout.split(), "another sandbox's disk")
        for folder in (self._service.images, self._service.data_dir / "node" / "baked", self._service.data_dir / "node" / "vmm"):  # fmt: skip
            for path in folder.rglob("*"):
                if path.is_file():
                    found |= dict.fromkeys(_marks_in(path), "a file that all sandboxes start from")
        return found

    def serves(self) -> bool:
        """Whether a client in another sandbox with the same policy gets what is allowed."""
        if not self._policy.get("rules"):
            return True
        mark = new_mark()
        command = f"curl -s -m 10 https://index.test/simple/{mark}"
        with contextlib.suppress(HatchwayError), self._new() as other:
            other.run(command, timeout=60)
        return bool(self.ground.oracle.where(mark))

    def beside(self) -> str:
        """Whether another sandbox gets what is allowed; and what the service takes of this host."""
        if not wait(self.serves, SERVED_WITHIN_S):
            return "another sandbox is not served"
        return self._before.grown(self._service.use())

    def host(self) -> LiveHost:
        """This service."""
        if self._host is None:
            self._host = LiveHost(self._hatchway, self._service, self._sandbox, self._new(NOTHING))
        return self._host

    def close(self) -> bool:
        """Deletes all; what attacked has to go, too."""
        if self._host is not None:
            self._host.close()
        removed = True
        for one in (self._sandbox, self._source, self._quiet):
            if one is not None:
                try:
                    one.delete()
                except HatchwayError:
                    removed = False
        return removed


def _marks_in(path: Path) -> set[str]:
    found: set[str] = set()
    with path.open("rb") as file:
        kept = b""
        while data := file.read(1 << 22):
            found |= {one.decode() for one in re.findall(rb"hx[0-9a-f]{12}z", kept + data)}
            kept = data[-16:]
    return found


def document(step: str, ground: Ground) -> dict[str, Any]:
    """A policy that may not come into force: what it would open, if it did, is what the attempts try."""
    reading = {"allow": [{"methods": ["GET"], "paths": ["/**"]}]}
    evil: dict[str, Any] = {
        "id": "evil",
        "to": {"hosts": ["evil.test"]},
        "http": reading,
        "resolve": {"private": "allow"},
    }
    evil["tls"] = {"upstream_ca": [ground.authority.pem]}

    def policy(rule: Mapping[str, Any] | None = None, **more: object) -> dict[str, Any]:
        rules = [] if rule is None else [dict(rule)]
        return {"version": 1, **({"rules": rules} if rules else {}), **more}

    def network(*cidrs: str, **more: object) -> dict[str, Any]:
        rule: dict[str, Any] = {"id": "all", "to": {"cidrs": list(cidrs)}, "protocol": "tcp", "ports": [80, 8080]}
        return policy({**rule, **more})

    def credential(source: str) -> dict[str, Any]:
        bound = {"id": "x", "source": source, "inject": [{"where": "header", "name": "x-a", "format": "{}"}]}
        return policy({**evil, "credentials": ["x"]}, credentials=[bound])

    injected = {"id": "x", "source": f"store:redteam-{ground.run}", "inject": [{"where": "header", "name": "x-a", "format": "{}"}]}  # fmt: skip
    passing: dict[str, Any] = {"id": "p", "to": {"hosts": ["evil.test"]}, "credentials": ["x"]}
    documents: dict[str, Callable[[], dict[str, Any]]] = {
        "unknown-key": lambda: policy({**evil, "allow_all": True}, allow_host=["evil.test"]),
        "no-rules": lambda: {"version": 1, "rules": [], "default": "allow"},
        "empty-hosts": lambda: policy({**evil, "to": {"hosts": []}}),
        "empty-destination": lambda: policy({**evil, "to": {}}),
        "all-hosts": lambda: policy({**evil, "to": {"hosts": ["**"]}}),
        "unknown-version": lambda: {**policy(evil), "version": 2},
        "key-twice": lambda: policy(evil, default="deny", mode="off"),
        "no-length": lambda: network("203.0.113.9/"),
        "host-bits": lambda: network("203.0.113.9/0"),
        "octal": lambda: network("0313.0.113.0/24"),
        "without-an-end": lambda: policy(mode="observe"),
        "for-years": lambda: policy(mode="observe", expires="2199-12-31"),
        "passthrough": lambda: policy({**passing, "protocol": "tls", "tls": {"mode": "passthrough", "fronting_risk": "accepted", "expires": "30d"}}, credentials=[injected]),
        "in-clear": lambda: policy({**passing, "tls": {"mode": "none"}}, credentials=[injected]),
        "file": lambda: credential(f"file:{ground.honey}"),
        "variable": lambda: credential("env:PATH"),
        "program": lambda: credential("exec:/bin/true"),
        "anothers-secret": lambda: credential("store:../redteam"),
        "every-port": lambda: policy({**evil, "protocol": "tcp", "ports": [25, 53, 853]}),
        "metadata-network": lambda: network("169.254.0.0/16"),
    }  # fmt: skip
    return documents[step]()
