"""The proof that no attack is hollow: the same scripts where nothing is defended. Each has to arrive.

In the place of the sandbox is a namespace that shares the host's files; in the place of its slot and gateway a plain link to the sites, and a name
server that asks on for whatever it is asked, and copies that follow links. What the host does in
the middle of an attempt changes nothing here: a policy that nobody enforces is narrowed, a connection that nobody cuts goes on.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hatchway.redteam.acts import ACTS, perform
from hatchway.redteam.attacks import Attack
from hatchway.redteam.attacks.channel import IMPOSTORS
from hatchway.redteam.attacks.floods import FLOOD
from hatchway.redteam.attempts import BYPASS, Attempt, given, guest_program, judge
from hatchway.redteam.ground import Ground, standing
from hatchway.redteam.naive_end import NEIGHBOUR
from hatchway.redteam.naive_gateway import NaiveGateway
from hatchway.redteam.naive_host import NaiveHost
from hatchway.redteam.use import Use, neighbours

AT_A_TIME = 80
AT_ONCE = 16
"""Attempts in the place of a guest at the same time: each of them mostly waits for answers."""
BATCH_WITHIN_S = 400
SETTLE_S = 0.3
NAIVE = "naive"
PLACES = 4
"""How many impostors are at work at a time."""
_numbers = itertools.count()


def prove(attacks: Sequence[Attack], progress: Callable[[str], None]) -> list[Attempt]:
    """Makes an attempt of each attack. One whose verdict is not `bypass` is hollow. Raises `OSError` where there can be no namespaces."""
    done: list[Attempt] = []
    plain = [one for one in attacks if not one.during]
    with standing(naive=True) as ground:
        _program(ground).write_bytes(guest_program())
        for at in range(0, len(plain), AT_A_TIME):
            progress(f"{at} of {len(attacks)}")
            done += _batch(ground, plain[at : at + AT_A_TIME])
        # Once more for those that were too late on a machine that is busy with others.
        late = [one for one in done if one.verdict != BYPASS]
        again = {one.attack.id: one for one in _batch(ground, [one.attack for one in late])} if late else {}
        done = [again.get(one.attack.id, one) for one in done]
        for act in ACTS:
            if these := [one for one in attacks if one.during == act]:
                progress(f"{act}, {len(these)}")
                done += perform(act, these, NAIVE, lambda: NaiveStage(ground), 1 if act == FLOOD else PLACES)
    return done


def _program(ground: Ground) -> Path:
    return ground.folder / "attacks.pyz"


def _batch(ground: Ground, attacks: Sequence[Attack]) -> list[Attempt]:
    attempts = [Attempt(one, NAIVE) for one in attacks]
    program = subprocess.run(
        ground.guest_command(sys.executable, "-I", str(_program(ground))),
        input=given(ground.facts(), attempts, at_once=AT_ONCE),
        capture_output=True,
        check=False,
        timeout=BATCH_WITHIN_S,
    )
    until = time.monotonic() + 5
    while time.monotonic() < until and not all(ground.oracle.where(one.mark) for one in attempts):
        time.sleep(SETTLE_S)
        if program.returncode:
            break
    judge(attempts, program.stdout.decode("utf-8", "replace"), ground.oracle, ground.token)
    for one in attempts:
        if one.verdict != BYPASS and program.returncode:
            one.why = program.stderr.decode("utf-8", "replace")[-300:]
    return attempts


class NaiveStage:
    """A process in the place of a guest, and a host that guards nothing."""

    every_s = 0.05
    settle_s = SETTLE_S

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._folder = ground.folder / f"stage-{next(_numbers)}"
        self._place = self._folder / "place"
        self._place.mkdir(parents=True)
        self.folders: Sequence[Path] = [self._folder / "service"]
        self._process: subprocess.Popen[bytes] | None = None
        self._host: NaiveHost | None = None
        self._first = ""
        self._gateway: NaiveGateway | None = None
        self._before = Use(neighbours())

    def begin(self, attempts: Sequence[Attempt], at_once: int) -> None:
        """Starts the program."""
        facts = {**self.ground.facts(), "place": str(self._place)}
        if any(one.attack.during in IMPOSTORS for one in attempts):
            self._host = NaiveHost(self._folder)
            facts["channel"] = str(self._host.channel)
        if any(one.attack.during == FLOOD for one in attempts):
            self._gateway = NaiveGateway(self.ground.inside)
            facts["flooded"] = self._gateway.port
        (self._place / "given").write_bytes(given(facts, attempts, at_once=at_once))
        with (self._place / "given").open("rb") as source, (self._place / "told").open("wb") as told:
            self._process = subprocess.Popen(
                self.ground.guest_command(sys.executable, "-I", str(_program(self.ground))),
                stdin=source,
                stdout=told,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def waiting(self, step: str) -> int:
        """Those that wait for it and those that are over."""
        held = {one.name.split("-")[1] for one in self._place.glob(f"held-*-{step}")}
        told = [line for line in self.printed().splitlines() if line]
        return len(held | {line.split('"mark": "')[1][:15] for line in told})

    def printed(self) -> str:
        """What it has told."""
        return (self._place / "told").read_text()

    def go(self, step: str) -> None:
        """Writes the file that they wait for."""
        (self._place / f"go-{step}").touch()

    def narrow(self) -> None:
        """Nobody is told."""

    pause = suspend = fork = rollback = kill = narrow

    def reload(self, number: int) -> None:
        """Nobody is told."""
        time.sleep(0.1)

    def refuse(self, step: str) -> None:
        """Whatever it is, it is taken."""

    def authorities(self) -> Sequence[str]:
        """One for all."""
        return [self.ground.authority.pem] * 2

    def tree(self, mark: str) -> str:
        """In the place of the guest."""
        return str(self._place / f"tree-{mark}")

    def download(self, remote: str, local: Path) -> None:
        """Links are followed where they stand; what an agent packs is unpacked as it says."""
        if self._host is not None:
            self._host.ask(copy=remote, to=str(local))
            return
        _copied(Path(remote), local)

    def upload(self, local: Path, remote: str) -> None:
        """Links are followed."""
        shutil.copytree(local, remote, symlinks=False, ignore_dangling_symlinks=True)

    def shared(self, marks: Sequence[str]) -> Mapping[str, str]:
        """What the guest wrote to what all would start from."""
        found: dict[str, str] = {}
        for name in ("disk", "memory"):
            data = (self.ground.folder / name).read_bytes()
            found |= {mark: f"the {name} of all" for mark in marks if mark.encode() in data}
        return found

    def serves(self) -> bool:
        """All is served."""
        return True

    def beside(self) -> str:
        """Whether its gateway serves anybody else, and what the link does to all."""
        if self._gateway is not None and not self._gateway.serves():
            return "another guest is not served"
        return self._before.grown(Use(neighbours()))

    def host(self) -> "NaiveStage":
        """It is its own host."""
        return self

    def command(self, *argv: str) -> str:
        """One at a time, as its end does it."""
        answer = self._host and self._host.ask(run=list(argv))
        if not answer:
            return ""
        self._first = self._first or str(answer["key"])
        return str(answer["kept"])

    def neighbours_command(self) -> str:
        """Its end has one."""
        return NEIGHBOUR

    def kept_of_first(self) -> str:
        """As its end has it."""
        return str(self._host and self._host.ask(kept=self._first))

    def kept_of_neighbour(self) -> str:
        """As its end has it."""
        return str(self._host and self._host.ask(kept=NEIGHBOUR))

    def harm(self) -> str:
        """Whether its end does anything at all any more."""
        served = self._host is not None and self._host.ask() is not None
        return "" if served else "the host's end: another sandbox is not served"

    def close(self) -> bool:
        """Ends the process that it started, and those of it."""
        if self._host is not None:
            self._host.close()
        if self._gateway is not None:
            self._gateway.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
        return True


def _copied(source: Path, target: Path) -> None:
    """As `cp -a` does it, over what is there: a link in the place of a file or folder is gone through."""
    if not target.exists():
        target.mkdir()
    for one in source.iterdir():
        there = target / one.name
        if one.is_symlink():
            if not os.path.lexists(there):
                os.symlink(os.readlink(one), there)
        elif one.is_dir():
            _copied(one, there)
        elif one.is_file():
            with there.open("wb") as file:  # through a link that stands there
                file.write(one.read_bytes())
            there.chmod(one.stat().st_mode & 0o7777)
        elif not there.exists():
            status = one.lstat()
            os.mknod(there, status.st_mode, status.st_rdev)
