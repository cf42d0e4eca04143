"""A role reaches its files below a closed folder after it dropped its privileges, and nothing else there."""

import os
from pathlib import Path

import pytest

from hatchway.supervisor.view import closed_ancestor, open_to_role

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to drop")

UNPRIVILEGED = 1_899_999_990


def in_role(paths: list[Path], check: str) -> str:
    """Runs `check` in a forked child with another uid; returns what it evaluated to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_to_role(paths)
            os.setgroups([])
            os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
            result = repr(eval(check))
        except BaseException as error:
            result = f"raised {error!r}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    (folder / "a" / "own").mkdir(parents=True)
    (folder / "a" / "own" / "file").write_text("mine")
    (folder / "a" / "secret").write_text("not yours")
    folder.chmod(0o700)
    return folder


def test_what_is_named_can_be_read_and_nothing_beside_it(closed: Path) -> None:
    own = closed / "a" / "own"
    assert closed_ancestor(own) is not None
    assert in_role([own], f"open({str(own / 'file')!r}).read()") == "'mine'"
    assert in_role([own], f"os.listdir({str(closed / 'a')!r})") == "['own']"
    assert "raised" in in_role([own], f"open({str(closed / 'a' / 'secret')!r}).read()")


def test_without_it_the_folder_stays_closed(closed: Path) -> None:
    assert "PermissionError" in in_role([], f"open({str(closed / 'a' / 'own' / 'file')!r}).read()")


def test_a_path_inside_another_one_is_there_once(closed: Path) -> None:
    own = closed / "a" / "own"
    (own / "deep").mkdir()
    assert in_role([own, own / "deep"], f"sorted(os.listdir({str(own)!r}))") == "['deep', 'file']"


def test_our_own_namespace_is_untouched(closed: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    in_role([closed / "a" / "own"], "1")
    assert Path("/proc/self/mountinfo").read_text() == before
