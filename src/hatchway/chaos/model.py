"""What has to come of every verb: the lifecycle table, and what of memory and disk each verb keeps.

What a guest wrote is one text for its memory and one for its disk. Nothing here knows the API or a node.
"""

import dataclasses
from dataclasses import dataclass, field

from hatchway.domain.lifecycle import ROLLBACK_TARGETS, VERBS, SnapshotKind, State, Verb


class Divergence(Exception):
    """The service is not what the model says. The text tells both, and the steps that led there."""


@dataclass
class Box:
    """A sandbox."""

    id: str
    state: State
    memory: str = ""
    disk: str = ""
    head: str | None = None
    """The snapshot that its next one is made from."""


@dataclass(frozen=True)
class Kept:
    """A snapshot that can be used."""

    id: str
    sandbox_id: str
    kind: SnapshotKind
    memory: str
    disk: str
    parent: str | None = None


@dataclass
class Model:
    """Everything that there is."""

    boxes: dict[str, Box] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    """Ids of sandboxes that were deleted, the newest last."""

    def states(self) -> dict[str, str]:
        """The state of every sandbox that is not deleted."""
        return {box.id: str(box.state) for box in self.boxes.values()}

    def happened(self, box: Box, verb: Verb) -> None:
        """A verb without arguments succeeded. It must have been possible: see `Divergence`."""
        rule = VERBS[verb]
        if box.state in rule.satisfied:
            return
        if box.state not in rule.sources:
            raise Divergence(f"{verb} succeeded from {box.state}.")
        self.moved(box, verb)

    def moved(self, box: Box, verb: Verb) -> None:
        """The sandbox is in the verb's target state."""
        target = VERBS[verb].target
        assert target is not None
        if target is State.STOPPED or (target is State.RUNNING and box.state in (State.STOPPED, State.FAILED)):
            box.memory = ""
        box.state = target
        if target is State.DELETED:
            del self.boxes[box.id]
            self.gone = [*self.gone[-19:], box.id]

    def ended(self, box: Box, state: State) -> None:
        """Its machine ended by itself: the memory is gone, the disk stays."""
        box.state, box.memory = state, ""

    def forked(self, box: Box, branch_id: str) -> None:
        """A branch was made."""
        branch = dataclasses.replace(box, id=branch_id, state=State.RUNNING)
        self.boxes[branch_id] = branch

    def kept_now(self, box: Box, snapshot_id: str, kind: SnapshotKind) -> None:
        """A snapshot was made."""
        memory = box.memory if kind is SnapshotKind.FULL else ""
        self.kept[snapshot_id] = Kept(snapshot_id, box.id, kind, memory, box.disk, box.head)
        box.head = snapshot_id

    def rolled_back(self, box: Box, kept: Kept) -> None:
        """It is what it was then."""
        box.state, box.memory, box.disk, box.head = ROLLBACK_TARGETS[kept.kind], kept.memory, kept.disk, kept.id

    def created(self, sandbox_id: str, kept: Kept | None) -> Box:
        """A sandbox was made, of a template or of a snapshot."""
        box = self.boxes[sandbox_id] = Box(sandbox_id, State.RUNNING)
        if kept is not None:
            box.memory, box.disk, box.head = kept.memory, kept.disk, kept.id
        return box
