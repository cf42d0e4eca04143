"""Commands and files of E2B's sandboxes over the wire, in a real virtual machine; what SDKs make of it is tested with them."""

import base64
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.acceptance.conftest import Service
from tests.support.e2b_agent import Agent, Cloud, deadline, frame, in_thread, key_of, started

from hatchway.e2b import signatures

Stat, ListDir, MakeDir, Move, Remove = (
    f"filesystem.Filesystem/{name}" for name in ("Stat", "ListDir", "MakeDir", "Move", "Remove")
)
Create, Events, RemoveWatcher = (
    f"filesystem.Filesystem/{name}" for name in ("CreateWatcher", "GetWatcherEvents", "RemoveWatcher")
)
List, Connect, SendInput, CloseStdin, SendSignal, Update = (
    f"process.Process/{name}" for name in ("List", "Connect", "SendInput", "CloseStdin", "SendSignal", "Update")
)


@pytest.fixture(scope="module")
def cloud(service: Service) -> Cloud:
    service.bake()
    endpoint = json.loads((service.data_dir / "endpoint.json").read_text())
    with service.client() as client:
        return Cloud(endpoint["e2b"], key_of(client))


@pytest.fixture(scope="module")
def agent(cloud: Cloud) -> Iterator[Agent]:
    made = cloud.create(envVars={"GIVEN": "at creation"})
    try:
        yield made
    finally:
        cloud.kill(made)


@pytest.fixture
def folder(agent: Agent) -> str:
    """A folder of a test's own."""
    path = f"/home/user/{time.time_ns()}"
    agent.ok(MakeDir, {"path": path})
    return path


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def upload(agent: Agent, path: str, octets: bytes, **headers: str) -> httpx.Response:
    return agent.http.post("/files", params={"path": path}, files={"file": ("name", octets)}, headers=headers)


def read(agent: Agent, path: str, **headers: str) -> httpx.Response:
    return agent.http.get("/files", params={"path": path}, headers=headers)


def until(condition: Any, what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError(what)


# -- commands


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("true", {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        ("exit 7", {"exitCode": 7, "exited": True, "status": "exit status 7", "error": "exit status 7"}),
        ("kill -9 $$", {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
    ],
)
def test_how_a_command_ends(agent: Agent, command: str, end: dict[str, Any]) -> None:
    done = agent.run(command)
    assert list(done.events[0]) == ["start"]
    assert done.end == end


def test_output_pid_environment_user_and_working_folder(agent: Agent) -> None:
    script = 'echo "$$ $GIVEN $OWN $USER $HOME $LOGNAME"; pwd; echo err >&2'
    done = agent.run(script, envs={"OWN": "its own"})
    assert done.output() == f"{done.pid} at creation its own user /home/user user\n/home/user\n"
    assert done.output("stderr") == "err\n"
    told = f"true {agent.sandbox_id} base\n"
    assert agent.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID", envs={"A": "1"}).output() == told
    assert agent.run("echo $E2B_SANDBOX_ID", envs={"E2B_SANDBOX_ID": "its own"}).output() == "its own\n"
    assert agent.run("id -un; pwd", user="root").output() == "root\n/root\n"
    assert agent.run("pwd", cwd="/tmp").output() == "/tmp\n"
    assert agent.run("pwd", cwd="~").output() == "/home/user\n"
    assert agent.run("pwd; mkdir -p below", cwd="").output() == "/home/user\n"
    assert agent.run("pwd", cwd="below").output() == "/home/user/below\n"


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        ({"cwd": "/no/such"}, "invalid_argument", "cwd '/no/such' does not exist"),
        ({"cwd": "no-such"}, "invalid_argument", "cwd 'no-such' does not exist"),
        ({"user": "no-such"}, "unauthenticated", "invalid username: 'no-such'"),
        ({"user": "No Such"}, "unauthenticated", "invalid username: 'No Such'"),
        ({"tag": "x" * 1000}, "invalid_argument", "tag is longer than 512 characters"),
    ],
)
def test_what_cannot_be_started_is_said_at_the_end_of_the_stream(
    agent: Agent, more: dict[str, Any], code: str, text: str
) -> None:
    done = agent.run("true", **more)
    assert done.events == []
    assert done.error == {"code": code, "message": text}


def test_a_deadline_kills_the_leader_alone(agent: Agent, folder: str) -> None:
    done = agent.run(f"sh -c 'sleep 100 & echo $! >{folder}/child; wait' & sleep 100", timeout_ms=3000)
    assert done.error is not None
    assert done.error["code"] == "deadline_exceeded"
    child = f"$(cat {folder}/child)"
    until(lambda: agent.run(f"! kill -0 {done.pid}", user="root").end["exitCode"] == 0, "the leader ends")
    assert agent.run(f"kill -0 {child} && kill {child}").end["exitCode"] == 0


def test_the_end_waits_for_who_holds_the_output(agent: Agent) -> None:
    done = agent.run("(sleep 1; echo late) & echo now")
    assert done.output() == "now\nlate\n"
    assert done.end["exitCode"] == 0


def test_a_client_that_leaves_ends_nothing_and_others_see_what_follows(agent: Agent, folder: str) -> None:
    with agent.start(f"echo first; until [ -e {folder}/go ]; do sleep 0.1; done; echo second", tag="left") as stream:
        pid = stream.next()["event"]["start"]["pid"]
        stream.next()
    listed = [one for one in agent.ok(List, {})["processes"] if one["pid"] == pid]
    assert listed[0]["tag"] == "left"
    assert (listed[0]["config"]["cmd"], listed[0]["config"]["envs"]) == ("/bin/bash", {})
    with (
        agent.stream(Connect, {"process": {"pid": pid}}) as one,
        agent.stream(Connect, {"process": {"tag": "left"}}) as other,
        agent.stream(Connect, {"process": {"pid": pid}}) as stalled,
    ):
        for stream in (one, other, stalled):
            assert stream.next() == {"event": {"start": {"pid": pid}}}
        upload(agent, f"{folder}/go", b"")
        for stream in (one, other):
            events = [message["event"] for message in stream.rest()]
            assert b"".join(base64.b64decode(event["data"]["stdout"]) for event in events[:-1]) == b"second\n"
            assert events[-1]["end"]["exitCode"] == 0
    # For a while it is still known how it ended.
    with agent.stream(Connect, {"process": {"pid": pid}}) as late:
        assert [next(iter(message["event"])) for message in late.rest()] == ["start", "end"]
    assert all(one["pid"] != pid for one in agent.ok(List, {})["processes"])
    assert agent.code(SendSignal, {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}) == (404, "not_found")


def test_a_stalled_reader_holds_up_nobody(agent: Agent) -> None:
    with agent.start("yes | head -c 12000000; echo done >&2") as stalled:
        pid = stalled.next()["event"]["start"]["pid"]
        with agent.stream(Connect, {"process": {"pid": pid}}) as reader:
            assert reader.rest()[-1]["event"]["end"]["exitCode"] == 0
        size = sum(len(base64.b64decode(message["event"].get("data", {}).get("stdout", ""))) for message in stalled)
        assert size == 12_000_000


def test_input_until_its_end(agent: Agent) -> None:
    with agent.start("cat; echo over", stdin=True) as stream:
        process = {"process": {"pid": stream.next()["event"]["start"]["pid"]}}
        for octets in (b"one\n", b"two\xff\n"):
            assert agent.ok(SendInput, {**process, "input": {"stdin": b64(octets)}}) == {}
        with agent.stream(
            "process.Process/StreamInput",
            {"start": process},
            {"data": {"input": {"stdin": b64("three\n")}}},
            {"keepalive": {}},
            {"data": {"input": {"stdin": b64("four\n")}}},
        ) as sent:
            assert sent.rest() == [{}]
            assert sent.end == {}
        assert agent.code(SendInput, {**process, "input": {"pty": b64("x")}}) == (500, "internal")
        assert agent.ok(CloseStdin, process) == {}
        assert agent.ok(CloseStdin, process) == {}
        events = [message["event"] for message in stream.rest()]
    text = b"".join(base64.b64decode(event["data"]["stdout"]) for event in events[:-1])
    assert text == b"one\ntwo\xff\nthree\nfour\nover\n"


def test_without_stdin_the_input_is_at_its_end_and_takes_nothing(agent: Agent) -> None:
    assert agent.run("cat; echo over").output() == "over\n"
    with agent.start("sleep 100") as stream:
        process = {"process": {"pid": stream.next()["event"]["start"]["pid"]}}
        assert agent.code(SendInput, {**process, "input": {"stdin": b64("x")}}) == (500, "internal")
        assert agent.ok(SendSignal, {**process, "signal": "SIGNAL_SIGTERM"}) == {}
        assert stream.rest()[-1]["event"]["end"]["status"] == "signal: terminated"


def test_stdin_is_open_unless_it_is_said_and_takes_nothing_once_it_is_closed(agent: Agent) -> None:
    wanted = started("cat; sleep 100")
    del wanted["stdin"]
    with agent.stream("process.Process/Start", wanted) as stream:
        process = {"process": {"pid": stream.next()["event"]["start"]["pid"]}}
        agent.ok(SendInput, {**process, "input": {"stdin": b64("x")}})
        assert base64.b64decode(stream.next()["event"]["data"]["stdout"]) == b"x"
        agent.ok(CloseStdin, process)
        assert agent.code(SendInput, {**process, "input": {"stdin": b64("x")}}) == (500, "internal")
        agent.ok(SendSignal, {**process, "signal": "SIGNAL_SIGKILL"})


def test_a_terminal(agent: Agent) -> None:
    message = {
        "process": {"cmd": "/bin/bash", "args": ["-i", "-l"], "envs": {"TERM": "xterm", "PS1": "> "}},
        "pty": {"size": {"cols": 91, "rows": 31}},
    }
    with agent.stream("process.Process/Start", message) as stream:
        process = {"process": {"pid": stream.next()["event"]["start"]["pid"]}}
        agent.ok(SendInput, {**process, "input": {"pty": b64("stty size; tty\n")}})
        seen = ""
        while "31 91" not in seen or "/dev/pts" not in seen:
            seen += base64.b64decode(stream.next()["event"]["data"]["pty"]).decode(errors="replace")
        agent.ok(Update, {**process, "pty": {"size": {"cols": 100, "rows": 40}}})
        assert agent.code(SendInput, {**process, "input": {"stdin": b64("x")}}) == (500, "internal")
        assert agent.code(CloseStdin, process) == (500, "internal")
        agent.ok(SendInput, {**process, "input": {"pty": b64("stty size; exit 5\n")}})
        events = [message["event"] for message in stream.rest()]
    seen = b"".join(base64.b64decode(event["data"]["pty"]) for event in events[:-1]).decode(errors="replace")
    assert "40 100" in seen
    assert events[-1]["end"]["exitCode"] == 5


def test_a_signal_reaches_the_leader_alone(agent: Agent, folder: str) -> None:
    with agent.start(f"sleep 100 & echo $! >{folder}/child; wait") as stream:
        pid = stream.next()["event"]["start"]["pid"]
        until(lambda: read(agent, f"{folder}/child").content.endswith(b"\n"), "the child runs")
        agent.ok(SendSignal, {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
        # Although the child holds its output.
        assert stream.rest()[-1]["event"]["end"]["status"] == "signal: killed"
    assert agent.run(f"kill $(cat {folder}/child)").end["exitCode"] == 0


def test_who_is_not_there(agent: Agent) -> None:
    gone = {"process": {"pid": 999_999}}
    for method, more in (
        (SendInput, {"input": {"stdin": ""}}),
        (CloseStdin, {}),
        (SendSignal, {"signal": "SIGNAL_SIGKILL"}),
        (Update, {}),
    ):
        assert agent.code(method, {**gone, **more}) == (404, "not_found")
    with agent.stream(Connect, gone) as stream:
        assert stream.rest() == []
        assert stream.end == {"error": {"code": "not_found", "message": "process with pid 999999 not found"}}


def test_a_silent_stream_says_that_it_lives(agent: Agent) -> None:
    with agent.stream("process.Process/Start", started("sleep 2"), headers={"Keepalive-Ping-Interval": "1"}) as stream:
        assert {"event": {"keepalive": {}}} in stream.rest()


def test_what_runs_is_found_after_a_restart_of_the_wrapper(service: Service, agent: Agent, folder: str) -> None:
    with agent.start(f"until [ -e {folder}/go ]; do sleep 0.1; done; exit 9", tag="survivor") as stream:
        pid = stream.next()["event"]["start"]["pid"]
        roles = service.data_dir / "run" / "roles.json"
        before = json.loads(roles.read_text())["e2b"]
        os.kill(before, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            stream.rest()

    def answers() -> bool:
        try:
            return json.loads(roles.read_text()).get("e2b") != before and agent.http.get("/health").status_code == 204
        except httpx.HTTPError:
            return False

    until(answers, "the wrapper is back")
    assert any(one["pid"] == pid and one["tag"] == "survivor" for one in agent.ok(List, {})["processes"])
    with agent.stream(Connect, {"process": {"tag": "survivor"}}) as stream:
        assert stream.next()["event"]["start"]["pid"] == pid
        upload(agent, f"{folder}/go", b"")
        assert stream.rest()[-1]["event"]["end"]["exitCode"] == 9


def test_what_sdks_and_their_users_expect_in_a_guest(agent: Agent) -> None:
    found = agent.run(
        "id -gn; test $(id -u) -ne 0 && sudo -n id -un; command -v bash curl git python python3 realpath tput | wc -l;"
        "test -x $(git --exec-path)/git-daemon && echo daemon; command -v mcp-gateway || echo none"
    )
    assert found.output() == "user\nroot\n7\ndaemon\nnone\n", found


def test_what_the_other_api_started_is_not_listed(service: Service, agent: Agent) -> None:
    with service.client() as hatchway:
        session = hatchway.sandboxes.get(agent.sandbox_id).start(["sleep", "1000"])
        try:
            pid = session.refresh().pid
            assert pid
            assert pid not in {one["pid"] for one in agent.ok(List, {})["processes"]}
            asked = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}
            assert agent.code(SendSignal, asked) == (404, "not_found")
        finally:
            session.kill()


# -- the protocol


def test_forms_of_requests_that_are_not_spoken(agent: Agent) -> None:
    assert agent.http.post(f"/{List}", content=b"", headers={"Content-Type": "application/proto"}).status_code == 415
    assert agent.http.get(f"/{List}").status_code == 405
    packed = agent.http.post(
        f"/{List}",
        content=gzip.compress(b"{}"),
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    )
    assert (packed.status_code, packed.json()["code"]) == (501, "unimplemented")
    wrong = agent.http.post(f"/{List}", content=b"{", headers={"Content-Type": "application/json"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_argument")
    with agent.stream("process.Process/Start", started("true"), started("true")) as stream:
        assert stream.rest() == []
        assert stream.end is not None
        assert stream.end["error"]["code"] == "unimplemented"
    with agent.stream("process.Process/Start", {"process": {"cmd": 1}}) as stream:
        assert stream.rest() == []
        assert stream.end is not None
        assert stream.end["error"]["code"] == "invalid_argument"


def test_a_request_may_come_in_pieces(agent: Agent) -> None:
    octets = frame(started("echo whole"))

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(octets), 7):
            yield octets[at : at + 7]

    headers = {"Content-Type": "application/connect+json", **deadline(60_000)}
    with agent.http.stream("POST", "/process.Process/Start", content=pieces(), headers=headers) as answer:
        assert b'"start"' in b"".join(answer.iter_raw())


# -- rights


def test_everything_but_health_needs_the_token(agent: Agent) -> None:
    with httpx.Client(base_url=agent.url, timeout=60, trust_env=False) as http:
        http.headers.update({"E2b-Sandbox-Id": agent.sandbox_id, "E2b-Sandbox-Port": "49983"})
        assert http.get("/health").status_code == 204
        for token in ({}, {"X-Access-Token": "wrong"}):
            for method, path in (
                ("POST", f"/{List}"),
                ("GET", "/envs"),
                ("GET", "/metrics"),
                ("POST", "/files/compose"),
                ("GET", "/files"),
                ("POST", "/init"),
            ):
                refused = http.request(method, path, headers=token)
                assert refused.status_code == 401, (method, path)
                assert refused.json()["code"] == 401
        signed = {"path": "/etc/hostname", "username": "user"}
        good = signatures.sign("/etc/hostname", "read", "user", agent.token or "", None)
        assert http.get("/files", params={**signed, "signature": good}).status_code == 200
        assert http.get("/files", params={**signed, "path": "/etc/passwd", "signature": good}).status_code == 401
        assert (
            http.get("/files", params={**signed, "signature": good}, headers={"X-Access-Token": "wrong"}).status_code
            == 401
        )
        old = signatures.sign("/etc/hostname", "read", "user", agent.token or "", 17)
        expired = http.get("/files", params={**signed, "signature": old, "signature_expiration": "17"})
        assert (expired.status_code, expired.json()) == (401, {"code": 401, "message": "signature is already expired"})
        written = signatures.sign("/tmp/signed", "write", "", agent.token or "", 2**33)
        answer = http.post(
            "/files",
            params={"path": "/tmp/signed", "signature": written, "signature_expiration": str(2**33)},
            files={"file": ("f", b"x")},
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "path", ["/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "/else"]
)
def test_what_is_the_hosts_is_not_there(agent: Agent, path: str) -> None:
    answer = agent.http.post(path, json={})
    assert (answer.status_code, answer.json()["code"]) == (404, 404)


def test_pages_from_anywhere_may_ask(agent: Agent) -> None:
    asked = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-access-token",
    }
    answer = agent.http.options(f"/{List}", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-headers"] == "x-access-token"
    answer = agent.call(List, {}, Origin="https://page.example")
    assert answer.headers["access-control-allow-origin"] == "*"


def test_environment_and_metrics(agent: Agent) -> None:
    envs = agent.http.get("/envs").json()
    assert (envs["GIVEN"], envs["E2B_SANDBOX_ID"]) == ("at creation", agent.sandbox_id)
    assert "HOME" not in envs
    found = agent.http.get("/metrics").json()
    assert set(found) == {
        "ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "disk_used", "disk_total", "mem_total_mib", "mem_used_mib",
    }  # fmt: skip
    assert 0 < found["mem_used"] < found["mem_total"]
    assert found["mem_cache"] > 0
    assert 0 <= found["cpu_used_pct"] <= 100


# -- files


def test_files_in_every_form(agent: Agent, folder: str) -> None:
    assert upload(agent, f"{folder}/a/b.txt", b"one").json() == [
        {"name": "b.txt", "path": f"{folder}/a/b.txt", "type": "file"}
    ]
    assert read(agent, f"{folder}/a/b.txt").content == b"one"
    owner = agent.run(f"stat -c '%U %a' {folder}/a {folder}/a/b.txt").output()
    assert owner == "user 755\nuser 644\n"
    several = [
        ("file", (f"{folder}/ä b.txt", b"two")),
        ("other", ("x", b"ignored")),
        ("file", ("in-home.txt", b"three")),
    ]
    told = agent.http.post("/files", files=several).json()
    assert [one["path"] for one in told] == [f"{folder}/ä b.txt", "/home/user/in-home.txt"]
    twice = agent.http.post("/files", files=[("file", ("/tmp/x", b"1")), ("file", ("/tmp/x", b"2"))])
    assert (twice.status_code, twice.json()["code"]) == (400, 400)
    octets = os.urandom(3 * 1024 * 1024)
    plain = {"Content-Type": "application/octet-stream"}
    assert agent.http.post("/files", params={"path": f"{folder}/c"}, content=octets, headers=plain).status_code == 200
    assert read(agent, f"{folder}/c").content == octets
    packed = {**plain, "Content-Encoding": "gzip"}
    pieces = iter([gzip.compress(octets)[:1000], gzip.compress(octets)[1000:]])
    assert agent.http.post("/files", params={"path": f"{folder}/d"}, content=pieces, headers=packed).status_code == 200
    assert read(agent, f"{folder}/d").content == octets
    assert agent.http.post("/files", content=b"x", headers=plain).status_code == 400
    assert upload(agent, f"{folder}/empty", b"").status_code == 200
    assert read(agent, f"{folder}/empty").content == b""


def test_a_file_is_written_in_place_for_its_new_owner(agent: Agent, folder: str) -> None:
    agent.run(f"echo root-longer >{folder}/f; ln {folder}/f {folder}/second; ln -s f {folder}/link", user="root")
    assert upload(agent, f"{folder}/link", b"new").status_code == 200
    assert agent.run(f"cat {folder}/second; stat -c ' %U' {folder}/f").output() == "new user\n"
    answer = agent.http.post("/files", params={"path": f"{folder}/g", "username": "root"}, files={"file": ("g", b"x")})
    assert answer.status_code == 200
    assert agent.ok(Stat, {"path": f"{folder}/g"})["entry"]["owner"] == "root"


def test_what_cannot_be_read_or_written(agent: Agent, folder: str) -> None:
    missing = read(agent, f"{folder}/none")
    assert (missing.status_code, missing.json()) == (
        404,
        {"code": 404, "message": f"path '{folder}/none' does not exist"},
    )
    assert read(agent, folder).status_code == 400
    assert upload(agent, folder, b"x").status_code == 400
    unknown = agent.http.get("/files", params={"path": "/etc/hostname", "username": "nobody-here"})
    assert (unknown.status_code, unknown.json()["code"]) == (401, 401)
    assert agent.http.get("/files").status_code == 400
    assert read(agent, "/etc/hostname", **{"Accept-Encoding": "identity;q=0, br"}).status_code == 406


def test_a_full_disk_is_said(agent: Agent) -> None:
    agent.run("mkdir -p /mnt/small && mount -t tmpfs -o size=1m none /mnt/small", user="root")
    answer = upload(agent, "/mnt/small/f", bytes(3 * 1024 * 1024))
    assert (answer.status_code, answer.json()["code"]) == (507, 507)


def test_ranges_and_conditions(agent: Agent, folder: str) -> None:
    upload(agent, f"{folder}/f", b"0123456789")
    path = f"{folder}/f"
    part = read(agent, path, Range="bytes=2-4")
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    assert read(agent, path, Range="bytes=-3").content == b"789"
    assert read(agent, path, Range="bytes=7-").content == b"789"
    assert read(agent, path, Range="bytes=10-").status_code == 416
    assert read(agent, path, Range="bytes=1-2,4-5").status_code == 200
    whole = read(agent, path)
    since = whole.headers["last-modified"]
    assert read(agent, path, **{"If-Modified-Since": since}).status_code == 304
    assert read(agent, path, **{"If-Unmodified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"}).status_code == 412
    assert read(agent, path, Range="bytes=0-0", **{"If-Range": since}).status_code == 206
    assert read(agent, path, Range="bytes=0-0", **{"If-Range": "Thu, 01 Jan 1970 00:00:00 GMT"}).status_code == 200
    assert whole.headers["content-disposition"] == 'inline; filename="f"'
    assert whole.headers["vary"] == "Accept-Encoding"
    packed = read(agent, path, **{"Accept-Encoding": "gzip, identity;q=0"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == b"0123456789"


def test_metadata_is_replaced_with_each_upload(agent: Agent, folder: str) -> None:
    path = f"{folder}/f"
    told = upload(agent, path, b"x", **{"X-Metadata-Author": "me", "X-Metadata-Kind": "a b"}).json()
    assert told[0]["metadata"] == {"author": "me", "kind": "a b"}
    assert agent.ok(Stat, {"path": path})["entry"]["metadata"] == {"author": "me", "kind": "a b"}
    assert (
        agent.run(f'python3 -c \'import os; print(os.getxattr("{path}", "user.e2b.author").decode())\'').output()
        == "me\n"
    )
    upload(agent, path, b"x", **{"X-Metadata-Other": "1"})
    assert agent.ok(Stat, {"path": path})["entry"]["metadata"] == {"other": "1"}
    upload(agent, path, b"x")
    assert agent.ok(ListDir, {"path": folder})["entries"][0]["metadata"] == {}
    assert upload(agent, path, b"x", **{"X-Metadata-Big": "v" * 4096}).status_code == 400


def test_files_are_put_together(agent: Agent, folder: str) -> None:
    for name in ("a", "b"):
        upload(agent, f"{folder}/{name}", name.encode() * 3)
    asked = {"source_paths": [f"{folder}/a", f"{folder}/b", f"{folder}/a"], "destination": f"{folder}/deep/ab"}
    answer = agent.http.post("/files/compose", json=asked)
    assert answer.status_code == 200, answer.text
    assert read(agent, f"{folder}/deep/ab").content == b"aaabbbaaa"
    assert [one["name"] for one in agent.ok(ListDir, {"path": folder})["entries"]] == ["deep"]
    assert agent.http.post("/files/compose", json=asked).status_code == 404


# -- what there is


def test_entries(agent: Agent, folder: str) -> None:
    upload(agent, f"{folder}/f", b"12345")
    agent.run(f"cd {folder}; chmod 640 f; mkdir d; touch d/inner; ln -s f link; ln -s d to-d; ln -s none broken")
    entry = agent.ok(Stat, {"path": f"{folder}/./d/../f"})["entry"]
    modified = entry.pop("modifiedTime")
    assert modified.endswith("Z")
    assert entry == {
        "name": "f", "type": "FILE_TYPE_FILE", "path": f"{folder}/f", "size": "5", "mode": 0o640, "permissions": "-rw-r-----",
        "owner": "user", "group": "user", "metadata": {},
    }  # fmt: skip
    link = agent.ok(Stat, {"path": f"{folder}/link"})["entry"]
    assert (link["type"], link["mode"], link["permissions"], link["symlinkTarget"]) == (
        "FILE_TYPE_FILE",
        0o640,
        "Lrwxrwxrwx",
        f"{folder}/f",
    )
    names = [one["path"].removeprefix(folder) for one in agent.ok(ListDir, {"path": folder, "depth": 2})["entries"]]
    assert names == ["/broken", "/d", "/d/inner", "/f", "/link", "/to-d"]
    assert len(agent.ok(ListDir, {"path": folder})["entries"]) == 5
    # What is asked for is followed, what is found below it is not.
    assert [one["name"] for one in agent.ok(ListDir, {"path": f"{folder}/to-d"})["entries"]] == ["inner"]
    assert agent.code(Stat, {"path": f"{folder}/none"}) == (404, "not_found")
    assert agent.code(ListDir, {"path": f"{folder}/none"}) == (404, "not_found")
    assert agent.code(ListDir, {"path": f"{folder}/f"}) == (400, "invalid_argument")
    assert agent.code(Stat, {"path": "/"}, user="nobody-here") == (401, "unauthenticated")


def test_trees_deeper_than_one_question_goes(agent: Agent, folder: str) -> None:
    deep = folder + "/d" * 70
    agent.ok(MakeDir, {"path": deep})
    upload(agent, f"{deep}/f", b"")
    upload(agent, f"{folder}/z", b"")
    found = [one["path"] for one in agent.ok(ListDir, {"path": folder, "depth": 100})["entries"]]
    assert found == [*(folder + "/d" * level for level in range(1, 71)), f"{deep}/f", f"{folder}/z"]


def test_changes(agent: Agent, folder: str) -> None:
    made = agent.ok(MakeDir, {"path": f"{folder}/a/b"})["entry"]
    assert (made["type"], made["permissions"], made["owner"]) == ("FILE_TYPE_DIRECTORY", "drwxr-xr-x", "user")
    assert agent.ok(Stat, {"path": f"{folder}/a"})["entry"]["owner"] == "user"
    assert agent.code(MakeDir, {"path": f"{folder}/a/b"}) == (409, "already_exists")
    upload(agent, f"{folder}/f", b"x")
    assert agent.code(MakeDir, {"path": f"{folder}/f"}) == (400, "invalid_argument")
    moved = agent.ok(Move, {"source": f"{folder}/f", "destination": f"{folder}/new/g"})["entry"]
    assert (moved["path"], moved["name"]) == (f"{folder}/new/g", "g")
    assert agent.code(Move, {"source": f"{folder}/f", "destination": f"{folder}/h"}) == (404, "not_found")
    assert agent.ok(Remove, {"path": folder}) == {}
    assert agent.ok(Remove, {"path": folder}) == {}
    assert agent.code(Stat, {"path": folder}) == (404, "not_found")


def test_a_watcher_has_told_what_happened_when_it_is_asked(agent: Agent, folder: str) -> None:
    watcher = agent.ok(Create, {"path": folder, "recursive": True, "includeEntry": True})

    def events() -> list[tuple[str, str]]:
        told = agent.ok(Events, watcher)["events"]
        return [(event["type"].removeprefix("EVENT_TYPE_"), event["name"]) for event in told]

    for round_ in range(5):
        upload(agent, f"{folder}/f{round_}", b"hello")
        assert events() == [(kind, f"f{round_}") for kind in ("CREATE", "CHMOD", "WRITE")]
    agent.ok(MakeDir, {"path": f"{folder}/sub"})
    upload(agent, f"{folder}/sub/f", b"hello")
    assert ("CREATE", "sub/f") in events(), "also where the file was there before the folder was watched"
    agent.ok(Move, {"source": f"{folder}/f0", "destination": f"{folder}/g"})
    assert events() == [("RENAME", "f0"), ("CREATE", "g")]
    agent.ok(Remove, {"path": f"{folder}/g"})
    assert events() == [("REMOVE", "g")]
    upload(agent, f"{folder}/f1", b"other")
    entry = agent.ok(Events, watcher)["events"][-1]["entry"]
    assert (entry["path"], entry["size"]) == (f"{folder}/f1", "5")
    assert events() == []
    assert agent.ok(RemoveWatcher, watcher) == {}
    assert agent.code(Events, watcher) == (404, "not_found")
    assert agent.code(Create, {"path": f"{folder}/f1"}) == (400, "invalid_argument")
    assert agent.code(Create, {"path": f"{folder}/none"}) == (404, "not_found")


def test_a_stream_of_changes(agent: Agent, folder: str) -> None:
    headers = {"Keepalive-Ping-Interval": "1"}
    with agent.stream("filesystem.Filesystem/WatchDir", {"path": folder}, headers=headers) as stream:
        assert stream.next() == {"start": {}}
        assert stream.next() == {"keepalive": {}}
        upload(agent, f"{folder}/f", b"hello")
        told: list[str] = []
        while len(told) < 3:
            event = stream.next().get("filesystem")
            if event is not None:
                assert event["name"] == "f"
                told.append(event["type"])
        assert told == [f"EVENT_TYPE_{kind}" for kind in ("CREATE", "CHMOD", "WRITE")]
    with agent.stream("filesystem.Filesystem/WatchDir", {"path": f"{folder}/f"}) as stream:
        assert stream.rest() == []
        assert stream.end is not None
        assert stream.end["error"]["code"] == "invalid_argument"


# -- the end of a sandbox


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_streams_of_a_sandbox_that_ends_end_and_health_says_why(cloud: Cloud, how: str) -> None:
    agent = cloud.create()
    cut: list[object] = []
    begun = [threading.Event(), threading.Event()]

    def follow(number: int, method: str, message: object) -> None:
        try:
            with agent.stream(method, message) as stream:
                stream.next()
                begun[number].set()
                cut.append((stream.rest(), stream.end))
        except httpx.HTTPError as error:
            cut.append(error)

    try:
        threads = [
            in_thread(lambda: follow(0, "process.Process/Start", started("sleep 1000"))),
            in_thread(lambda: follow(1, "filesystem.Filesystem/WatchDir", {"path": "/tmp"})),
        ]
        assert all(event.wait(120) for event in begun)
        if how == "kill":
            cloud.kill(agent)
        else:
            assert cloud.http.post(f"/sandboxes/{agent.sandbox_id}/pause").status_code == 204
        for thread in threads:
            thread.join(120)
        # Not broken off: with this error every SDK raises an exception of its own.
        lost = {"error": {"code": "unavailable", "message": "The sandbox was not found"}}
        assert cut == [([], lost)] * 2, cut
        answer = agent.http.get("/health")
        assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")
    finally:
        cloud.kill(agent)
