"""Attempts: an attack in a condition, with a marker of its own, and what came of it."""

import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hatchway.redteam.attacks import Attack
from hatchway.redteam.marks import Oracle, new_mark

BLOCKED, BYPASS, INVALID = "blocked", "bypass", "invalid"
_GUEST = Path(__file__).with_name("guest")
_MAIN = "from guest.attempts import main\nmain()\n"


@dataclass
class Attempt:
    """`verdict` is `blocked`, `bypass` or `invalid`: an attempt that could not even be made says nothing, and is a failure of the suite."""

    attack: Attack
    condition: str
    mark: str = field(default_factory=new_mark)
    verdict: str = INVALID
    where: list[str] = field(default_factory=list)
    why: str = "it was not made"

    def line(self) -> dict[str, Any]:
        """What is told of it as JSON."""
        told: dict[str, Any] = {
            "id": self.attack.id,
            "title": self.attack.title,
            "class": self.attack.kind,
            "condition": self.condition,
            "verdict": self.verdict,
        }
        if self.where:
            told["arrived"] = self.where
        if self.why:
            told["why"] = self.why
        return told


def guest_program() -> bytes:
    """The program that makes attempts in a guest: one file, which Python runs as it is."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", _MAIN)
        for module in sorted(_GUEST.glob("*.py")):
            archive.writestr(f"guest/{module.name}", module.read_bytes())
    return packed.getvalue()


def given(facts: dict[str, object], attempts: Iterable[Attempt], *, at_once: int = 0) -> bytes:
    """What the guest's program reads; `at_once` attempts at a time, or as many as it thinks right."""
    told = [{"script": one.attack.script, "mark": one.mark} for one in attempts]
    return json.dumps({"facts": facts, "attempts": told, "at_once": at_once}).encode()


def judge(attempts: Sequence[Attempt], printed: str, oracle: Oracle, token: str) -> None:
    """Gives verdicts by what the guest's program printed of its attempts, what arrived, and whether it could say the token of the host."""
    reports: dict[str, dict[str, Any]] = {}
    for line in printed.splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            continue
        reports[report["mark"]] = report
    for one in attempts:
        report = reports.get(one.mark, {"said": [], "why": "the guest did not tell of it", "tried": []})
        one.where = oracle.where(one.mark)
        if any(token in text for text in report["said"]):
            one.where.append("a file of this host was read")
        one.why = report["why"]
        one.verdict = BYPASS if one.where else INVALID if one.why else BLOCKED
