"""Verbs through the API, one at a time, each compared with the model: what it answers, what it leads to, what is kept by it."""

import asyncio
import collections
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from hatchway.chaos.api import WITHIN_S, Answer, Api
from hatchway.chaos.model import Box, Divergence, Kept, Model
from hatchway.domain.ids import new_id
from hatchway.domain.lifecycle import SNAPSHOT_SOURCES, VERBS, SnapshotKind, State, Verb, admits, verbs_from

REMEMBERED = 60


class Ground(Protocol):
    """What the service stands on: guests that write, machines that end, and what is there besides what the API shows."""

    async def write(self, sandbox_id: str, text: str) -> None:
        """The guest of a running sandbox has this text in its memory and, durably, on its disk."""

    async def read(self, sandbox_id: str) -> tuple[str, str]:
        """What the guest of a running sandbox has in its memory and on its disk."""

    async def die(self, sandbox_id: str, *, shut_down: bool) -> None:
        """The machine is killed, or its guest powers it off."""

    async def strays(self, states: dict[str, str], snapshots: set[str]) -> list[str]:
        """What is there and belongs to none of these sandboxes and snapshots, or is lacking."""


class Acts:
    """One user of a service who knows what has to come of what he does.

    `tolerant`: operations may fail, since faults are injected; what they say must be so all the same. Every act raises `Divergence`.
    """

    def __init__(
        self, api: Api, ground: Ground, seed: int = 0, *, tolerant: bool = False, new: dict[str, Any] | None = None
    ) -> None:
        self.model = Model()
        self.failures: collections.Counter[str] = collections.Counter()
        """Codes of operations that failed."""
        self.api = api
        self.ground = ground
        self.history: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        self.chance = random.Random(seed)
        self._tolerant = tolerant
        self._new = {"template": "seed:latest", **(new or {})}
        self._others: frozenset[str] = frozenset()
        self._told = 0
        self._key = ""
        self._sent: tuple[str, dict[str, Any] | None] = ("", None)

    async def look_away(self) -> None:
        """What is there now is somebody else's, and is left alone."""
        self._others = frozenset((await self.api.all("sandboxes")).keys() | (await self.api.all("snapshots")).keys())

    async def leave(self) -> None:
        """Deletes what is left of ours, without comparing: after a divergence, or when it is given up."""
        for what in ("sandboxes", "snapshots"):
            for name in await self._listed(what):
                await self.api.delete(f"/v1/{what}/{name}")

    async def _listed(self, what: str) -> dict[str, dict[str, Any]]:
        return {name: one for name, one in (await self.api.all(what)).items() if name not in self._others}

    # -- comparing

    async def compare(self) -> None:
        """The API against the model, then what is on the ground against both. Raises `Divergence`."""
        await self._until(self._differences)
        await self._until(lambda: self.ground.strays(self.model.states(), set(self.model.kept)))

    async def _differences(self) -> list[str]:
        listed, kept = await self._listed("sandboxes"), await self._listed("snapshots")
        found: list[str] = []
        for name in listed.keys() | self.model.boxes.keys():
            shown, box = listed.get(name), self.model.boxes.get(name)
            if shown is None or box is None:
                found.append(f"{name}: listed as {shown and shown['state']}, expected {box and box.state}")
            elif shown["state"] != box.state or shown["operation"] is not None or shown["head_snapshot"] != box.head:
                found.append(
                    f"{name}: shown as {shown['state']} ({shown['cause']} {shown['reason']}) with {shown['operation']} and "
                    f"{shown['head_snapshot']}, expected {box.state} with {box.head}"
                )
        for name in kept.keys() | self.model.kept.keys():
            shown_kept, one = kept.get(name), self.model.kept.get(name)
            if (
                shown_kept is None
                or one is None
                or (shown_kept["state"], shown_kept["parent"]) != ("ready", one.parent)
            ):
                found.append(f"snapshot {name}: listed as {shown_kept}, expected {one}")
        return found

    async def _until(self, look: Callable[[], Awaitable[list[str]]]) -> None:
        """Waits until nothing is amiss: what is removed behind an answer may take its time."""
        until = time.monotonic() + WITHIN_S / 2
        while found := await look():
            if time.monotonic() > until:
                raise Divergence("\n".join(found))
            await asyncio.sleep(0.05)

    async def same(self, box: Box) -> None:
        """What its guest has is what it wrote, if it runs."""
        if box.state is State.RUNNING:
            read = await self.ground.read(box.id)
            if read != (box.memory, box.disk):
                raise Divergence(f"{box.id} has {read} in memory and on disk, expected {(box.memory, box.disk)}")

    def note(self, text: str) -> None:
        """Remembers a step, for whoever has to understand a divergence."""
        self.history.append(text)

    # -- acts

    async def do(self, box: Box, verb: Verb) -> None:
        """A verb without arguments, from whatever state."""
        before = box.state
        answer = await self.verb(box, verb)
        self.note(f"{verb} of {box.id}, {before}: {answer.status} {answer.code}")
        if not admits(verb, before):
            self.require_refusal(answer, before, verb)
        else:
            operation = await self.succeeded(answer, box, VERBS[verb].target)
            if operation is not None:
                self.model.happened(box, verb)
                await self.repeat(answer, operation)

    async def verb(self, box: Box, verb: Verb, **body: Any) -> Answer:
        """Sends a verb, with a key of its own."""
        path = f"/v1/sandboxes/{box.id}"
        if verb is Verb.DELETE:
            return await self.api.delete(path)
        names = {Verb.SNAPSHOT: "snapshots"}
        self._key = new_id()
        self._sent = (f"{path}/{names.get(verb, verb)}", body or None)
        return await self.api.post(*self._sent, key=self._key)

    async def repeat(self, answer: Answer, operation: dict[str, Any]) -> None:
        """Now and then the same request again: it is answered by what was done, and does nothing."""
        if operation["kind"] == Verb.DELETE or self.chance.random() > 0.15:
            return
        again = await self.api.post(*self._sent, key=self._key)
        if again.status >= 300 or again.body["operation"]["id"] != operation["id"]:
            raise Divergence(f"A repeated request was answered with {again}, the first one with {answer}.")

    def require_refusal(self, answer: Answer, state: State, verb: Verb) -> None:
        """The state does not admit the verb, and what it admits is told."""
        ways = [str(way) for way in verbs_from(state)]
        told = (answer.status, answer.code, answer.body.get("state"), answer.body.get("verbs"))
        if told != (409, "wrong_state", str(state), ways) or not answer.body.get("remedy"):
            raise Divergence(f"{verb} from {state} was answered with {answer}.")

    async def succeeded(self, answer: Answer, box: Box | None, target: State | None) -> dict[str, Any] | None:
        """The operation of an accepted request, after its success; None where it failed and may have. Raises `Divergence`."""
        if answer.status not in (200, 202):
            raise Divergence(f"Not accepted: {answer}")
        operation = await self.api.ended(answer)
        if operation["status"] == "succeeded":
            return operation
        error = operation["error"] or {}
        self.failures[str(error.get("code"))] += 1
        self.note(f"  it failed: {error}")
        if not self._tolerant or not all(error.get(member) for member in ("code", "cause", "remedy")):
            raise Divergence(f"The operation ended as {operation}")
        if box is not None:
            await self.learn(box, target)
        return None

    async def learn(self, box: Box, target: State | None) -> None:
        """After a verb that failed: the state may be that before, that after, or a failure; nothing of the disk is lost."""
        answer = await self.api.get(f"/v1/sandboxes/{box.id}")
        shown = State(answer.body["sandbox"]["state"]) if answer.status == 200 else State.DELETED
        if shown not in (box.state, target, State.FAILED):
            raise Divergence(f"{box.id} is {shown} after a verb from {box.state} to {target} that failed.")
        if shown in (State.FAILED, State.STOPPED) and box.state is not State.STOPPED:
            self.model.ended(box, shown)
        if shown is State.RUNNING and box.state in (State.STOPPED, State.FAILED):
            box.memory = ""
        box.state = shown
        await self.same(box)

    async def write(self, box: Box) -> None:
        """The guest of a running sandbox writes something new."""
        self._told += 1
        box.memory = box.disk = f"text {self._told}"
        self.note(f"{box.id} writes {box.disk}")
        await self.ground.write(box.id, box.disk)

    async def create(self, kept: Kept | None = None) -> Box | None:
        """A new sandbox, of the template or of a snapshot; None where it could not be made."""
        self._key = new_id()
        self._sent = ("/v1/sandboxes", dict(self._new) if kept is None else {"snapshot": kept.id})
        answer = await self.api.post(*self._sent, key=self._key)
        self.note(f"create {self._sent[1]}: {answer.status} {answer.code}")
        operation = await self.succeeded(answer, None, None)
        box = self.model.created(answer.body["sandbox"]["id"], kept)
        if operation is None:
            box.state = State.FAILED
            await self.do(box, Verb.DELETE)  # of one that never was only that is sure
            return None
        await self.same(box)
        await self.repeat(answer, operation)
        return box

    async def fork(self, box: Box, count: int = 1) -> None:
        """Branches of a sandbox."""
        answer = await self.verb(box, Verb.FORK, count=count)
        self.note(f"fork of {box.id}, {box.state}: {answer.status} {answer.code}")
        if not admits(Verb.FORK, box.state):
            self.require_refusal(answer, box.state, Verb.FORK)
            return
        operation = await self.succeeded(answer, box, None)
        if operation is None:
            await self.remove_branches(box)
            return
        await self.forked(box, operation)
        await self.repeat(answer, operation)

    async def forked(self, box: Box, operation: dict[str, Any]) -> None:
        """A fork succeeded, of all branches or of some."""
        for branch in operation["result"]["branches"]:
            self.model.forked(box, branch["sandbox"])
            made = self.model.boxes[branch["sandbox"]]
            if branch["error"] is not None:
                self.failures[str(branch["error"]["code"])] += 1
                if not self._tolerant:
                    raise Divergence(f"A branch was not made: {branch}")
                made.state = State.FAILED
                await self.do(made, Verb.DELETE)
            else:
                await self.same(made)

    async def remove_branches(self, box: Box) -> None:
        """Those of a fork that did not succeed are there, and can be deleted."""
        for name, shown in (await self._listed("sandboxes")).items():
            if name not in self.model.boxes and shown["forked_from"] == box.id:
                self.model.forked(box, name)
                await self.do(self.model.boxes[name], Verb.DELETE)

    async def keep(self, box: Box, kind: SnapshotKind) -> None:
        """A snapshot."""
        answer = await self.verb(box, Verb.SNAPSHOT, kind=str(kind))
        self.note(f"{kind} snapshot of {box.id}, {box.state}: {answer.status} {answer.code}")
        if box.state not in SNAPSHOT_SOURCES[kind]:
            self.require_refusal(answer, box.state, Verb.SNAPSHOT)
            return
        operation = await self.succeeded(answer, box, None)
        if operation is None:
            await self.remove_failed_snapshots()
            return
        self.model.kept_now(box, operation["result"]["snapshot"], kind)
        await self.same(box)
        await self.repeat(answer, operation)

    async def remove_failed_snapshots(self) -> None:
        """Those whose making failed say so, and can be deleted."""
        for name, shown in (await self._listed("snapshots")).items():
            if name not in self.model.kept:
                if shown["state"] not in ("failed", "deleting") or shown["error"] is None:
                    raise Divergence(f"A snapshot that was not made: {shown}")
                await self.api.delete(f"/v1/snapshots/{name}")

    async def roll_back(self, kept: Kept) -> None:
        """A sandbox goes back to one of its own snapshots."""
        box = self.model.boxes[kept.sandbox_id]
        answer = await self.verb(box, Verb.ROLLBACK, snapshot=kept.id)
        self.note(f"rollback of {box.id}, {box.state}, to {kept.id} ({kept.kind}): {answer.status} {answer.code}")
        operation = await self.succeeded(answer, None, None)
        if operation is None:
            await self._after_failed_rollback(box, kept)
            return
        self.model.rolled_back(box, kept)
        await self.same(box)
        await self.repeat(answer, operation)

    async def _after_failed_rollback(self, box: Box, kept: Kept) -> None:
        """As before, or failed with a disk from before or after it: rolling back again tells them apart."""
        shown = State((await self.api.get(f"/v1/sandboxes/{box.id}")).body["sandbox"]["state"])
        if shown is not box.state and shown is not State.FAILED:
            raise Divergence(f"{box.id} is {shown} after a rollback that failed.")
        if shown is State.FAILED:
            self.model.ended(box, shown)
            await self.do(box, Verb.START)
            if box.state is State.RUNNING:
                box.disk = (await self.ground.read(box.id))[1]
        if box.disk not in (kept.disk, box.disk):
            raise Divergence(f"{box.id} has {box.disk} after a rollback that failed.")

    async def forget(self, kept: Kept) -> None:
        """A snapshot is deleted."""
        answer = await self.api.delete(f"/v1/snapshots/{kept.id}")
        self.note(f"deletion of the snapshot {kept.id}: {answer.status} {answer.code}")
        if answer.status not in (200, 202):
            raise Divergence(f"A snapshot could not be deleted: {answer}")
        del self.model.kept[kept.id]

    async def end(self) -> None:
        """Deletes everything; nothing may be left. Raises `Divergence`."""
        for box in list(self.model.boxes.values()):
            await self.do(box, Verb.DELETE)
        for kept in list(self.model.kept.values()):
            await self.forget(kept)
        await self.compare()
