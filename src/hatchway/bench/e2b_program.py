"""What `hatchway bench e2b` has done by E2B's SDK: runs with the interpreter that has it, which has nothing of ours.

One order after the other comes as a line of JSON, each is answered with one. Times are in milliseconds.
"""

import asyncio
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sdk: Any = importlib.import_module("e2b")

MIB = 1024 * 1024
PATH = "/home/user/bench"
TIMEOUT_S = 600

_open: dict[str, Any] = {}


def first_command(_: dict[str, Any]) -> dict[str, Any]:
    """A sandbox from nothing to the end of its first command."""
    began = time.perf_counter()
    sandbox = sdk.Sandbox.create(timeout=TIMEOUT_S)
    try:
        created = time.perf_counter()
        done = sandbox.commands.run("true")
        ended = time.perf_counter()
        return {
            "create": (created - began) * 1e3,
            "both": (ended - began) * 1e3,
            "ok": done.exit_code == 0,
            "version": importlib.import_module("importlib.metadata").version("e2b"),
        }
    finally:
        sandbox.kill()


def begin(_: dict[str, Any]) -> dict[str, Any]:
    """A sandbox for files."""
    _open["sandbox"] = sdk.Sandbox.create(timeout=TIMEOUT_S)
    return {}


def end(_: dict[str, Any]) -> dict[str, Any]:
    """It is not needed any more."""
    _open.pop("sandbox").kill()
    return {}


def upload(order: dict[str, Any]) -> dict[str, Any]:
    """A file of so many MiB up, as it is read from the disk."""
    with tempfile.TemporaryFile() as file:
        file.truncate(order["mib"] * MIB)
        began = time.perf_counter()
        _open["sandbox"].files.write(PATH, file, request_timeout=TIMEOUT_S)
        return {"ms": (time.perf_counter() - began) * 1e3}


def download(_: dict[str, Any]) -> dict[str, Any]:
    """The file down, piece by piece."""
    began = time.perf_counter()
    count = sum(map(len, _open["sandbox"].files.read(PATH, format="stream", request_timeout=TIMEOUT_S)))
    return {"ms": (time.perf_counter() - began) * 1e3, "octets": count}


def many(order: dict[str, Any]) -> dict[str, Any]:
    """So many sandboxes at once, each of which is used."""
    return asyncio.run(_many(order["count"]))


async def _many(count: int) -> dict[str, Any]:
    began = time.perf_counter()

    async def one(number: int) -> float:
        # On a busy machine a first command of twenty may take longer than the SDK waits by itself.
        sandbox = await sdk.AsyncSandbox.create(timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
        try:
            done = await sandbox.commands.run(f"echo {number}", timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
            if done.stdout != f"{number}\n":
                raise RuntimeError(f"{number} said {done.stdout!r}")
            return (time.perf_counter() - began) * 1e3
        finally:
            await sandbox.kill()

    ended = await asyncio.gather(*map(one, range(count)), return_exceptions=True)
    failures = [one for one in ended if isinstance(one, BaseException)]
    return {
        "last": max((one for one in ended if isinstance(one, float)), default=0.0),
        "failed": len(failures),
        "why": "; ".join(sorted({f"{type(one).__name__}: {one}"[:200] for one in failures})),
    }


ORDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    one.__name__: one for one in (first_command, begin, end, upload, download, many)
}


def main() -> None:
    """Obeys until there are no more orders."""
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = ORDERS[order["do"]](order)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is told to who gave the order
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
            print(json.dumps(answer), flush=True)
    finally:
        if _open:
            end({})


if __name__ == "__main__":
    main()
