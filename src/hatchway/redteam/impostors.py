"""Acts in which the guest's agent is an impostor: what the host asks of it, and what it may not have come to."""

import contextlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hatchway.redteam.attempts import Attempt
from hatchway.redteam.looking import beside, in_the_copy


class Host(Protocol):
    """The host's side of one guest, and of another guest beside it."""

    def command(self, *argv: str) -> str:
        """Runs a command in the guest, and returns what it printed; "" where nobody knows."""

    def neighbours_command(self) -> str:
        """The id of a command of the other guest, which runs."""

    def kept_of_first(self) -> str:
        """What is kept of the guest's first command that printed anything, and how it ended."""

    def kept_of_neighbour(self) -> str:
        """What is kept of the other guest's command."""

    def harm(self) -> str:
        """What is wrong with the host's end: another guest that is not served, a process that is another by now, memory; "" for nothing."""


_TRIES = 6


def told(attempts: Sequence[Attempt], why: str = "") -> str:
    """What is said of attempts whose guest can say nothing any more."""
    lines = [{"mark": one.mark, "tried": ["the agent's port"], "said": [], "why": why} for one in attempts]
    return "\n".join(json.dumps(line) for line in lines)


def answers(host: Host, one: Attempt) -> bool:
    """Whether it is the impostor that answers: it says the marker backwards."""
    return any(one.mark[::-1] in host.command("who") for _ in range(_TRIES))


def runs(host: Host, one: Attempt) -> None:
    """The host runs a command."""
    host.command("deed", host.neighbours_command())


def floods(host: Host, one: Attempt) -> None:
    """The host runs a command, and looks after the other guest meanwhile."""
    asking = threading.Thread(target=runs, args=(host, one), daemon=True)
    asking.start()
    asking.join(2)
    harms(host, one)
    asking.join(120)


def harms(host: Host, one: Attempt) -> None:
    """What the host's end has come to."""
    if not one.where and (harm := host.harm()):
        one.where.append(harm)


def looks(host: Host, one: Attempt, around: Path, token: str) -> None:
    """What there is afterwards where nothing of the guest's may be."""
    if one.mark in host.kept_of_first():
        one.where.append("a command that had ended")
    if one.mark in host.kept_of_neighbour():
        one.where.append("a command of another sandbox")
    with contextlib.suppress(OSError):
        one.where += beside(around, one.mark) + in_the_copy(around / "here", token)
    harms(host, one)
