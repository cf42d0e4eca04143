"""What the commands `policy` do with files."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import typer

from hatchway.domain.errors import HatchwayError, InvalidRequest
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.comparing import MAX_PROBES, compare
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.explaining import Explanation, Question
from hatchway.domain.policy.explaining import explain as explained
from hatchway.domain.policy.forms import FormRefused, date, seconds_of
from hatchway.domain.policy.linting import lint
from hatchway.domain.policy.problems import PolicyError
from hatchway.domain.policy.reading import canonical, load
from hatchway.domain.policy.text import MAX_TEXT
from hatchway.domain.policy.vocabulary import TIERS

from .front import FAILED, Finished, harmless, note, show
from .output import print_json, print_table


def end(body: Callable[[], int], json: bool) -> None:
    """Ends with the status of `body`, or shows its error."""
    try:
        status = body()
    except PolicyError as error:
        show(error.as_dict(), json)
        if not json:
            for problem in error.problems:
                print(f"  {harmless(problem)}", file=sys.stderr)
        status = FAILED
    except HatchwayError as error:
        show(error.as_dict(), json)
        status = FAILED
    raise Finished(status)


def check_files(files: list[str], json: bool) -> int:
    """Says what is wrong with each; returns 1 when something is."""
    results: list[dict[str, Any]] = []
    for file in files:
        tier, name = _place(file)
        try:
            document = load(_read(name), time.time())
        except PolicyError as error:
            results.append(
                {"file": name, "tier": tier, "valid": False, "problems": msgspec.to_builtins(error.problems)}
            )
        else:
            results.append(
                {"file": name, "tier": tier, "valid": True, "problems": [], "canonical": canonical(document)}
            )
    wrong = any(not result["valid"] for result in results)
    if json:
        print_json(results)
        return FAILED if wrong else 0
    for result in results:
        if result["valid"]:
            print(f"{harmless(result['file'])}: valid")
        for problem in result["problems"]:
            where = f"{result['file']}:{problem['line']}" if problem["line"] else result["file"]
            print(f"{harmless(where)}: {harmless(problem['place'] or 'document')}: {harmless(problem['cause'])}")
            print(f"    {harmless(problem['remedy'])} [{problem['code']}]")
    return FAILED if wrong else 0


def explain_files(files: list[str], json: bool, *, at: str | None, headers: list[str], **asked: Any) -> int:
    """Says whether something would pass; returns 1 when it is denied."""
    pairs = []
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon:
            raise typer.BadParameter(f"{header!r} is no header: write it as `name: value`", param_hint="--header")
        pairs.append((name.strip(), value.strip()))
    answer = explained(compile_policy(_documents(files)), Question(headers=tuple(pairs), **asked), _moment(at))
    if json:
        print_json(answer)
    else:
        _show_explanation(answer)
    return FAILED if answer.action == "deny" else 0


def _moment(at: str | None) -> float:
    if at is None:
        return time.time()
    try:
        return seconds_of(date(at))
    except FormRefused as error:
        raise typer.BadParameter(f"{error.cause} {error.remedy}", param_hint="--at") from None


def _show_explanation(answer: Explanation) -> None:
    words = {"allow": "passes", "deny": "is denied", "ask": "is held until somebody agrees"}
    observed = " (only because the policy observes)" if answer.observed else ""
    print(f"It {words[answer.action]}{observed}: {answer.reason}" + (f", by {answer.rule}" if answer.rule else ""))
    if answer.explanation:
        print(f"  {harmless(answer.explanation)}")
    for credential in answer.credentials:
        print(f"  with the credential {credential['id']} ({credential['source']}) in {credential['into']}")
    if answer.tls:
        print(f"  TLS: {answer.tls}")
    for stage in answer.stages:
        print(f"  {stage.stage}: {stage.action}, {stage.reason}" + (f", {stage.rule}" if stage.rule else ""))
    if answer.needed is not None:
        print("A rule that lets this alone pass:")
        for line in as_yaml([answer.needed]).splitlines():
            print(f"  {line}")


def diff_files(before: str, after: str, beside: list[str], json: bool) -> int:
    """Says what becomes of what."""
    others = _documents(beside)
    old, new = (compile_policy([*_documents([file]), *others]) for file in (before, after))
    found = compare(old, new, time.time())
    if json:
        print_json(found)
    elif not found.changes:
        print("Nothing changes.")
    else:
        rows = [
            (one.change, one.host, one.port, one.method, one.path, one.before, one.after, ", ".join(one.terms))
            for one in found.changes
        ]
        print_table(("BECOMES", "HOST", "PORT", "METHOD", "PATH", "BEFORE", "AFTER", "TERMS"), rows)
    if not found.complete:
        note(f"the policies have more than {MAX_PROBES} cases, of which the first were compared")
    return 0


def lint_files(files: list[str], json: bool, *, strict: bool) -> int:
    """Says what may not be meant; with `strict` returns 1 when there is something."""
    found = lint(_documents(files), time.time())
    if json:
        print_json(found)
    else:
        for one in found:
            print(f"{harmless(one.document)}: {one.place}: {harmless(one.cause)}")
            print(f"    {harmless(one.remedy)} [{one.code}]")
    return FAILED if strict and found else 0


def make_profile(project: Path | None, output: Path | None, json: bool) -> int:
    """Makes the policy for package installers, and says what it is made of."""
    from .installers import profile_of_this_machine

    profile = profile_of_this_machine(project)
    text = profile.as_text()
    load(text, time.time())
    if json:
        print_json(
            {"policy": profile.document, "sources": profile.sources, "notes": profile.notes, "file": str(output or "")}
        )
    if output is not None:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise InvalidRequest(
                "local_file_failed", f"{output} is there already.", "Name another file, or move it away."
            ) from None
        except OSError as error:
            raise InvalidRequest(
                "local_file_failed", f"{output} cannot be written: {error.strerror}.", "Name another file."
            ) from None
    elif not json:
        print(text, end="")
    for line in profile.notes:
        note(line)
    return 0 if profile.document.get("rules") else FAILED


def as_yaml(value: Any) -> str:
    """A value as YAML, with short lists on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Indents lists below their key."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return text


def _documents(files: list[str]) -> list[TieredDocument]:
    made = []
    for file in files:
        tier, name = _place(file)
        try:
            document = load(_read(name), time.time())
        except PolicyError as error:
            raise InvalidRequest(
                "invalid_policy",
                f"{name} has {len(error.problems)} problems, the first at {error.problems[0]}",
                f"See all of them with `hatchway policy check {name}`.",
            ) from None
        made.append(TieredDocument(tier=tier, name=Path(name).stem if name != "-" else "stdin", document=document))
    return made


def _place(file: str) -> tuple[str, str]:
    tier, colon, name = file.partition(":")
    return (tier, name) if colon and tier in TIERS else ("sandbox", file)


def _read(name: str) -> str:
    try:
        if name == "-":
            octets = sys.stdin.buffer.read(4 * MAX_TEXT + 1)
        else:
            with open(name, "rb") as file:
                octets = file.read(4 * MAX_TEXT + 1)
    except OSError as error:
        raise InvalidRequest(
            "local_file_failed", f"{name} cannot be read: {error.strerror}.", "Name a file that can."
        ) from None
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("local_file_failed", f"{name} is not UTF-8.", "Write it in UTF-8.") from None
