"""Commands about archives: `export`, `exports` and `import`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .front import Front
from .shared import with_front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hatchway.client import Sandbox, Snapshot

PASSPHRASE = "HATCHWAY_PASSPHRASE"
_SEALED = b"HWSEALED"


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("export")(export)
    app.command("import")(import_)
    group = typer.Typer(rich_markup_mode=None)
    group.callback(invoke_without_command=True)(exports)
    group.command("ls")(ls)
    group.command("rm")(rm)
    app.add_typer(group, name="exports", help="List and delete archives that wait to be fetched.")


@with_front
def export(
    front: Front,
    source: Annotated[
        str, typer.Argument(metavar="ID", help="A suspended or stopped sandbox, or a snapshot.", show_default=False)
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the archive goes.", show_default=False)],
    encrypt: Annotated[
        bool, typer.Option("--encrypt", help=f"Under a passphrase: of {PASSPHRASE}, or asked for.")
    ] = False,
    include_template: Annotated[
        bool, typer.Option("--include-template", help="For an installation that does not have the template.")
    ] = False,
) -> None:
    """Write a sandbox or a snapshot to a file."""
    from hatchway.client import NotFound

    from .output import print_json
    from .progress import meter

    passphrase = _passphrase(twice=True) if encrypt else None
    archives = front.client.archives
    try:
        made = archives.export(source, include_template=include_template)
    except NotFound as unknown:
        if unknown.code != "unknown_sandbox":
            raise
        try:
            snapshot = front.client.snapshots.get(source)
        except NotFound:
            raise unknown from None
        made = archives.export(snapshot, include_template=include_template)
    temporary = file.with_name(f".{file.name}.part")
    try:
        with meter(front, made.size_bytes) as tell, temporary.open("wb") as target:
            done = 0
            os.fchmod(target.fileno(), 0o600)
            for piece in archives.fetch(made, passphrase=passphrase):
                target.write(piece)
                done += len(piece)
                if tell is not None:
                    tell(done, file.name)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except OSError as error:
        raise _local(error, temporary) from None
    finally:
        temporary.unlink(missing_ok=True)
    archives.delete(made.id)
    if front.json:
        print_json({"export": made.as_dict(), "file": str(file), "bytes": done, "encrypted": encrypt})
    else:
        print(f"{file}  {done} octets")


@with_front
def import_(
    front: Front,
    source: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="An archive, here or where a node fetches it.", show_default=False)
    ],
    encrypted: Annotated[
        bool, typer.Option("--encrypted", help=f"It is, at a URL: the passphrase is of {PASSPHRASE}, or asked for.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Another name for it.", show_default=False)
    ] = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Its memory too, or its disk alone.")] = True,
) -> None:
    """Make a sandbox of an archive, suspended where it has memory, else stopped; or a snapshot, of a snapshot's.

    A URL lies in the service's store, below archives/PROJECT/, or under another prefix that its operator allows.
    """
    if "://" in source:
        passphrase = _passphrase(twice=False) if encrypted else None
        _show(front, front.client.archives.load_from(source, passphrase=passphrase, memory=memory, name=name))
    else:
        _show(front, _load(front, Path(source), memory, name))


def _show(front: Front, made: "Sandbox | Snapshot") -> None:
    from hatchway.client import Snapshot

    from .output import print_json

    what, info = ("snapshot", made) if isinstance(made, Snapshot) else ("sandbox", made.info)
    if front.json:
        print_json({"made": what, **info.as_dict()})
    else:
        print(f"{info.id}  {what}  {info.kind if isinstance(info, Snapshot) else info.state}")


def _load(front: Front, file: Path, memory: bool, name: str | None) -> "Sandbox | Snapshot":
    from hatchway.client.bodies import Body, read_all

    from .progress import meter

    try:
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            passphrase = _passphrase(twice=False) if source.read(len(_SEALED)) == _SEALED else None
            with meter(front, size) as tell:

                def begin() -> "Iterator[bytes]":
                    source.seek(0)
                    return _told(read_all(source), tell, file.name)

                return front.client.archives.load(
                    Body(begin, size, again=True), passphrase=passphrase, memory=memory, name=name
                )
    except OSError as error:
        raise _local(error, file) from None


@with_front
def exports(front: Front, context: typer.Context) -> None:
    """List the archives that wait to be fetched; or delete some."""
    if context.invoked_subcommand is None:
        _list(front)


@with_front
def ls(front: Front) -> None:
    """List the archives that wait to be fetched, are being made, or failed."""
    _list(front)


@with_front
def rm(
    front: Front,
    exports: Annotated[list[str], typer.Argument(metavar="EXPORT...", help="Ids of exports.", show_default=False)],
) -> None:
    """Delete archives before their time is over."""
    for export_id in exports:
        front.client.archives.delete(export_id)


def _list(front: Front) -> None:
    from .output import print_json, print_table, when

    found = list(front.client.archives.list())
    if front.json:
        print_json(found)
        return
    rows = [
        (one.id, one.state, one.snapshot or one.sandbox, one.size_bytes, when(one.created_at), when(one.expires_at))
        for one in found
    ]
    print_table(("EXPORT", "STATE", "OF", "BYTES", "CREATED", "EXPIRES"), rows)


def _told(pieces: "Iterator[bytes]", tell: "Callable[[int, str], None] | None", name: str) -> "Iterator[bytes]":
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if tell is not None:
            tell(done, name)


def _passphrase(*, twice: bool) -> str:
    from getpass import getpass

    from hatchway.client import InvalidRequest

    given = os.environ.get(PASSPHRASE)
    if given is None and sys.stdin.isatty():
        given = getpass("Passphrase: ")
        if twice and getpass("Again: ") != given:
            raise InvalidRequest("bad_passphrase", "The two passphrases differ.", "Try again.")
    if not given:
        raise InvalidRequest(
            "bad_passphrase", "There is no passphrase.", f"Set {PASSPHRASE}, or run this in a terminal."
        )
    return given


def _local(error: OSError, path: Path) -> Exception:
    from hatchway.client import TransferFailed

    what = f"{error.filename or path}: {error.strerror or error}"
    return TransferFailed("local_file_failed", f"The file cannot be used: {what}.", "Name another one.")
