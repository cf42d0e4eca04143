"""The proof that no attack is hollow: the same scripts where nothing is defended. Each has to arrive.

In the place of the sandbox is a namespace that shares the host's files; in the place of its slot and gateway a plain link to the sites, and a name
server that asks on for whatever it is asked.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from hatchway.redteam.attacks import Attack
from hatchway.redteam.attempts import BYPASS, Attempt, given, guest_program, judge
from hatchway.redteam.ground import Ground, standing

AT_A_TIME = 40
BATCH_WITHIN_S = 400
SETTLE_S = 0.3
NAIVE = "naive"


def prove(attacks: Sequence[Attack], progress: Callable[[str], None]) -> list[Attempt]:
    """Makes an attempt of each attack. One whose verdict is not `bypass` is hollow. Raises `OSError` where there can be no namespaces."""
    done: list[Attempt] = []
    with standing(naive=True) as ground:
        (ground.folder / "attacks.pyz").write_bytes(guest_program())
        for at in range(0, len(attacks), AT_A_TIME):
            progress(f"{at} of {len(attacks)}")
            done += _batch(ground, attacks[at : at + AT_A_TIME])
        # Once more for those that were too late on a machine that is busy with others.
        late = [one for one in done if one.verdict != BYPASS]
        again = {one.attack.id: one for one in _batch(ground, [one.attack for one in late])} if late else {}
    return [again.get(one.attack.id, one) for one in done]


def _batch(ground: Ground, attacks: Sequence[Attack]) -> list[Attempt]:
    attempts = [Attempt(one, NAIVE) for one in attacks]
    program = subprocess.run(
        ground.guest_command(sys.executable, "-I", str(ground.folder / "attacks.pyz")),
        input=given(ground.facts(), attempts),
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
