"""Git as the SDK offers it: every method once, in steps that `Sandbox` and `AsyncSandbox` take alike, in every version.

The SDK makes command lines of it, in the same way in all versions and in both halves. So they are run in a sandbox once, by the newest `Sandbox`,
which tells what it ran and what came of it; with the others the same steps are taken with those answers, and what they ask for has to be the
same: each of these commands takes half a second under emulation.
"""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from e2b.sandbox.commands.command_handle import CommandExitException, CommandResult

WRITE = "write"
AT, ORIGIN, CLONE = "/home/user/repository", "/home/user/origin.git", "/home/user/clone"


class Step(NamedTuple):
    """A call of a method, or a file that is written, and whether what it gave is right."""

    method: str
    arguments: tuple[Any, ...]
    more: dict[str, Any] = {}  # noqa: RUF012  # of a tuple, and never changed
    holds: Callable[[Any], bool] = lambda _: True


STEPS = (
    Step("init", (AT,), {"initial_branch": "main"}),
    Step("configure_user", ("Somebody", "somebody@mail.example")),
    Step(WRITE, (f"{AT}/file", "one")),
    Step("add", (AT,)),
    Step("commit", (AT, "first")),
    Step(WRITE, (f"{AT}/file", "two")),
    Step("status", (AT,), {}, lambda found: [one.name for one in found.file_status] == ["file"]),
    Step("restore", (AT, ["file"])),
    Step("create_branch", (AT, "other")),
    Step("checkout_branch", (AT, "main")),
    Step("branches", (AT,), {}, lambda found: set(found.branches) == {"main", "other"}),
    Step("delete_branch", (AT, "other")),
    Step("set_config", ("core.editor", "true"), {"scope": "local", "path": AT}),
    Step("get_config", ("core.editor",), {"scope": "local", "path": AT}, lambda found: found == "true"),
    Step("reset", (AT,), {"mode": "hard", "target": "HEAD"}),
    Step("init", (ORIGIN,), {"bare": True, "initial_branch": "main"}),
    Step("remote_add", (AT, "origin", ORIGIN)),
    Step("remote_get", (AT, "origin"), {}, lambda found: found == ORIGIN),
    Step("push", (AT,), {"remote": "origin", "branch": "main"}),
    Step("clone", (f"file://{ORIGIN}",), {"path": CLONE}),
    Step("pull", (CLONE,), {"remote": "origin", "branch": "main"}),
    Step("dangerously_authenticate", ("user", "password"), {"host": "git.example"}),
)
METHODS = tuple(f"Git.{one}" for one in dict.fromkeys(step.method for step in STEPS if step.method != WRITE))


class Commands:
    """Commands of a sandbox, written down; or answered from what was written down, where `GIT_TOLD` names a file with that."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands
        self._known = os.environ.get("GIT_TOLD")
        self.told: list[Any] = []
        if self._known:
            with open(self._known) as file:
                self.told = json.load(file)

    @property
    def known(self) -> bool:
        """Whether nothing has to be run."""
        return bool(self._known)

    def run(self, command: str, **more: Any) -> Any:
        """As the SDK's own."""
        asked = [command, *(more.get(name) for name in ("envs", "user", "cwd"))]
        if self._known:
            assert self.told, f"this is asked for besides: {asked}"
            wanted, came = self.told.pop(0)
            assert asked == wanted, f"{asked} instead of {wanted}"
            return _as_it_came(came)
        try:
            done = self._commands.run(command, **more)
        except CommandExitException as error:
            self.told.append([asked, [error.stderr, error.stdout, error.exit_code, error.error]])
            raise
        self.told.append([asked, [done.stderr, done.stdout, done.exit_code, done.error]])
        return done


class AsyncCommands(Commands):
    """Of an `AsyncSandbox`."""

    async def run(self, command: str, **more: Any) -> Any:
        """As the SDK's own."""
        assert self.known, "they are run by `Sandbox`"
        return super().run(command, **more)


def _as_it_came(came: list[Any]) -> CommandResult:
    stderr, stdout, exit_code, error = came
    kind = CommandExitException if exit_code else CommandResult
    made = kind(stderr=stderr, stdout=stdout, exit_code=exit_code, error=error)
    if isinstance(made, Exception):
        raise made
    return made


def check(step: Step, found: Any) -> None:
    """Raises `AssertionError`."""
    assert step.holds(found), f"{step.method}: {found!r}"
