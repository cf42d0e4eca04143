"""The scripts of the red team, those that show that what is allowed arrives among them, are programs."""

import ast

from hatchway.redteam import runner
from hatchway.redteam.attacks import ATTACKS, Attack


def test_every_script_can_be_read() -> None:
    controls = [one for one in vars(runner).values() if isinstance(one, Attack)]
    assert {one.id for one in controls} >= {"C00.allowed", "C00.condition", "C00.credential"}
    for one in (*ATTACKS, *controls):
        ast.parse(one.script, one.id)
