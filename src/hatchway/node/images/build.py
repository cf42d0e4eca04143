"""Builds the template `seed` where it is not there yet: `python -m hatchway.node.images.build --folder FOLDER --agent FILE`.

Run as root before the node starts. `--progress json` prints one JSON object per line: progress events (`phase`, `fraction`,
`message`); the last has phase `ready` and `release`, or phase `failed` and `error` (code, cause, remedy). Exit status: 0 done, 1 failed, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hatchway.domain.errors import HatchwayError
from hatchway.node.images.host import missing_packages, required_packages
from hatchway.node.images.manifest import DEFAULT_TAG
from hatchway.node.images.progress import BuildProgress
from hatchway.node.images.seed import build_seed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="hatchway.node.images.build", description="Builds the template seed.")
    parser.add_argument("--folder", type=Path, help="images folder, made if it is not there")
    parser.add_argument("--agent", type=Path, help="the guest agent's static binary")
    parser.add_argument("--tag", default=DEFAULT_TAG)
    parser.add_argument("--refresh", action="store_true", help="ask the distribution for newer packages")
    parser.add_argument("--progress", choices=("text", "json"), default="text")
    parser.add_argument("--wait", type=float, default=3600.0, metavar="SECONDS", help="for another build of the folder")
    parser.add_argument(
        "--list-packages", action="store_true", help="print the host packages needed, and which are missing"
    )
    options = parser.parse_args(arguments)
    if options.list_packages:
        missing = set(missing_packages())
        for package in required_packages():
            state = "missing" if package in missing else "installed"
            print(f"{package.name}\t{package.size_mib}\t{state}\t{package.why}")
        return 0
    if options.folder is None or options.agent is None:
        parser.error("--folder and --agent are needed")
    show = _json if options.progress == "json" else _Text().show
    try:
        release = build_seed(
            options.folder, options.agent, tag=options.tag, refresh=options.refresh, report=show, wait_s=options.wait
        )
    except HatchwayError as error:
        if options.progress == "json":
            _print({"phase": "failed", "message": error.cause, "error": error.as_dict()})
        print(f"error: {error.cause}\nremedy: {error.remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept for the next build", file=sys.stderr)
        return 130
    if options.progress == "json":
        _print({"phase": "ready", "message": release.digest, "release": release.release})
    return 0


def _json(event: BuildProgress) -> None:
    _print(event)


def _print(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


class _Text:
    """A line per step on a file, one line that is rewritten on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase = ""

    def show(self, event: BuildProgress) -> None:
        percent = "" if event.fraction is None else f" {event.fraction * 100:3.0f} %"
        line = f"{event.phase}{percent} {event.message}"
        if self._terminal:
            start = "\n" if self._phase and event.phase != self._phase else "\r"
            print(f"{start}\x1b[K{line[:110]}", end="\n" if event.phase == "done" else "", file=sys.stderr, flush=True)
        elif event.phase != self._phase:
            print(line, file=sys.stderr, flush=True)
        self._phase = event.phase


if __name__ == "__main__":
    sys.exit(main())
