"""What all commands share: the client that they talk through, how they end, and how errors are shown."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from hatchway.client import AsyncHatchway, Hatchway

FAILED = 1
"""Exit status when the service answered with an error."""
OUR_FAILURE = 125
"""The same for `run` and `exec`, whose other statuses are those of the command; as container tools have it."""


class Finished(SystemExit):
    """Ends with the exit status of a command that ran, as opposed to one that the parser of our own call chose."""


class Front:
    """The options of one call, and the client that they ask for."""

    def __init__(self, url: str | None, key: str | None, json: bool) -> None:
        self._url = url
        self._key = key
        self.json = json
        self._client: Hatchway | None = None

    @property
    def client(self) -> "Hatchway":
        """The client; made when it is first needed."""
        if self._client is None:
            from hatchway.client import Hatchway

            self._client = Hatchway(self._url, self._key)
        return self._client

    def asyncio_client(self) -> "AsyncHatchway":
        """A client for asyncio, which whoever asks for it closes."""
        from hatchway.client import AsyncHatchway

        return AsyncHatchway(self._url, self._key)

    def close(self) -> None:
        """Closes the client, if there is one."""
        if self._client is not None:
            self._client.close()


def carry_out(front: Front, body: Callable[[Front], int | None], failed: int) -> None:
    """Runs the body of a command and ends with the status that it returns; with `failed` after an error of the SDK."""
    try:
        status = body(front)
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise Finished(130) from None
    except BrokenPipeError:
        _end_of_pipe()
    except Exception as error:
        from hatchway.client import HatchwayError

        if not isinstance(error, HatchwayError):
            raise
        show(error.as_dict(), front.json)
        raise Finished(failed) from None
    finally:
        front.close()
    if status is not None:
        raise Finished(status)


def _end_of_pipe() -> NoReturn:
    """Whoever read our output has gone (`hatchway ls | head -1`): ends as a signal would, without a complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise Finished(141)


def show(error: dict[str, object], json: bool) -> None:
    """Writes an error to standard error: for people as cause, code and remedy, with `json` as one object."""
    if json:
        from .output import to_json

        print(to_json({"error": error}), file=sys.stderr)
        return
    print(f"error: {harmless(error['cause'])}", file=sys.stderr)
    print(f"  code: {harmless(error['code'])}", file=sys.stderr)
    if error.get("remedy"):
        print(f"  remedy: {harmless(error['remedy'])}", file=sys.stderr)


def note(text: str) -> None:
    """Writes a line for people to standard error, beside the output of commands."""
    print(f"hatchway: {harmless(text)}", file=sys.stderr, flush=True)


def harmless(text: object) -> str:
    """A text as it can be shown: what a sandbox says or names may hold what a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(text))
