"""Runs the guest's `files` program on this host, as the node runs it in a guest: upload on 0, data on 1, JSON lines on 2."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.support import native

GUEST = Path(__file__).parents[2] / "guest"
MAX_LINE = 96 * 1024
NOBODY = 65534
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
"""A search for leaks at the end of a program that ends anyway takes longer than the program."""


def build(folder: Path, name: str = "files") -> Path:
    """Builds the program under sanitizers, and puts it into a folder. `files-named` is it on a file system that has no files without a name."""
    return Path(shutil.copy(native.built("guest", f"test/{name}") / "test" / name, folder / name))


@dataclass
class Said:
    """What one run said, and how it went."""

    data: bytes
    head: dict[str, Any] | None
    ok: dict[str, Any] | None
    error: dict[str, Any] | None

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines()]

    @property
    def entry(self) -> dict[str, Any]:
        assert self.ok is not None, self.error
        return dict(self.ok["entry"])

    @property
    def code(self) -> str | None:
        return None if self.error is None else str(self.error["code"])


def parse(data: bytes, said: bytes, code: int) -> Said:
    """Checks the lines against docs/protocols/guest-files.md."""
    lines = said.splitlines(keepends=True)
    for line in (*lines, *(data.splitlines(keepends=True) if data.startswith(b'{"path') else ())):
        assert line.endswith(b"\n"), said[-2000:]
        assert len(line) <= MAX_LINE
    objects = [json.loads(line) for line in lines]
    head = objects.pop(0)["head"] if objects and "head" in objects[0] else None
    assert len(objects) == 1, said[-4000:].decode(errors="replace")
    last = objects[0]
    if "ok" in last:
        assert code == 0
        assert list(last) == ["ok"]
        return Said(data, head, last["ok"], None)
    assert code == 1
    assert isinstance(last["errno"], int)
    assert last["message"]
    assert os.strerror(last["errno"])
    return Said(data, head, None, last)


@dataclass
class Files:
    """The program, in a working folder and as a user."""

    binary: Path
    home: Path
    uid: int | None = None
    wrapper: list[str] = field(default_factory=list)

    def start(
        self, op: str, *arguments: str | bytes, stdin: int | BinaryIO = subprocess.DEVNULL, **named: Any
    ) -> "Run":
        argv: list[str | bytes] = [*self.wrapper, str(self.binary), op]
        argv += [*arguments, *(os.fsencode(f"{key}=") + _octets(value) for key, value in named.items())]
        who = {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}
        process = subprocess.Popen(
            argv, cwd=self.home, env=ENVIRONMENT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **who
        )
        return Run(process)

    def run(self, op: str, *arguments: str | bytes, upload: bytes | None = None, **named: Any) -> Said:
        run = self.start(op, *arguments, stdin=subprocess.DEVNULL if upload is None else subprocess.PIPE, **named)
        try:
            data, said = run.process.communicate(upload, timeout=120)
        finally:
            run.kill()
        return parse(data, said, run.process.returncode)

    def ok(self, op: str, *arguments: str | bytes, upload: bytes | None = None, **named: Any) -> dict[str, Any]:
        said = self.run(op, *arguments, upload=upload, **named)
        assert said.ok is not None, said.error
        return said.ok

    def fails(self, op: str, *arguments: str | bytes, upload: bytes | None = None, **named: Any) -> str:
        """The code of the error that it must be."""
        said = self.run(op, *arguments, upload=upload, **named)
        assert said.error is not None, said.ok
        return str(said.error["code"])

    def pages(self, **named: Any) -> Iterator[list[dict[str, Any]]]:
        """A listing, page by page."""
        after: dict[str, Any] = {}
        while True:
            said = self.run("list", **named, **after)
            assert said.ok is not None, said.error
            assert said.ok["entries"] == len(said.lines)
            yield said.lines
            if "next" not in said.ok:
                return
            base64 = said.ok.get("next_base64")
            after = {"after": said.ok["next"]} if base64 is None else {"after_base64": base64}


def _octets(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    return (
        os.fsencode(value)
        if isinstance(value, str | Path)
        else str(int(value) if isinstance(value, bool) else value).encode()
    )


@dataclass
class Run:
    """One run that is going on."""

    process: "subprocess.Popen[bytes]"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def event(self) -> dict[str, Any]:
        """The next line on 1."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line.endswith(b"\n"), self.process.stderr.read() if self.process.stderr else b""
        return dict(json.loads(line))

    def head(self) -> dict[str, Any]:
        assert self.process.stderr
        return dict(json.loads(self.process.stderr.readline())["head"])

    def last(self) -> dict[str, Any]:
        """What it says at its end."""
        assert self.process.stderr
        said = dict(json.loads(self.process.stderr.readline()))
        self.process.wait(timeout=60)
        return said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes users")


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """The program, where another user may run it."""
    folder = Path(tempfile.mkdtemp(prefix="hw-files-"))
    try:
        folder.chmod(0o755)
        yield build(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program without sanitizers, whose own memory hides its."""
    binary = tmp_path_factory.mktemp("plain") / "files"
    beside = ("tests/files_main.c", "tests/no_root.c", "user.c")
    sources = [*(GUEST / name for name in beside), *(GUEST / "files").glob("*.c")]
    subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-o", binary, *sources], check=True, timeout=300)
    return binary


def peak(binary: Path, folder: Path, *argv: str, stdin: Path | None = None, stdout: Path | None = None) -> int:
    """KiB of memory that a run had at most. Its ends are pipes, as they are in a guest."""
    with tempfile.NamedTemporaryFile() as said:
        script = 'cat "$1" | (shift 2; "$@") | cat >"$2"'
        subprocess.run(
            ["sh", "-c", script, "sh", stdin or "/dev/null", stdout or "/dev/null", binary, *argv],
            cwd=folder,
            env=os.environ | {"FILES_PEAK": said.name},
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )
        peaks = re.findall(r"^VmHWM:\s+(\d+) kB", Path(said.name).read_text(), re.M)
    return int(peaks[0])


@pytest.fixture
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hw-home-"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, for tests that make very many entries; where there is none such, on the disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="hw-home-", dir=memory))
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", folder], check=True)  # deeper than Python can go


@pytest.fixture
def files(built: Path, home: Path) -> Files:
    return Files(built, home)


@pytest.fixture
def nobody(built: Path, home: Path) -> Files:
    """The program as another user, in a folder of that user's own."""
    own = home / "nobody"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    return Files(built, own, NOBODY)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what must come."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to pass within a minute")
