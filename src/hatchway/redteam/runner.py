"""The attempts in real sandboxes of a running service: one sandbox for each condition, as root of it, many attempts in one command."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hatchway.client import Hatchway, HatchwayError, Sandbox
from hatchway.redteam.acts import ACTS, SETTLE_S, perform
from hatchway.redteam.attacks import Attack
from hatchway.redteam.attacks.attack import BLOCKED, CONDITIONS
from hatchway.redteam.attacks.channel import FLOODS
from hatchway.redteam.attacks.floods import FLOOD
from hatchway.redteam.attempts import BYPASS, INVALID, Attempt, given, guest_program, judge
from hatchway.redteam.ground import Ground, standing
from hatchway.redteam.live import MARKED, MEMORY_MIB, PROGRAM, LiveStage, Service
from hatchway.redteam.marks import new_mark

AT_A_TIME = 60
BATCH_WITHIN_S = 600.0
PLACES = 3
"""How many sandboxes at a time of attacks that have one each. Most of the time is waiting; while one floods, it is alone."""

_ALLOWED = Attack(
    "C00.allowed",
    "What the policy allows arrives",
    "site('index.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: index.test\\r\\n\\r\\n')",
)
_CONDITION = Attack(
    "C00.condition",
    "What is allowed under a condition on a header arrives",
    "site('files.test', b'GET /simple/' + B + b' HTTP/1.1\\r\\nHost: files.test\\r\\nX-Mode: read\\r\\n\\r\\n')",
)
_CREDENTIAL = Attack(
    "C00.credential",
    "A placeholder in its place becomes the secret",
    "site('api.test', b'GET /v1/' + B + b' HTTP/1.1\\r\\nHost: api.test\\r\\nAuthorization: Bearer ' + os.environ['REDTEAM_TOKEN'].encode() + b'\\r\\n\\r\\n')",
)
_WITNESS = Attack("C00.witness", "Another sandbox hears itself", "")
NEIGHBOURS = "E06"
SECRETS_SITE = "api.test"
_SECRET = Attack("C00.secret", "The secret, in all that arrived from all attacks", "")


def attack(
    hatchway: Hatchway,
    service: Service,
    attacks: Sequence[Attack],
    conditions: Sequence[str],
    users: frozenset[int],
    progress: Callable[[str], None],
) -> list[Attempt]:
    """Makes the attempts and returns them with their verdicts. Raises `HatchwayError`, and `OSError` where there can be no namespaces."""
    done: list[Attempt] = []
    with standing(naive=False, users=users) as ground, _settings(hatchway, ground) as secret:
        for condition in [one for one in CONDITIONS if one in conditions]:
            wanted = [one for one in attacks if condition in one.conditions]
            if wanted:
                done += _Condition(hatchway, service, ground, condition, secret, progress).run(wanted)
        if unseen := ground.unseen():
            print(f"{unseen} frames of this host's interfaces passed unseen", file=sys.stderr)
    return done


@contextmanager
def _settings(hatchway: Hatchway, ground: Ground) -> Iterator[str]:
    """A policy of the project that lends the sites' network to policies of sandboxes, and a credential; both end with the run."""
    name, secret = f"redteam-{ground.run}", new_mark()
    never = {"id": "never", "to": {"hosts": ["projects.wild.test"]}, "action": "deny"}
    policy = {"version": 1, "private_networks": [f"{ground.net}.0/24"], "rules": [never]}
    hatchway.policies.put(name, policy, tier="project")
    try:
        hatchway.credentials.put(name, [SECRETS_SITE, *ground.rebound_api], value=secret)
        try:
            yield secret
        finally:
            hatchway.credentials.delete(name)
    finally:
        hatchway.policies.delete(name, tier="project")


class _Neighbour:
    """Another sandbox, whose root listens."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.mark = new_mark()
        command = f"python3 -I {PROGRAM} listen {self.mark} >/root/heard 2>&1 </dev/null &"
        sandbox.run(command, user="root", timeout=60)

    def heard(self) -> set[str]:
        """The markers that reached it."""
        return set(self.sandbox.run(["cat", "/root/heard"], user="root", timeout=60).stdout.split())


class _Condition:
    """One condition's sandbox, which is made anew when an attack broke it."""

    def __init__(
        self,
        hatchway: Hatchway,
        service: Service,
        ground: Ground,
        condition: str,
        secret: str,
        progress: Callable[[str], None],
    ) -> None:
        self._hatchway = hatchway
        self._service = service
        self._ground = ground
        self._condition = condition
        self._secret = secret
        self._progress = progress

    def run(self, attacks: Sequence[Attack]) -> list[Attempt]:
        """All attempts of the condition, and those that show that what is allowed passes."""
        with self._lent():
            return self._tried(attacks)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """A policy of the project has the rule of the secret: none of a sandbox's own says who vouches for its site."""
        name = f"redteam-{self._ground.run}-secret"
        if self._condition == BLOCKED:
            yield
            return
        self._hatchway.policies.put(name, self._secrets_policy(), tier="project")
        try:
            yield
        finally:
            self._hatchway.policies.delete(name, tier="project")

    def _tried(self, attacks: Sequence[Attack]) -> list[Attempt]:
        plain = [one for one in attacks if not one.during]
        done = self._in_one(plain) if plain else []
        for act in ACTS:
            if these := [one for one in attacks if one.during == act]:
                self._progress(f"{self._condition}: {act}, {len(these)}")
                done += perform(act, these, self._condition, self._stage, 1 if act in (FLOOD, FLOODS) else PLACES)
        if self._condition != BLOCKED:
            done.append(self._kept())
        return done

    def _stage(self) -> LiveStage:
        return LiveStage(self._hatchway, self._service, self._ground, self._policy())

    def _in_one(self, attacks: Sequence[Attack]) -> list[Attempt]:
        """Many attempts in one sandbox."""
        done: list[Attempt] = []
        self._sandbox = self._new()
        neighbour = _Neighbour(self._new()) if any(one.row == NEIGHBOURS for one in attacks) else None
        try:
            done += self._control(_ALLOWED) + self._control(_CONDITION)
            for at in range(0, len(attacks), AT_A_TIME):
                self._progress(f"{self._condition}: {at} of {len(attacks)}")
                done += self._whole(attacks[at : at + AT_A_TIME])
            if neighbour is not None:
                done += self._overheard(neighbour, done)
            if self._condition != BLOCKED:
                done += self._control(_CREDENTIAL)
        finally:
            self._leave()
            if neighbour is not None:
                with contextlib.suppress(HatchwayError):
                    neighbour.sandbox.delete()
        return done

    def _overheard(self, neighbour: "_Neighbour", attempts: Sequence[Attempt]) -> list[Attempt]:
        """What another sandbox heard counts as arrived, whichever attack sent it. One that does not even hear itself is no witness."""
        heard = neighbour.heard()
        for one in attempts:
            if one.mark in heard:
                one.where.append("another sandbox")
                one.verdict = BYPASS
        if neighbour.mark in heard:
            return []
        return [Attempt(_WITNESS, self._condition, why="the other sandbox heard nothing, not even itself")]

    def _control(self, one: Attack) -> list[Attempt]:
        """What has to arrive. Where it does not, blocking the rest says nothing: the attempt is `invalid`."""
        if self._condition == BLOCKED:
            return []
        (attempt,) = self._batch([one])
        if one is _CREDENTIAL and not self._ground.oracle.where(self._secret):
            attempt.where = []
        if attempt.where:
            return []
        attempt.verdict, attempt.why = INVALID, attempt.why or "what is allowed did not arrive"
        return [attempt]

    def _kept(self) -> Attempt:
        """The secret is at the site that it is for, and nowhere else."""
        attempt = Attempt(_SECRET, self._condition, mark=self._secret, verdict="blocked", why="")
        attempt.where = [
            one for one in self._ground.oracle.where(self._secret) if not one.endswith(f", as {SECRETS_SITE}")
        ]
        if attempt.where:
            attempt.verdict = BYPASS
        return attempt

    def _whole(self, attacks: Sequence[Attack]) -> list[Attempt]:
        """A batch; what could not be made in it is tried once more, in a new sandbox where this one is broken."""
        attempts = self._batch(attacks)
        failed = [one.attack for one in attempts if one.verdict == INVALID]
        if not failed:
            return attempts
        with contextlib.suppress(HatchwayError):
            self._leave()
        self._sandbox = self._new()
        again = {one.attack.id: one for one in self._batch(failed)}
        return [again.get(one.attack.id, one) for one in attempts]

    def _batch(self, attacks: Sequence[Attack]) -> list[Attempt]:
        attempts = [Attempt(one, self._condition) for one in attacks]
        printed, why = "", ""
        try:
            result = self._sandbox.run(
                ["python3", "-I", PROGRAM],
                stdin=given(self._ground.facts(), attempts),
                user="root",
                timeout=BATCH_WITHIN_S,
            )
            printed, why = result.stdout, result.stderr[-300:] if result.exit_code else ""
        except HatchwayError as error:
            why = f"{error.code}: {error.cause}"
        time.sleep(SETTLE_S)
        judge(attempts, printed, self._ground.oracle, self._ground.token)
        for one in attempts:
            if one.verdict == INVALID and why:
                one.why = why
        return attempts

    def _new(self) -> Sandbox:
        sandbox = self._hatchway.sandboxes.create(
            memory_mib=MEMORY_MIB, policy=self._policy(), metadata={MARKED: MARKED}, timeout=300
        )
        sandbox.files.write(PROGRAM, guest_program(), user="root")
        return sandbox

    def _leave(self) -> None:
        with contextlib.suppress(HatchwayError):
            self._sandbox.delete()

    def _policy(self) -> dict[str, Any]:
        if self._condition == BLOCKED:
            return {"version": 1}
        ca = {"upstream_ca": [self._ground.authority.pem]}
        private = {"private": "allow"}
        read = [{"methods": ["GET", "HEAD"], "paths": ["/simple/**", "/packages/**"]}]
        rules: list[dict[str, Any]] = [
            {"id": "index", "to": {"hosts": ["index.test"]}, "http": {"allow": read}, "tls": ca},
            {
                "id": "files",
                "to": {"hosts": ["files.test"]},
                "http": {"allow": [{**one, "headers": {"x-mode": "read"}} for one in read]},
                "tls": ca,
            },
            {
                "id": "chat",
                "to": {"hosts": ["files.test"]},
                "protocol": "websocket",
                "http": {"allow": [{"paths": ["/chat"]}]},
                "tls": ca,
            },
            {"id": "clear", "to": {"hosts": ["clear.test"]}, "http": {"allow": read}, "tls": {"mode": "none"}},
            {
                "id": "wild",
                "to": {"hosts": ["*.wild.test"]},
                "http": {"allow": read, "deny": [{"paths": ["/simple/private/**"]}]},
                "tls": {"mode": "none"},
            },
            {"id": "raw", "to": {"hosts": ["raw.test"]}, "protocol": "tcp", "ports": [9090]},
            {
                "id": "drop",
                "to": {"hosts": ["drop.test"]},
                "http": {"allow": [{"methods": ["POST"], "paths": ["/in"]}]},
                "tls": ca,
            },
            {
                "id": "git",
                "to": {"hosts": ["git.test"]},
                "protocol": "git",
                "git": {"operations": ["fetch"], "repositories": ["/team/repo"]},
                "tls": ca,
            },
        ]
        return {
            "version": 1,
            "dns": {
                "records": {name: [at] for name, at in (self._ground.zone | self._ground.rebound).items()},
            },
            "rules": [
                *({**one, "resolve": private} for one in rules),
                {"id": "never", "to": {"hosts": ["denied.wild.test"]}, "action": "deny"},
                {
                    "id": "rebound",
                    "to": {"hosts": ["*.rebound.test"]},
                    "ports": [80, self._ground.port],
                    "http": {"allow": read},
                    "tls": {"mode": "none"},
                },
            ],
        }

    def _secrets_policy(self) -> dict[str, Any]:
        records = {name: [address] for name, address in self._ground.rebound_api.items()}
        return {
            "version": 1,
            "dns": {"records": {SECRETS_SITE: [self._ground.zone[SECRETS_SITE]]} | records},
            "rules": [
                {
                    "id": "rebound",
                    "to": {"hosts": list(self._ground.rebound_api)},
                    "http": {"allow": [{"methods": ["GET"], "paths": ["/v1/**"]}]},
                    "tls": {"upstream_ca": [self._ground.authority.pem]},
                    "credentials": ["token"],
                },
                {
                    "id": "api",
                    "to": {"hosts": [SECRETS_SITE]},
                    "http": {"allow": [{"methods": ["GET", "POST"], "paths": ["/v1/**"]}]},
                    "tls": {"upstream_ca": [self._ground.authority.pem]},
                    "resolve": {"private": "allow"},
                    "credentials": ["token"],
                },
            ],
            "credentials": [
                {
                    "id": "token",
                    "source": f"store:redteam-{self._ground.run}",
                    "expose": {"env": "REDTEAM_TOKEN"},
                    "inject": [{"where": "header", "name": "authorization", "format": "Bearer {}"}],
                }
            ],
        }
