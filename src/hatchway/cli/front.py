"""What all commands share: the options `--url`, `--key` and `--json`, the client behind them, and how errors are shown."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, NoReturn, ParamSpec

import typer

if TYPE_CHECKING:
    from hatchway.client import Hatchway

P = ParamSpec("P")

Url = Annotated[str | None, typer.Option("--url", help="URL of the API. Default: HATCHWAY_URL, else this machine's.")]
ApiKey = Annotated[
    str | None, typer.Option("--key", help="API key. Default: HATCHWAY_API_KEY, else this machine's development key.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

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

    def close(self) -> None:
        """Closes the client, if there is one."""
        if self._client is not None:
            self._client.close()


def with_front(command: Callable[Concatenate[Front, P], None]) -> Callable[..., None]:
    """Gives a command the options `--url`, `--key` and `--json`, and a `Front` as its first argument."""
    return _wrap(command, {"url": Url, "key": ApiKey, "json": Json}, FAILED)


def with_front_passing_on(command: Callable[Concatenate[Front, P], int]) -> Callable[..., None]:
    """The same for a command whose output and exit status, which it returns, are those of something that it ran."""
    return _wrap(command, {"url": Url, "key": ApiKey}, OUR_FAILURE)


def _wrap(command: Callable[..., int | None], shared: dict[str, Any], failed: int) -> Callable[..., None]:
    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        front = Front(options.pop("url"), options.pop("key"), options.pop("json", False))
        try:
            status = command(front, *args, **options)
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

    # The command line is made from the signature: without the front, with the shared options.
    signature = inspect.signature(command)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False if name == "json" else None, annotation=kind
        )
        for name, kind in shared.items()
    ]
    del wrapper.__wrapped__
    wrapper.__signature__ = signature.replace(parameters=own + added, return_annotation=None)  # type: ignore[attr-defined]  # inspect reads it
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own + added}
    return wrapper


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
    print(f"error: {error['cause']}", file=sys.stderr)
    print(f"  code: {error['code']}", file=sys.stderr)
    if error.get("remedy"):
        print(f"  remedy: {error['remedy']}", file=sys.stderr)


def note(text: str) -> None:
    """Writes a line for people to standard error, beside the output of commands."""
    print(f"hatchway: {text}", file=sys.stderr, flush=True)
