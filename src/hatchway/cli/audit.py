"""Commands about the audit journal: `audit tail`, `export`, `verify`, `head`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .front import Front, harmless
from .shared import with_front

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hatchway.audit.verifying import Checked
    from hatchway.client.models import AuditRecord

PUBLIC_KEY = "HATCHWAY_AUDIT_KEY"

OfProject = Annotated[str | None, typer.Option("--project", help="Of this project. Needs the scope `installation`.")]
OfSandbox = Annotated[str | None, typer.Option("--sandbox", help="About this sandbox.")]
Kinds = Annotated[
    list[str] | None, typer.Option("--kind", help="Of this kind, or one that begins so (`egress.`); repeatable.")
]
Decision = Annotated[str | None, typer.Option("--decision", help="allowed, denied, asked or failed.")]
Since = Annotated[float | None, typer.Option("--since", metavar="TIME", help="Of this Unix time or later.")]
Until = Annotated[float | None, typer.Option("--until", metavar="TIME", help="Before this Unix time.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.command("tail")(tail)
    group.command("export")(export)
    group.command("verify")(verify)
    group.command("head")(head)
    app.add_typer(group, name="audit", help="What happened: show, export and check the audit journal.")


@with_front
def tail(
    front: Front,
    project: OfProject = None,
    sandbox: OfSandbox = None,
    kind: Kinds = None,
    decision: Decision = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10_000, help="How many of the last.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and show what comes.")] = False,
) -> None:
    """Show the last records, the newest at the end."""
    import itertools

    audit = front.client.audit
    wanted: dict[str, Any] = {"project": project, "sandbox": sandbox, "kinds": tuple(kind or ()), "decision": decision}
    after = audit.head().sequence if follow else None
    found = list(itertools.islice(audit.list(**wanted, newest=True), lines))[::-1] if lines else []
    for record in found:
        _print(record, front.json)
    if follow:
        after = max((found[-1].sequence if found else 0), after or 0)
        for record in audit.follow(**wanted, after=after):
            _print(record, front.json)


@with_front
def export(
    front: Front,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Where it goes; default: standard output.", show_default=False),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="jsonl (the journal's own lines) or ocsf.")] = "jsonl",
    project: OfProject = None,
    sandbox: OfSandbox = None,
    kind: Kinds = None,
    decision: Decision = None,
    since: Since = None,
    until: Until = None,
    after: Annotated[int, typer.Option("--after", min=0, help="Behind the record with this number.")] = 0,
) -> None:
    """Write records to a file, one line each: all that the key may see, or a selection."""
    if format not in ("jsonl", "ocsf"):
        raise typer.BadParameter("give jsonl or ocsf", param_hint="--format")
    wanted: dict[str, Any] = {"project": project, "sandbox": sandbox, "kinds": tuple(kind or ()), "decision": decision}
    found = front.client.audit.export(**wanted, since=since, until=until, after=after)
    lines: Iterable[bytes] = found if format == "jsonl" else _as_ocsf(found)
    if file is None:
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return
    temporary = file.with_name(f".{file.name}.part")
    try:
        with temporary.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            target.writelines(lines)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except OSError as error:
        raise _unusable(error, file) from None
    finally:
        temporary.unlink(missing_ok=True)


@with_front
def verify(
    front: Front,
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help="An exported file, or the journal's folder; default: ask the service.",
            show_default=False,
        ),
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            "--public-key", help=f"The journal's key, or a file with it. Default: {PUBLIC_KEY}, else what it says."
        ),
    ] = None,
    at_least: Annotated[
        str | None,
        typer.Option("--head", metavar="SEQUENCE:HASH", help="A head that was noted earlier and must be there."),
    ] = None,
    selection: Annotated[
        bool, typer.Option("--selection", help="The file is a selection: records between are not missed.")
    ] = False,
) -> int:
    """Check chain, signatures and gaps. Ends with 1 when something is not as it was written."""
    from hatchway.audit import verifying

    public, noted = _key(public_key), _noted(at_least)
    try:
        if path is None:
            lines = front.client.audit.export()
            checked = verifying.verify_lines(lines, public, filtered=selection, at_least=noted)
        elif path.is_dir():
            checked = verifying.verify_folder(path, public, at_least=noted)
        else:
            checked = verifying.verify_file(path, public, filtered=selection, at_least=noted)
    except OSError as error:
        raise _unusable(error, path) from None
    _report(front, checked)
    return 0 if checked.good else 1


@with_front
def head(front: Front) -> None:
    """Show where the journal is and its public key: what to note elsewhere for a later `verify`."""
    from .output import print_fields, print_json

    found = front.client.audit.head()
    if front.json:
        print_json(found)
        return
    shown = found.as_dict()
    print_fields(
        {
            "head": f"{found.sequence}:{found.hash}",
            **{name: shown[name] for name in shown if name not in ("sequence", "hash")},
        }
    )


def _print(record: "AuditRecord", json: bool) -> None:
    from .output import print_json, to_json, when

    if json:
        print_json(record)
        return
    about = " ".join(filter(None, (record.project, record.sandbox_id)))
    times = f" x{record.count}" if record.count > 1 else ""
    decided = " ".join(filter(None, (record.decision, record.reason)))
    text = f"{record.sequence:>8}  {when(record.time)}  {record.kind}{times}  {about}  {record.actor}  {decided}  {to_json(record.data)}"
    print(harmless(text), flush=True)


def _report(front: Front, checked: "Checked") -> None:
    from .output import print_json

    if front.json:
        print_json({"good": checked.good, **{name: getattr(checked, name) for name in checked.__struct_fields__}})
        return
    for finding in checked.findings:
        print(harmless(f"{finding.kind}: {finding.message}"))
    print(
        f"{checked.records} records, {checked.first} to {checked.last}" + (", a selection" if checked.filtered else "")
    )
    if checked.heads:
        rest = checked.last - checked.signed_to
        print(f"{checked.heads} signed heads, the last covers {checked.signed_to}; {rest} behind it are chained only")
    else:
        print("no signed head: the records are chained only")
    print(
        f"key {checked.public or 'unknown'}"
        + ("" if checked.pinned else " (as the journal says: note it, and give it next time)")
    )
    print("good" if checked.good else "NOT AS IT WAS WRITTEN")


def _as_ocsf(lines: "Iterable[bytes]") -> "Iterator[bytes]":
    from hatchway.audit.lines import Broken, read
    from hatchway.audit.ocsf import event

    from .output import to_json

    for line in lines:
        try:
            record = read(line)
        except Broken as error:
            from hatchway.client import BadAnswer

            raise BadAnswer(
                "bad_answer", f"A record cannot be read: {error}.", "`hatchway audit verify` says more."
            ) from None
        yield to_json(event(record, line.decode("ascii").rstrip("\n"))).encode() + b"\n"


def _key(given: str | None) -> str | None:
    text = given or os.environ.get(PUBLIC_KEY)
    if text is None:
        return None
    if os.path.isfile(text):
        text = Path(text).read_text(errors="replace")
    text = text.strip().lower()
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise typer.BadParameter("give 64 hexadecimal digits, or a file with them", param_hint="--public-key")
    return text


def _noted(given: str | None) -> tuple[int, str] | None:
    if given is None:
        return None
    sequence, _, digest = given.partition(":")
    if not sequence.isascii() or not sequence.isdigit() or len(digest) != 64:
        raise typer.BadParameter("give SEQUENCE:HASH, as `hatchway audit head` shows it", param_hint="--head")
    return int(sequence), digest.lower()


def _unusable(error: OSError, path: Path | None) -> Exception:
    from hatchway.client import TransferFailed

    what = f"{error.filename or path}: {error.strerror or error}"
    return TransferFailed("local_file_failed", f"The file cannot be used: {what}.", "Name another one.")
