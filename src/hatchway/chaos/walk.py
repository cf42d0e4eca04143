"""A walk: random acts against a service, from a seed that makes the same walk again."""

import asyncio
import collections
import time
from collections.abc import Collection, Sequence
from typing import Any

from hatchway.chaos.acts import Acts, Ground
from hatchway.chaos.api import Answer, Api
from hatchway.chaos.model import Box, Divergence
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import VERBS, SnapshotKind, State, Verb

PLAIN = (Verb.PAUSE, Verb.RESUME, Verb.SUSPEND, Verb.RESTORE, Verb.STOP, Verb.START, Verb.WAKE)
WEIGHTS = {
    "plain": 40,
    "write": 12,
    "create": 5,
    "branch": 5,
    "keep": 8,
    "roll_back": 6,
    "revive": 4,
    "forget": 4,
    "delete": 5,
    "crowd": 8,
    "race": 3,
    "happen": 4,
    "refuse": 4,
}
"""How often each kind of step is taken, against the others."""


SELDOM = 0.3
"""How often a plain verb that is to be seldom is chosen, against one of the others."""


class Walk(Acts):
    """One history of random acts; `weights`, `seldom` (verbs) and `most` (sandboxes, and snapshots) say of which kind."""

    def __init__(
        self,
        api: Api,
        ground: Ground,
        seed: int,
        *,
        tolerant: bool = False,
        new: dict[str, Any] | None = None,
        weights: dict[str, int] | None = None,
        seldom: Collection[Verb] = (),
        most: int = 6,
    ) -> None:
        super().__init__(api, ground, seed, tolerant=tolerant, new=new)
        self.steps: collections.Counter[str] = collections.Counter()
        self.longest_s = 0.0
        """The longest step."""
        self._seed = seed
        self._weights = {**WEIGHTS, **(weights or {})}
        self._seldom = frozenset(seldom)
        self._most = most

    async def run(self, steps: int) -> None:
        """Takes so many steps. Raises `Divergence`."""
        for _ in range(steps):
            await self.step()

    async def step(self) -> None:
        """Takes one step and compares everything. Raises `Divergence` with the steps that led to it."""
        began = time.monotonic()
        kind = self._next()
        self.steps[kind] += 1
        try:
            await getattr(self, f"_{kind}")()
            await self.compare()
        except Divergence as error:
            told = "\n  ".join(self.history)
            raise Divergence(f"{error}\nSeed {self._seed}, the last steps:\n  {told}") from error
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    # -- choosing

    def _next(self) -> str:
        boxes = len(self.model.boxes)
        weights = dict(self._weights)
        if not boxes:
            weights = {"create": 1}
        elif boxes >= self._most:
            weights.update(create=0, branch=0, revive=0, delete=4 * weights["delete"])
        if not self.model.kept:
            weights.update(roll_back=0, revive=0, forget=0, race=0)
        elif len(self.model.kept) >= self._most:
            weights.update(keep=0, forget=4 * self._weights["forget"])
        kinds = [kind for kind, weight in weights.items() if weight]
        return self.chance.choices(kinds, [weights[kind] for kind in kinds])[0]

    def _box(self, *states: State) -> Box | None:
        fitting = [box for box in self.model.boxes.values() if not states or box.state in states]
        return self.chance.choice(fitting) if fitting else None

    # -- the steps

    async def _plain(self) -> None:
        box = self._box()
        assert box is not None
        fitting = [verb for verb in PLAIN if box.state in VERBS[verb].sources]
        if not fitting or self.chance.random() < 0.2:
            fitting = list(PLAIN)
        await self.do(box, self._plain_verb(fitting))
        await self.same(box)

    def _plain_verb(self, of: Sequence[Verb]) -> Verb:
        return self.chance.choices(of, [SELDOM if verb in self._seldom else 1.0 for verb in of])[0]

    async def _delete(self) -> None:
        box = self._box()
        assert box is not None
        await self.do(box, Verb.DELETE)

    async def _write(self) -> None:
        box = self._box(State.RUNNING)
        if box is not None:
            await self.write(box)

    async def _create(self) -> None:
        await self.create()

    async def _revive(self) -> None:
        await self.create(self.chance.choice(list(self.model.kept.values())))

    async def _branch(self) -> None:
        box = self._box()
        assert box is not None
        await self.fork(box, self.chance.choice((1, 1, 2, 3)))

    async def _keep(self) -> None:
        box = self._box()
        assert box is not None
        await self.keep(box, self.chance.choice(list(SnapshotKind)))

    async def _roll_back(self) -> None:
        own = [kept for kept in self.model.kept.values() if kept.sandbox_id in self.model.boxes]
        if own:
            await self.roll_back(self.chance.choice(own))

    async def _forget(self) -> None:
        await self.forget(self.chance.choice(list(self.model.kept.values())))

    async def _happen(self) -> None:
        box, shut_down = self._box(State.RUNNING, State.PAUSED), self.chance.random() < 0.5
        if box is None:
            return
        shut_down = shut_down and box.state is State.RUNNING
        self.note(f"the machine of {box.id}, {box.state}, {'is powered off' if shut_down else 'is killed'}")
        await self.ground.die(box.id, shut_down=shut_down)
        self.model.ended(box, State.STOPPED if shut_down else State.FAILED)

    async def _refuse(self) -> None:
        """What cannot be: verbs of what was deleted or never was, snapshots of others."""
        if self.model.gone and self.chance.random() < 0.5:
            name = self.chance.choice(self.model.gone)
            verb = self.chance.choice((*PLAIN, Verb.DELETE))
            answer = await self.verb(Box(name, State.DELETED), verb)
            self.note(f"{verb} of {name}, which is deleted: {answer.status} {answer.code}")
            if answer.status != (200 if verb is Verb.DELETE else 410):
                raise Divergence(f"{verb} of a deleted sandbox was answered with {answer}.")
            return
        box = self._box()
        assert box is not None
        others = [kept for kept in self.model.kept.values() if kept.sandbox_id != box.id]
        wanted = self.chance.choice(others).id if others else new_id()
        answer = await self.verb(box, Verb.ROLLBACK, snapshot=wanted)
        self.note(f"rollback of {box.id} to another's snapshot {wanted}: {answer.status} {answer.code}")
        if (answer.status, answer.code) != (404, "unknown_snapshot"):
            raise Divergence(f"A rollback to another's snapshot was answered with {answer}.")

    # -- several at once

    async def _crowd(self) -> None:
        """Several verbs at once on one sandbox: those that are accepted happen one after the other, in the order of acceptance."""
        box = self._box()
        assert box is not None
        verbs = [self._plain_verb(PLAIN) for _ in range(self.chance.randrange(2, 5))]
        if self.chance.random() < 0.3:
            verbs.append(self.chance.choice((Verb.FORK, Verb.SNAPSHOT)))
        if self.chance.random() < 0.2:
            verbs.append(Verb.DELETE)
        self.note(f"at once, {box.id}, {box.state}: {' '.join(verbs)}")
        more: dict[Verb, dict[str, Any]] = {Verb.SNAPSHOT: {"kind": "disk"}, Verb.FORK: {"count": 1}}
        answers = await asyncio.gather(*(self.verb(box, verb, **more.get(verb, {})) for verb in verbs))
        accepted = [await self.api.ended(answer) for answer in answers if answer.status in (200, 202)]
        seen = {str(box.state)}
        for operation in sorted(accepted, key=lambda one: (one["created_at"], one["id"])):
            self.note(f"  {operation['kind']}: {operation['status']} {operation['error'] or ''}")
            await self._in_turn(box, operation, Verb.DELETE in verbs)
            seen.add(str(box.state))
        for verb, answer in zip(verbs, answers, strict=True):
            if answer.status not in (200, 202):
                self._require_reason(verb, answer, seen)
        await self.same(box)

    async def _in_turn(self, box: Box, operation: dict[str, Any], deleted: bool) -> None:
        verb = Verb(operation["kind"])
        if operation["status"] != "succeeded":
            if operation["status"] == "failed" and self._tolerant:
                self.failures[operation["error"]["code"]] += 1
                await self.learn(box, VERBS[verb].target)
            elif not (operation["status"] == "cancelled" and operation["error"]["code"] == "preempted" and deleted):
                raise Divergence(f"The operation ended as {operation}")
            if verb is Verb.FORK:
                await self.remove_branches(box)
            if verb is Verb.SNAPSHOT:
                await self.remove_failed_snapshots()
        elif verb is Verb.FORK:
            await self.forked(box, operation)
        elif verb is Verb.SNAPSHOT:
            self.model.kept_now(box, operation["result"]["snapshot"], SnapshotKind.DISK)
        elif box.id in self.model.boxes or verb is not Verb.DELETE:
            self.model.happened(box, verb)

    def _require_reason(self, verb: Verb, answer: Answer, seen: set[str]) -> None:
        told = answer.body.get("state")
        if answer.code == "wrong_state" and told in seen:
            return
        if answer.code == "operation_in_flight" and told in seen and answer.body.get("operation"):
            return
        if answer.status == 410 and str(State.DELETED) in seen:
            return
        raise Divergence(f"{verb} was answered with {answer}; the states were {seen}.")

    async def _race(self) -> None:
        """A snapshot is deleted while it is used: one of both is refused, and nothing is harmed."""
        kept = self.chance.choice(list(self.model.kept.values()))
        box = self.model.boxes.get(kept.sandbox_id)
        back = box is not None and self.chance.random() < 0.5
        self.note(f"{'rollback to' if back else 'creation from'} {kept.id} ({kept.kind}) and its deletion at once")
        use = (
            self.api.post(f"/v1/sandboxes/{kept.sandbox_id}/rollback", {"snapshot": kept.id})
            if back
            else self.api.post("/v1/sandboxes", {"snapshot": kept.id})
        )
        used, deleted = await asyncio.gather(use, self.api.delete(f"/v1/snapshots/{kept.id}"))
        self.note(f"  {used.status} {used.code}, {deleted.status} {deleted.code}")
        if used.status in (200, 202):
            if await self.succeeded(used, None, None) is None:
                raise Divergence(f"{kept.id} was deleted under the operation that used it.")
            if back and box is not None:
                self.model.rolled_back(box, kept)
            else:
                box = self.model.created(used.body["sandbox"]["id"], kept)
            await self.same(box)
        elif used.code not in ("snapshot_not_ready", "unknown_snapshot"):
            raise Divergence(f"The use of a snapshot was answered with {used}.")
        if deleted.status in (200, 202):
            del self.model.kept[kept.id]
        elif deleted.code != "snapshot_in_use":
            raise Divergence(f"The deletion of a snapshot was answered with {deleted}.")
