import pytest

from hatchway.launcher.errors import Unfit
from hatchway.launcher.options import parse

NEEDED = ["--run-dir", "/r", "--shim", "/s"]


def test_defaults() -> None:
    options = parse(NEEDED)
    assert (options.run_dir, options.shim, options.peer_uids) == ("/r", "/s", ())
    assert (options.uid_base, options.slots, options.stock, options.listen_fd) == (1_900_000_000, 1024, 8, None)


def test_all() -> None:
    words = [
        *NEEDED,
        "--peer-uid",
        "7",
        "--peer-uid",
        "8",
        "--uid-base",
        "500000",
        "--slots",
        "3",
        "--stock",
        "0",
        "--listen-fd",
        "9",
    ]
    options = parse(words)
    assert options.peer_uids == (7, 8)
    assert (options.uid_base, options.slots, options.stock, options.listen_fd) == (500_000, 3, 0, 9)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--run-dir", "/r"],
        [*NEEDED, "--what", "1"],
        [*NEEDED, "--slots"],
        [*NEEDED, "--slots", "0"],
        [*NEEDED, "--slots", "70000"],
        [*NEEDED, "--stock", "-1"],
        [*NEEDED, "--stock", "x"],
        [*NEEDED, "--stock", "\u0663"],
        [*NEEDED, "--peer-uid", "4294967295"],
        [*NEEDED, "--uid-base", "0"],
        [*NEEDED, "--uid-base", "4294967290"],
        [*NEEDED, "--listen-fd", "2"],
    ],
)
def test_refuses(words: list[str]) -> None:
    with pytest.raises(Unfit):
        parse(words)
