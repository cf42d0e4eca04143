"""What the host does while attempts hold: one function an act. `Stage` is where they are made: a sandbox of the service, or where nothing is defended."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hatchway.client import HatchwayError, Unavailable
from hatchway.redteam.attacks import Attack
from hatchway.redteam.attacks.channel import FLOODS, PACKS, RUNS
from hatchway.redteam.attacks.floods import FLOOD
from hatchway.redteam.attacks.meanwhile import DOCUMENTS
from hatchway.redteam.attempts import BLOCKED, BYPASS, INVALID, Attempt, judge
from hatchway.redteam.ground import Ground
from hatchway.redteam.impostors import Host, answers, floods, looks, runs, told
from hatchway.redteam.looking import beside, in_the_copy, on_this_host

TIMES = 6
"""How often a policy is changed while attempts go on."""
WITHIN_S = 300.0
EVERY_S = 0.5
"""To look whether something holds is a command in the guest, which has to get on meanwhile."""
STEP_WITHIN_S = 60.0
SETTLE_S = 1.0
"""What left is at a server within this time."""


class Stage(Protocol):
    """A place in which attempts are made, and what the host can do to it."""

    ground: Ground
    every_s: float
    """How often is looked whether something holds."""
    settle_s: float
    """What left is at a server within this time."""
    folders: Sequence[Path]
    """Folders of the service in which no name may have a marker, and in whose logs no line may begin with one."""

    def begin(self, attempts: Sequence[Attempt], at_once: int) -> None:
        """Starts the program that makes attempts."""

    def waiting(self, step: str) -> int:
        """How many attempts wait for a step, and how many are over."""

    def printed(self) -> str:
        """What the program has told so far."""

    def go(self, step: str) -> None:
        """Lets those go on that wait for a step."""

    def narrow(self) -> None:
        """The policy allows nothing any more, and that holds."""

    def pause(self) -> None:
        """Pauses, narrows the policy, resumes."""

    def suspend(self) -> None:
        """Suspends, narrows the policy, restores."""

    def fork(self) -> None:
        """Branches off; from now on it is the branch."""

    def rollback(self) -> None:
        """Keeps a snapshot with memory, and goes back to it."""

    def reload(self, number: int) -> None:
        """Changes the policy to another one that allows nothing of what is tried."""

    def kill(self) -> None:
        """Kills whatever carries what leaves, and waits until it is back."""

    def refuse(self, step: str) -> None:
        """Has a policy of `DOCUMENTS` put in force, if somebody takes it."""

    def authorities(self) -> Sequence[str]:
        """The certificates of sandboxes' authorities, each of another one."""

    def download(self, remote: str, local: Path) -> None:
        """Copies a folder of the guest to this host. Whatever goes wrong is the guest's."""

    def upload(self, local: Path, remote: str) -> None:
        """Copies a folder of this host to the guest."""

    def tree(self, mark: str) -> str:
        """The folder of an attempt in the guest."""

    def shared(self, marks: Sequence[str]) -> Mapping[str, str]:
        """Where markers are in what all sandboxes start from."""

    def serves(self) -> bool:
        """Whether what is allowed passes; True where nothing is."""

    def beside(self) -> str:
        """What has become of others, and of what all share, while it goes on; "" when nothing."""

    def host(self) -> Host:
        """What the host can do with the guest and with another one."""

    def close(self) -> bool:
        """Removes it; whether that was possible."""


def wait(holds: Callable[[], bool], within: float = WITHIN_S, every: float = EVERY_S) -> bool:
    """Looks again and again until something holds; whether it does."""
    ends = time.monotonic() + within
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(every)
    return True


def _held(stage: Stage, attempts: Sequence[Attempt], step: str = "go") -> None:
    """Waits until all attempts wait for the step, or are over: the latter tell why."""
    wait(lambda: stage.waiting(step) >= len(attempts), every=stage.every_s)


def _simply(what: Callable[[Stage], None]) -> Callable[[Stage, Sequence[Attempt]], None]:
    def act(stage: Stage, attempts: Sequence[Attempt]) -> None:
        _held(stage, attempts)
        what(stage)
        stage.go("go")

    return act


def _reload(stage: Stage, attempts: Sequence[Attempt]) -> None:
    _held(stage, attempts)
    for number in range(TIMES):
        stage.reload(number)
    stage.go("go")


def _documents(stage: Stage, attempts: Sequence[Attempt]) -> None:
    """One after the other: an attempt is over before the next document comes."""
    by_step = {one.attack.id: one for one in attempts}
    for row, step in DOCUMENTS:
        if one := by_step.get(f"{row}.document-{step}"):
            wait(lambda one=one, step=step: stage.waiting(step) > 0, every=stage.every_s)  # type: ignore[misc]
            stage.refuse(step)
            stage.go(step)
            wait(lambda one=one: one.mark in stage.printed(), STEP_WITHIN_S, stage.every_s)  # type: ignore[misc]


def _local(stage: Stage, one: Attempt) -> Path:
    """The folder that a copy is for, in one with a file that it may not touch."""
    around = stage.ground.downloads / one.mark
    if not around.exists():
        around.mkdir()
        (around / "outside").write_text("untouched")
    return around / "here"


def _copies_out(stage: Stage, attempts: Sequence[Attempt]) -> None:
    for step in ("first", "second"):
        _held(stage, attempts, step)
        for one in attempts:
            stage.download(stage.tree(one.mark), _local(stage, one))
        stage.go(step)


def _copies_in(stage: Stage, attempts: Sequence[Attempt]) -> None:
    _held(stage, attempts, "first")
    for one in attempts:
        local = _local(stage, one)
        stage.download(stage.tree(one.mark), local)
        local.mkdir(exist_ok=True)
        if "there-and-back" not in one.attack.id:
            os.symlink(stage.ground.honey, local / "link")
            os.symlink(stage.ground.honey.parent, local / "folder")
        stage.upload(local, stage.tree(one.mark) + "-in")
    stage.go("first")


def _impostor(what: Callable[[Host, Attempt], None]) -> Callable[[Stage, Sequence[Attempt]], str]:
    """Root takes the agent's place; whether it has is what the host hears of it, since the guest's program cannot be asked any more."""

    def act(stage: Stage, attempts: Sequence[Attempt]) -> str:
        _held(stage, attempts)
        if all(one.mark in stage.printed() for one in attempts):
            return stage.printed()  # over before it began
        stage.go("go")
        host = stage.host()
        for one in attempts:
            if not answers(host, one):
                return told(attempts, "nobody spoke in the agent's place")
            what(host, one)
        return told(attempts)

    return act


def _copies_from_impostor(stage: Stage, attempts: Sequence[Attempt]) -> str:
    return _impostor(lambda _, one: stage.download(stage.tree(one.mark), _local(stage, one)))(stage, attempts)


def _look_after_impostor(stage: Stage, attempts: Sequence[Attempt]) -> None:
    for one in attempts:
        looks(stage.host(), one, stage.ground.downloads / one.mark, stage.ground.token)


def _flood(stage: Stage, attempts: Sequence[Attempt]) -> None:
    _held(stage, attempts)
    stage.go("go")
    if not wait(lambda: stage.waiting("flooding") >= len(attempts), every=stage.every_s):
        raise Unavailable("no_flood", "The guest did not come to flood.", "")
    harm = stage.beside()
    for one in attempts:
        if harm:
            one.where.append(harm)
    stage.go("over")


def _none(_stage: Stage, _attempts: Sequence[Attempt]) -> None:
    pass


def _look_at_copies(stage: Stage, attempts: Sequence[Attempt]) -> None:
    for one in attempts:
        around = stage.ground.downloads / one.mark
        one.where += beside(around, one.mark) + in_the_copy(around / "here", stage.ground.token)


def _look_beside(stage: Stage, attempts: Sequence[Attempt]) -> None:
    for one in attempts:
        one.where += beside(stage.ground.downloads / one.mark, one.mark)


def _look_at_others(stage: Stage, attempts: Sequence[Attempt]) -> None:
    found = stage.shared([one.mark for one in attempts])
    for one in attempts:
        if one.mark in found:
            one.where.append(found[one.mark])


def _look_at_authorities(stage: Stage, attempts: Sequence[Attempt]) -> None:
    known = stage.authorities()
    if len(set(known)) != len(known):
        for one in attempts:
            if one.attack.id in ("T21.another-sandbox", "G06.authority"):
                one.where.append("the authority of another sandbox")


def _look_whether_it_serves(stage: Stage, attempts: Sequence[Attempt]) -> None:
    """What is denied while nothing is served at all says nothing."""
    if not wait(stage.serves, 120):
        for one in attempts:
            one.why = "what is allowed did not pass afterwards"


@dataclass(frozen=True)
class Act:
    """`meanwhile` is done while the attempts hold, `afterwards` when they are over."""

    meanwhile: Callable[[Stage, Sequence[Attempt]], str | None]
    """May return what there is to tell of the attempts, in place of the guest's program."""
    afterwards: Callable[[Stage, Sequence[Attempt]], None] = _none
    at_once: int = 0
    """How many attempts at a time; 0 are all."""
    alone: bool = False
    """Each attempt in a place of its own."""


ACTS: Mapping[str, Act] = {
    "narrow": Act(_simply(lambda stage: stage.narrow())),
    "pause": Act(_simply(lambda stage: stage.pause())),
    "suspend": Act(_simply(lambda stage: stage.suspend())),
    "fork": Act(_simply(lambda stage: stage.fork()), _look_at_authorities),
    "rollback": Act(_simply(lambda stage: stage.rollback())),
    "reload": Act(_reload),
    "kill": Act(_simply(lambda stage: stage.kill()), _look_whether_it_serves),
    "documents": Act(_documents),
    "base": Act(_none, _look_at_others, at_once=2),
    "copies-out": Act(_copies_out, _look_at_copies),
    "copies-in": Act(_copies_in, _look_beside),
    RUNS: Act(_impostor(runs), _look_after_impostor, alone=True),
    FLOODS: Act(_impostor(floods), _look_after_impostor, alone=True),
    FLOOD: Act(_flood, _look_whether_it_serves, alone=True),
    PACKS: Act(_copies_from_impostor, _look_after_impostor, alone=True),
}


def perform(
    name: str, attacks: Sequence[Attack], condition: str, stage_of: Callable[[], Stage], places: int = 1
) -> list[Attempt]:
    """Makes the attempts of one act in one place, or each in one of its own, in `places` at a time; those that were none once more."""
    act = ACTS[name]

    def make(these: Sequence[Attack]) -> list[Attempt]:
        return _once(act, these, condition, stage_of)

    def make_all(these: Sequence[Attack]) -> list[Attempt]:
        with ThreadPoolExecutor(places) as pool:
            together = [[one] for one in these] if act.alone else [these] if these else []
            return [one for done in pool.map(make, together) for one in done]

    attempts = make_all(attacks)
    again = {one.attack.id: one for one in make_all([one.attack for one in attempts if one.verdict == INVALID])}
    return [again.get(one.attack.id, one) for one in attempts]


def _once(act: Act, attacks: Sequence[Attack], condition: str, stage_of: Callable[[], Stage]) -> list[Attempt]:
    attempts = [Attempt(one, condition) for one in attacks]
    try:
        stage = stage_of()
    except HatchwayError as error:
        return _none_of(attempts, error)
    try:
        stage.begin(attempts, act.at_once or len(attempts))
        printed = act.meanwhile(stage, attempts)
        seen = [list(one.where) for one in attempts]
        if printed is None:
            over = WITHIN_S * (3 if act.at_once else 1)
            wait(lambda: all(one.mark in stage.printed() for one in attempts), over, stage.every_s)
        time.sleep(stage.settle_s)
        judge(attempts, stage.printed() if printed is None else printed, stage.ground.oracle, stage.ground.token)
        for one, before in zip(attempts, seen, strict=True):
            one.where += before
        act.afterwards(stage, attempts)
    except HatchwayError as error:
        _none_of(attempts, error)
    finally:
        removed = False
        with contextlib.suppress(OSError):
            removed = stage.close()
    for one in attempts:
        one.where += on_this_host(stage.folders, one.mark)
        if not removed:
            one.where.append("a sandbox that cannot be deleted")
        one.where = list(dict.fromkeys(one.where))
        one.verdict = BYPASS if one.where else INVALID if one.why else BLOCKED
    return attempts


def _none_of(attempts: list[Attempt], error: HatchwayError) -> list[Attempt]:
    """What the host wanted to do meanwhile could not be done."""
    for one in attempts:
        one.why = f"{error.code}: {error.cause}"
    return attempts
