"""The options that the commands over the API share: `--url`, `--key` and `--json`."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from .front import FAILED, Front, carry_out

P = ParamSpec("P")

Url = Annotated[str | None, typer.Option("--url", help="URL of the API. Default: HATCHWAY_URL, else this machine's.")]
ApiKey = Annotated[
    str | None, typer.Option("--key", help="API key. Default: HATCHWAY_API_KEY, else this machine's development key.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def with_front(command: Callable[Concatenate[Front, P], int | None], *, failed: int = FAILED) -> Callable[..., None]:
    """Gives a command the options `--url`, `--key` and `--json`, and a `Front` as its first argument.

    It ends with the status that the command returns, and with `failed` after an error of the SDK.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        front = Front(options.pop("url"), options.pop("key"), options.pop("json"))
        carry_out(front, lambda front: command(front, *args, **options), failed)

    # The command line is made from the signature: without the front, with the shared options.
    signature = inspect.signature(command)
    own = list(signature.parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, default, kind in (("url", None, Url), ("key", None, ApiKey), ("json", False, Json))
    ]
    del wrapper.__wrapped__
    wrapper.__signature__ = signature.replace(parameters=own + added, return_annotation=None)  # type: ignore[attr-defined]  # inspect reads it
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in own + added}
    return wrapper
