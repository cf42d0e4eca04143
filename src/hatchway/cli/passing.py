"""The calls of `hatchway run` and `hatchway exec`.

They are read by the standard library's parser, because the one that the other commands use takes longer to load than
everything else that a command in a sandbox takes, and these two are what programs call over and over.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .front import OUR_FAILURE, Front, carry_out

if TYPE_CHECKING:
    from hatchway.client import Limits

SUMMARIES = {
    "run": "Run a command in a new sandbox, which is deleted at the end.",
    "exec": "Run a command in a sandbox that is there.",
}
_ENDS = """\
Input, output and exit status are the command's. Other statuses: 124 when it ran into the timeout, 125 when Hatchway failed,
127 when it could not be started, 128 + N when signal N killed it. Ctrl-C and SIGTERM go to the command; twice within 2 s
they end everything.
"""


class Parser(argparse.ArgumentParser):
    """Ends with the status that says that it was not the command that failed."""

    def error(self, message: str) -> NoReturn:
        """Shows the mistake and how it is meant."""
        self.print_usage(sys.stderr)
        print(f"Error: {message}", file=sys.stderr)
        raise SystemExit(OUR_FAILURE)


def main(name: str, words: Sequence[str]) -> None:
    """Carries out `hatchway NAME WORDS`, where `name` is `run` or `exec`, and ends with its status."""
    parser = parser_of(name)
    options, argv = parse(parser, list(words))
    env = _environment(parser, options.env)

    def body(front: Front) -> int:
        from .running import Command, Machine, run_in_new, run_in_old

        command = Command(argv, env, options.workdir, options.user, options.timeout)
        if name == "exec":
            command = replace(command, limits=_limits(options))
            return run_in_old(front, options.sandbox, command, verbose=options.verbose)
        machine = Machine(
            options.template,
            options.name,
            options.vcpus,
            options.memory,
            options.disk,
            pool=options.pool,
            policy=_policy(parser, options.policy),
            timeout_s=options.timeout_s,
            idle_timeout_s=options.idle_timeout_s,
            on_timeout=options.on_timeout,
        )
        return run_in_new(front, machine, command, copy=options.copy, keep=options.keep, verbose=options.verbose)

    carry_out(Front(options.url, options.key, False), body, OUR_FAILURE)


def _policy(parser: Parser, given: str | None) -> str | None:
    if given is None or not ("/" in given or Path(given).is_file()):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--policy: {given} cannot be read: {error}")


def parser_of(name: str) -> Parser:
    """Returns the parser of `run` or `exec`."""
    parser = Parser(
        prog=f"hatchway {name}",
        usage=f"hatchway {name} [OPTIONS] {'SANDBOX ' if name == 'exec' else ''}-- CMD...",
        description=SUMMARIES[name],
        epilog=_ENDS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    if name == "run":
        add(
            "--template",
            "-t",
            default="seed:latest",
            metavar="T",
            help="template of the sandbox (default: %(default)s)",
        )
        add("--name", metavar="NAME", help="name of the sandbox, for people")
        add("--vcpus", type=int, metavar="N", help="virtual CPUs")
        add("--memory", type=int, metavar="MIB", help="memory in MiB")
        add("--disk", type=int, metavar="MIB", help="writable disk in MiB")
        add("--pool", metavar="POOL", help="auto, never or the name of a pool that it may come out of")
        add("--policy", metavar="NAME|FILE", help="what may leave it: a policy of the service, or a document")
        add("--timeout-s", type=_seconds, metavar="S", help="seconds that the sandbox runs; --timeout is the command's")
        add("--idle-timeout-s", type=_seconds, metavar="S", help="seconds that nobody uses the sandbox")
        add("--on-timeout", metavar="WHAT", help="suspend, pause, stop or delete it then")
        add("--copy", type=Path, metavar="DIR", help="first copy the content of a folder into the working directory")
        add("--keep", action="store_true", help="keep the sandbox at the end")
    else:
        add("sandbox", metavar="SANDBOX", help="id of the sandbox")
        add("--memory", type=int, metavar="MIB", help="memory that the command and its children may use together")
        add("--cpu-time", type=_seconds, metavar="S", help="seconds of CPU time after which they are killed")
        add("--processes", type=int, metavar="N", help="processes and threads that they may be")
        add("--open-files", type=int, metavar="N", help="files that each of them may have open")
        add("--file-size", type=int, metavar="MIB", help="size of the largest file that each may write")
    add("--workdir", "-w", metavar="DIR", help="working directory of the command")
    add(
        "--env",
        "-e",
        action="append",
        default=[],
        metavar="K=V",
        help="environment variable; K alone takes its value from here",
    )
    add("--user", "-u", metavar="USER", help="user that the command runs as")
    add("--timeout", type=_seconds, metavar="S", help="seconds after which the command is killed")
    add("--verbose", "-v", action="store_true", help="show how long each phase took")
    add("--url", metavar="URL", help="URL of the API (default: HATCHWAY_URL, else this machine's)")
    add("--key", metavar="KEY", help="API key (default: HATCHWAY_API_KEY, else this machine's development key)")
    return parser


def parse(parser: Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parts our options from the command: at `--`, else at the first word that is the command's."""
    if "--" in words:
        end = words.index("--")
        options, before = parser.parse_known_args(words[:end])
        argv = words[end + 1 :]
        if before and before[0].startswith("-"):
            parser.error(f"no such option: {before[0]}")
        if before:
            # The command began without a mark; this one is its own.
            options, argv = _parse_unmarked(parser, words)
    else:
        options, argv = _parse_unmarked(parser, words)
    if not argv:
        parser.error("there is no command: write it behind --")
    return options, argv


def _parse_unmarked(parser: Parser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser.add_argument("argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    argv: list[str] = options.argv
    if argv and argv[0].startswith("-"):
        parser.error(f"no such option: {argv[0]}")
    return options, argv


def _limits(options: argparse.Namespace) -> "Limits | None":
    from hatchway.client import Limits

    limits = Limits(
        memory_mib=options.memory,
        cpu_s=options.cpu_time,
        open_files=options.open_files,
        processes=options.processes,
        file_size_mib=options.file_size,
    )
    return None if limits == Limits() else limits


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _environment(parser: Parser, pairs: list[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not (equals or name in os.environ):
            parser.error(f"{pair!r} is no K=V, and no variable of that name is set here")
        env[name] = value if equals else os.environ[name]
    return env
