"""`hatchway cp`, `shell`, `forward`, `open` and the SDK's files against a real sandbox, as a person uses them."""

import filecmp
import hashlib
import http.client
import json
import os
import random
import re
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import HATCHWAY, WITHIN_S, Service
from tests.support.pseudo_terminal import Person

from hatchway.client import Forbidden, Hatchway, Limits, Sandbox

pytestmark = pytest.mark.vm

LARGE = 100 * 2**20
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f'you asked for {self.path}'.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print('serving', flush=True)
http.server.ThreadingHTTPServer(('127.0.0.1', 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def hatchway(service: Service) -> Iterator[Hatchway]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(hatchway: Hatchway) -> Iterator[Sandbox]:
    """The one sandbox of this module, with a web server in it."""
    with hatchway.sandboxes.create() as sandbox, sandbox.start(["python3", "-u", "-c", SERVER]) as server:
        server.attach()
        assert next(iter(server.output())).startswith(b"serving")
        yield sandbox


def ok(done: "subprocess.CompletedProcess[bytes]") -> bytes:
    assert done.returncode == 0, done.stderr.decode()
    return bytes(done.stdout)


def make_tree(top: Path) -> None:
    """Files that others lose: odd names, empty ones, modes, links, and a large one."""
    names = ["a b", "-rf", "new\nline", "é" * 100, "'\"$(x)`", "~", os.fsdecode(b"no utf-8 \xff"), ".hidden", "x:y"]
    (top / "deep" / "er" / "empty").mkdir(parents=True)
    for n, name in enumerate(names):
        (top / name).write_bytes(random.Random(n).randbytes(n * 1000))
        (top / "deep" / name).write_bytes(b"")
    (top / "deep" / "er" / ("n" * 200)).mkdir()
    (top / "deep" / "er" / ("n" * 200) / ("m" * 200)).write_text("far down")
    (top / "run").write_text("#!/bin/sh\n")
    (top / "run").chmod(0o755)
    (top / "to-run").symlink_to("run")
    (top / "deep" / "up").symlink_to("../run")
    block = random.Random(0).randbytes(2**20)
    with (top / "large").open("wb") as file:
        for _ in range(LARGE // len(block)):
            file.write(block)


def assert_same(one: Path, other: Path) -> None:
    differences = filecmp.dircmp(one, other, ignore=[], hide=[])
    assert not differences.left_only + differences.right_only + differences.funny_files
    for name in differences.common_files:
        mine, yours = (one / name).lstat(), (other / name).lstat()
        assert stat.S_IFMT(mine.st_mode) == stat.S_IFMT(yours.st_mode)
        assert filecmp.cmp(one / name, other / name, shallow=False), name
        assert (mine.st_mode & 0o111) == (yours.st_mode & 0o111)
    for name in differences.common_dirs:
        assert_same(one / name, other / name)


def test_a_tree_goes_there_and_comes_back(service: Service, sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_tree(source)
    ok(service.run("cp", "-r", str(source), f"{sandbox.id}:tree"))
    digest = sandbox.run("sha256sum < tree/large").stdout.split()[0]
    assert digest == hashlib.sha256((source / "large").read_bytes()).hexdigest()
    assert sandbox.run("readlink tree/deep/up; test -x tree/run && id -un").stdout == "../run\nuser\n"
    ok(service.run("cp", "-r", f"{sandbox.id}:tree", str(tmp_path / "back")))
    assert_same(source, tmp_path / "back")
    # Into a folder that is there, as cp does it; and what is there already is replaced.
    (tmp_path / "there").mkdir()
    sandbox.files.remove("tree/large")
    for _ in range(2):
        ok(service.run("cp", "-r", f"{sandbox.id}:tree/deep", f"{sandbox.id}:tree/run", str(tmp_path / "there")))
    (source / "deep" / "up").unlink()  # of this folder alone, it leads out
    assert_same(source / "deep", tmp_path / "there" / "deep")
    ok(service.run("cp", "-r", f"{sandbox.id}:tree/deep", f"{sandbox.id}:copy"))
    assert sandbox.run("diff -r --no-dereference tree/deep copy").stdout == ""
    assert sandbox.files.remove("tree", recursive=True) > 20


def test_single_files_and_pipes(service: Service, sandbox: Sandbox, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(300_000)
    ok(service.run("cp", "-", f"{sandbox.id}:piped", input=data))
    assert ok(service.run("cp", f"{sandbox.id}:piped", "-")) == data
    told = json.loads(ok(service.run("cp", "--json", f"{sandbox.id}:piped", str(tmp_path / "file"))))
    assert (told["files"], told["bytes"], (tmp_path / "file").read_bytes()) == (1, len(data), data)
    assert b"MHz" in ok(service.run("cp", f"{sandbox.id}:/proc/cpuinfo", "-"))
    ok(service.run("cp", "--user", "root", str(tmp_path / "file"), f"{sandbox.id}:/root/"))
    assert sandbox.run("stat -c %U /root/file", user="root").stdout == "root\n"
    archive = ok(service.run("cp", "-r", f"{sandbox.id}:/etc/apt", "-"))
    listed = subprocess.run(["tar", "t"], input=archive, capture_output=True, check=True).stdout
    assert b"sources.list" in listed
    bad = (
        ([f"{sandbox.id}:/root/file", str(tmp_path / "no")], b"file_permission_denied"),
        ([f"{sandbox.id}:nothing", str(tmp_path / "no")], b"file_not_found"),
        ([f"{sandbox.id}:/etc", str(tmp_path / "no")], b"is_folder"),
        ([str(tmp_path / "file"), f"{sandbox.id}:/etc/no"], b"file_permission_denied"),
        ([f"{'z' * 20}:x", str(tmp_path / "no")], b"unknown_sandbox"),
        (["--max-bytes", "10", f"{sandbox.id}:piped", str(tmp_path / "no")], b"download_too_large"),
    )
    for words, code in bad:
        done = service.run("cp", *words)
        assert (done.returncode, code in done.stderr) == (1, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_copy_that_is_ended_leaves_nothing(service: Service, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run("head -c 300M /dev/zero > zeros").check()
    copying = service.start(*HATCHWAY, "cp", f"{sandbox.id}:zeros", str(tmp_path / "zeros"))
    while not any(path.stat().st_size for path in tmp_path.glob(".hatchway-*")):
        assert copying.poll() is None, copying.communicate()
        select.select([], [], [], 0.01)
    copying.terminate()
    copying.communicate(timeout=WITHIN_S)
    assert copying.returncode == 128 + 15
    assert list(tmp_path.iterdir()) == []
    sandbox.files.remove("zeros")


def test_a_hostile_archive_of_a_real_sandbox(service: Service, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.run(
        "mkdir hostile && cd hostile && ln -s /etc/passwd out && ln -s ../.. up && mkfifo f && echo x > x && chmod 6755 x"
    )
    done = service.run("cp", "-r", f"{sandbox.id}:hostile", str(tmp_path / "got"))
    ok(done)
    assert b"left out: 2" in done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == ["x"]
    assert (tmp_path / "got" / "x").stat().st_mode & 0o7000 == 0


def test_the_sdk_in_a_few_lines(sandbox: Sandbox) -> None:
    files = sandbox.files
    assert files.write("notes/a.txt", "first", parents=True, mode=0o600).mode == 0o600
    assert files.read_text("notes/a.txt") == "first"
    assert files.read("notes/a.txt", offset=1, length=3) == b"irs"
    watch = files.watch("notes")
    assert next(watch).event == "ready"
    files.move("notes/a.txt", "notes/b.txt")
    assert (next(watch).from_ or "").endswith("notes/a.txt")
    assert [entry.name for entry in files.list("notes")] == ["b.txt"]
    assert not files.exists("notes/a.txt")
    with pytest.raises(Forbidden):
        files.read("/etc/shadow")
    files.remove("notes", recursive=True)
    assert "root" in files.read_text("/etc/shadow", user="root")


def shell(service: Service, sandbox: Sandbox, *words: str, **size: int) -> Person:
    return Person([*HATCHWAY, "shell", sandbox.id, *words], service.environ, within_s=WITHIN_S, **size)


def test_a_shell(service: Service, sandbox: Sandbox) -> None:
    with shell(service, sandbox, rows=30, cols=90) as person:
        person.until(b"$ ")
        assert person.settings_now() != person.settings
        person.press(b"stty size; id -un; echo $TERM\r")
        person.until(b"30 90\r\nuser\r\nxterm\r\n")
        person.resize(40, 100)
        person.press(b"until stty size | grep '40 100'; do :; done\r")
        person.until(b"\r40 100\r\n")
        person.press(b"sleep 1000; echo status $?\r")
        person.until(b"$?\r\n")
        person.press(b"\x03")
        person.until(b"^C")
        person.until(b"$ ")  # what is typed between the interrupt and the prompt, the shell throws away
        person.press(b"exit 7\r")
        assert person.ended() == 7
        assert person.settings_now() == person.settings


def test_a_shell_that_is_left_and_come_back_to(service: Service, sandbox: Sandbox) -> None:
    with shell(service, sandbox) as person:
        person.until(b"$ ")
        person.press(b"answer=42\r")
        person.until(b"$ ")
        person.press(b"~.")
        assert person.ended() == 0
        found = re.search(rb"--attach (\w+)", person.shown)
        assert found is not None
        assert person.settings_now() == person.settings
    with shell(service, sandbox, "--attach", found[1].decode()) as person:
        person.until(b"answer=42")
        person.press(b"echo it is $answer; exit\r")
        person.until(b"it is 42")
        assert person.ended() == 0
    for sent, status in ((15, 143), (1, 129)):
        with shell(service, sandbox) as person:
            person.until(b"$ ")
            person.program.send_signal(sent)
            assert person.ended() == status
            assert person.settings_now() == person.settings


def test_a_command_in_a_shell(service: Service, sandbox: Sandbox) -> None:
    with shell(
        service, sandbox, "--user", "root", "-w", "/tmp", "--", "sh", "-c", "id -un; pwd; tty; exit 3"
    ) as person:
        assert person.ended() == 3
        assert b"root\r\n/tmp\r\n/dev/pts/" in person.shown
    with shell(service, sandbox, "--", "no-such-command") as person:
        assert person.ended() == 127
        assert b"could not be started" in person.shown
    done = service.run("shell", sandbox.id, "--", "sh", "-c", "read line; echo got $line", input=b"piped\n")
    assert b"got piped" in ok(done)
    # A login shell sets its terminal up while the end of the input is already there.
    assert b"42" in ok(service.run("shell", sandbox.id, input=b"echo $((6 * 7))\n"))


def test_ports_forwarded_and_linked(service: Service, sandbox: Sandbox) -> None:
    forwarding = service.start(sys.executable, "-u", *HATCHWAY[1:], "forward", sandbox.id, "0:8000", "0:8001")
    try:
        assert forwarding.stdout is not None
        here = [int(re.findall(rb":(\d+) ->", forwarding.stdout.readline())[0]) for _ in range(2)]
        for path in ("/a", "/b"):
            connection = http.client.HTTPConnection("127.0.0.1", here[0], timeout=WITHIN_S)
            connection.request("GET", path)
            assert connection.getresponse().read() == f"you asked for {path}".encode()
            connection.close()
        with (
            socket.create_connection(("127.0.0.1", here[1]), timeout=WITHIN_S) as closed,
            pytest.raises(OSError, match="reset"),
        ):
            closed.recv(1)
    finally:
        forwarding.send_signal(2)
        _, said = forwarding.communicate(timeout=WITHIN_S)
    assert forwarding.returncode == 130
    assert b"port_closed" in said

    link = urlsplit(ok(service.run("open", sandbox.id, "8000", "--path", "/page?x=1", "--ttl", "600")).decode().strip())
    assert link.hostname is not None
    # A browser looks for names below localhost on this machine.
    browser = http.client.HTTPConnection("127.0.0.1", link.port, timeout=WITHIN_S)
    name = {"Host": link.netloc}
    browser.request("GET", f"{link.path}?{link.query}", headers=name)
    led = browser.getresponse()
    led.read()
    assert (led.status, led.headers["location"]) == (303, "/page?x=1")
    cookie = led.headers["set-cookie"].split(";")[0]
    browser.request("GET", "/page?x=1", headers={**name, "Cookie": cookie})
    assert browser.getresponse().read() == b"you asked for /page?x=1"
    browser.request("GET", "/page", headers=name)
    assert browser.getresponse().status == 401
    browser.close()
    assert sandbox.port_url(8000).startswith("http://8000-")


def test_limits_of_a_command(service: Service, sandbox: Sandbox) -> None:
    done = service.run(
        "exec",
        "--open-files",
        "20",
        "--file-size",
        "1",
        sandbox.id,
        "--",
        "sh",
        "-c",
        "ulimit -n; head -c 2M /dev/zero > big",
    )
    assert (done.stdout, done.returncode != 0) == (b"20\n", True)
    done = service.run("exec", "--cpu-time", "1", sandbox.id, "--", "sh", "-c", "while :; do :; done")
    assert (done.returncode, b"timeout" in done.stderr) == (124, True)
    assert sandbox.run("head -c 100M /dev/zero | tail", limits=Limits(memory_mib=32)).reason in (
        "oom",
        "exited",
        "signaled",
    )


def test_a_sandbox_that_is_paused(service: Service, sandbox: Sandbox) -> None:
    """The last one: it changes the sandbox."""
    sandbox.pause()
    done = service.run("cp", f"{sandbox.id}:x", "-")
    assert (done.returncode, b"sandbox_not_running" in done.stderr) == (1, True)
    sandbox.resume()
    sandbox.files.write("x", "x")
    assert sandbox.files.read("x") == b"x"
