"""`hatchway redteam`: what the attacks get out of sandboxes of the running service, and the proof that they could."""

import contextlib
import fcntl
import json
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hatchway.client import Hatchway
from hatchway.domain.errors import Conflict, InvalidRequest, Unavailable
from hatchway.redteam import leftovers, report
from hatchway.redteam.attacks import ATTACKS, CONDITIONS, Attack, chosen
from hatchway.redteam.attempts import BLOCKED, BYPASS, INVALID, Attempt
from hatchway.redteam.ground import lacking
from hatchway.redteam.live import MARKED

_OF_A_RUN = re.compile(r"redteam-[0-9a-f]{6}(-secret)?")
"""Names of what is made for a run (`runner`)."""


def run(data_dir: Path, *, only: str, conditions: Sequence[str], prove: bool, as_json: bool) -> int:
    """Runs the attacks; returns the exit status, which is 1 after any bypass or attempt that was none. Raises `HatchwayError`."""
    attacks = chosen(only)
    if not attacks:
        raise InvalidRequest("unknown_attack", f"There is no attack {only!r}.", "`hatchway redteam --list` names all.")
    if unknown := [one for one in conditions if one not in CONDITIONS]:
        raise InvalidRequest(
            "unknown_condition", f"There is no condition {unknown[0]!r}.", f"There are: {', '.join(CONDITIONS)}."
        )
    if why := lacking():
        raise Unavailable("no_namespaces", f"The attacks need a ground of their own: {why}.", "Call it as root.")
    started = time.monotonic()
    try:
        for run_before in leftovers.remove():
            print(f"what the run {run_before} left, which was killed, is removed", file=sys.stderr)
        with _ended_by_signals():
            attempts = _prove(attacks) if prove else _attack(data_dir, attacks, list(conditions) or list(CONDITIONS))
    except OSError as error:
        raise Unavailable(
            "no_namespaces", f"The ground could not be made: {error}", "Network namespaces, `ip` and veth are needed."
        ) from error
    finally:
        _progress("")
    _show(attempts, time.monotonic() - started, prove=prove, as_json=as_json)
    wrong = {BLOCKED, INVALID} if prove else {BYPASS, INVALID}
    return 1 if any(one.verdict in wrong for one in attempts) else 0


def show_list(*, as_json: bool) -> None:
    """Prints what attacks there are."""
    if not as_json:
        print(report.listing())
        return
    for one in ATTACKS:
        print(json.dumps({"id": one.id, "title": one.title, "class": one.kind, "conditions": list(one.conditions)}))


def _prove(attacks: Sequence[Attack]) -> list[Attempt]:
    from hatchway.redteam.naive import prove

    return prove(attacks, _progress)


def _attack(data_dir: Path, attacks: Sequence[Attack], conditions: Sequence[str]) -> list[Attempt]:
    from hatchway.redteam.live import Service
    from hatchway.redteam.runner import attack

    try:
        url = str(json.loads((data_dir / "endpoint.json").read_bytes())["api"])
        key = (data_dir / "dev.key").read_text(encoding="ascii").strip()
        service = Service(data_dir)
        users = service.users()
    except (OSError, ValueError, KeyError) as error:
        raise Unavailable(
            "not_up", f"No service is up on {data_dir}: {error}", "`hatchway up` first, or name its --data-dir."
        ) from error
    with alone(data_dir), Hatchway(url, key) as hatchway:
        sweep(hatchway)
        return attack(hatchway, service, attacks, conditions, users, _progress)


@contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """No other run attacks the same service meanwhile. Raises `Conflict("run_under_way")`.

    Policies of a project are in force in all its sandboxes: two runs would change each other's, in the middle of attempts.
    """
    with (data_dir / "run" / "redteam.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                "run_under_way",
                "Another run attacks this service.",
                "Wait for its end: the policies of one would hold in the other's sandboxes.",
            ) from None
        yield


def sweep(hatchway: Hatchway) -> None:
    """Removes the sandboxes, policies and credentials of runs that were killed. For who is `alone`."""
    for sandbox in list(hatchway.sandboxes.list(metadata={MARKED: MARKED})):
        hatchway.sandboxes.delete(sandbox.id)
    for policy in list(hatchway.policies.list(tier="project")):
        if _OF_A_RUN.fullmatch(policy.name):
            hatchway.policies.delete(policy.name, tier="project")
    for credential in list(hatchway.credentials.list()):
        if _OF_A_RUN.fullmatch(credential.name):
            hatchway.credentials.delete(credential.name)


def _show(attempts: Sequence[Attempt], seconds: float, *, prove: bool, as_json: bool) -> None:
    if as_json:
        print(report.lines(attempts, seconds))
        return
    print(report.table(attempts))
    if wrong := report.named(attempts, [BLOCKED, INVALID] if prove else [BYPASS, INVALID]):
        print(wrong)
    found = report.counts(attempts)
    if prove:
        print(f"{found['bypasses']} of {len(attempts)} attacks arrive where nothing is defended; {seconds:.0f} s")
    else:
        print(
            f"{found['attacks']} attacks, {len(attempts)} attempts: {found['bypasses']} bypasses, {found['invalid']} invalid; {seconds:.0f} s"
        )


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: what was made for it is removed."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
