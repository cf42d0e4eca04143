"""What the supervisor tells the roles of itself: `run/supervisor.json`, written anew whenever it changes."""

from pathlib import Path

import msgspec

from hatchway.wire.small_files import replace_file

NAME = "supervisor.json"


class Supervision(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers since the supervisor was started, by the name of the role."""

    started_at: float = 0.0
    restarts: dict[str, int] = {}
    """How often a role was started again, whatever ended it."""
    hung: dict[str, int] = {}
    """How often one was killed because it did not say any more that it is alive."""


def publish(run: Path, state: Supervision) -> None:
    """Raises `OSError`."""
    replace_file(run / NAME, msgspec.json.encode(state), mode=0o644, durable=False)


def read(run: Path) -> Supervision | None:
    """None where there is no supervisor, or it has told nothing."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=Supervision)
    except (OSError, msgspec.MsgspecError):
        return None
