"""The lifecycle table: which verb leads from which state to which, and what happens unasked.

This is the only place that knows it. The control plane guards its transitions with it, the documentation is checked
against it, and the model of the state-machine test is built from it.
"""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The last stable state of a sandbox; a request in flight shows as its operation."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    FAILED = "failed"
    DELETED = "deleted"


class Verb(StrEnum):
    """What a user asks for; the `kind` of an operation."""

    CREATE = "create"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    START = "start"
    WAKE = "wake"
    SUSPEND = "suspend"
    RESTORE = "restore"
    FORK = "fork"
    SNAPSHOT = "snapshot"
    ROLLBACK = "rollback"
    EXPORT = "export"
    IMPORT = "import"
    DELETE = "delete"


class SnapshotKind(StrEnum):
    """What a snapshot holds: the disk alone, or memory and disk."""

    DISK = "disk"
    FULL = "full"


class Cause(StrEnum):
    """What happens to a sandbox without being asked for."""

    GUEST_POWER_OFF = "guest_power_off"
    GUEST_RESET = "guest_reset"
    HOST_REBOOT = "host_reboot"
    SERVICE_DOWN = "service_down"
    VMM_DIED = "vmm_died"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY_LOST = "memory_lost"
    """A suspended sandbox whose memory cannot be restored any more: another VMM or CPU, or a part of it is damaged. Its disk is whole."""
    OPERATION_FAILED = "operation_failed"
    DISK_LOST = "disk_lost"


@dataclass(frozen=True)
class Transition:
    """From any of `sources` to `target`; from `satisfied` the verb succeeds and does nothing.

    `target` is None where the state stays as it is, for a rollback, whose target follows from the snapshot's kind, and for an import:
    `suspended` where memory comes along, else `stopped`.
    """

    sources: frozenset[State]
    target: State | None
    satisfied: frozenset[State] = frozenset()


_ALIVE = frozenset({State.RUNNING, State.PAUSED})
_ANY = frozenset(State) - {State.DELETED}

VERBS: dict[Verb, Transition] = {
    Verb.CREATE: Transition(frozenset({State.PENDING}), State.RUNNING),
    Verb.PAUSE: Transition(frozenset({State.RUNNING}), State.PAUSED, frozenset({State.PAUSED})),
    Verb.RESUME: Transition(frozenset({State.PAUSED}), State.RUNNING, frozenset({State.RUNNING})),
    Verb.STOP: Transition(
        frozenset({State.RUNNING, State.PAUSED, State.SUSPENDED, State.FAILED}),
        State.STOPPED,
        frozenset({State.STOPPED}),
    ),
    Verb.START: Transition(frozenset({State.STOPPED, State.FAILED}), State.RUNNING, frozenset({State.RUNNING})),
    Verb.WAKE: Transition(
        frozenset({State.PAUSED, State.SUSPENDED, State.STOPPED}), State.RUNNING, frozenset({State.RUNNING})
    ),
    Verb.SUSPEND: Transition(_ALIVE, State.SUSPENDED, frozenset({State.SUSPENDED})),
    Verb.RESTORE: Transition(frozenset({State.SUSPENDED}), State.RUNNING, frozenset({State.RUNNING})),
    Verb.FORK: Transition(_ALIVE | {State.SUSPENDED}, None),
    Verb.SNAPSHOT: Transition(_ALIVE | {State.SUSPENDED, State.STOPPED}, None),
    Verb.ROLLBACK: Transition(_ANY - {State.PENDING}, None),
    Verb.EXPORT: Transition(frozenset({State.SUSPENDED, State.STOPPED}), None),
    Verb.IMPORT: Transition(frozenset({State.PENDING}), None),
    Verb.DELETE: Transition(_ANY, State.DELETED, frozenset({State.DELETED})),
}

SNAPSHOT_SOURCES: dict[SnapshotKind, frozenset[State]] = {
    SnapshotKind.DISK: VERBS[Verb.SNAPSHOT].sources,
    SnapshotKind.FULL: _ALIVE,
}
"""From which states a snapshot of a kind can be made: memory is where a machine is."""

ROLLBACK_TARGETS: dict[SnapshotKind, State] = {SnapshotKind.DISK: State.STOPPED, SnapshotKind.FULL: State.RUNNING}
"""What a rollback leads to."""

CAUSES: dict[Cause, Transition] = {
    Cause.GUEST_POWER_OFF: Transition(_ALIVE, State.STOPPED),
    Cause.GUEST_RESET: Transition(_ALIVE, State.STOPPED),
    Cause.HOST_REBOOT: Transition(_ALIVE, State.STOPPED),
    Cause.SERVICE_DOWN: Transition(_ALIVE, State.STOPPED),
    Cause.VMM_DIED: Transition(_ALIVE, State.FAILED),
    Cause.OUT_OF_MEMORY: Transition(_ALIVE, State.FAILED),
    Cause.MEMORY_LOST: Transition(frozenset({State.SUSPENDED}), State.SUSPENDED),
    Cause.OPERATION_FAILED: Transition(frozenset({State.PENDING, State.STOPPED, State.FAILED}), State.FAILED),
    Cause.DISK_LOST: Transition(_ANY, State.FAILED),
}


def admits(verb: Verb, state: State) -> bool:
    """Tells whether `verb` may start from `state`, be it to do nothing."""
    row = VERBS[verb]
    return state in row.sources or state in row.satisfied


def verbs_from(state: State) -> tuple[Verb, ...]:
    """Returns the verbs that `state` admits: what a 409 offers as a way out."""
    return tuple(verb for verb in VERBS if verb not in (Verb.CREATE, Verb.IMPORT) and admits(verb, state))
