"""Uses every public method of E2B's Python SDK as its documentation shows, in the SDK's own environment, and tells what came of each.

Prints one JSON object: the version, the public methods that this version has, and for each `ok`, or the error. Runs with Python alone and the SDK.
"""

import contextlib
import importlib
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from enum import Enum
from importlib.metadata import version
from typing import Any

import e2b
import git_steps
from e2b import Sandbox, Template
from e2b.sandbox.commands.command_handle import PtySize

CLASSES = {
    "Sandbox": "e2b.Sandbox",
    "Commands": "e2b.sandbox_sync.commands.command.Commands",
    "CommandHandle": "e2b.sandbox_sync.commands.command_handle.CommandHandle",
    "Pty": "e2b.sandbox_sync.commands.pty.Pty",
    "Filesystem": "e2b.sandbox_sync.filesystem.filesystem.Filesystem",
    "WatchHandle": "e2b.sandbox_sync.filesystem.watch_handle.WatchHandle",
    "Git": "e2b.sandbox_sync.git.Git",
    "Template": "e2b.Template",
    "Volume": "e2b.Volume",
    "Secret": "e2b.Secret",
    "SandboxPaginator": "e2b.SandboxPaginator",
    "SnapshotPaginator": "e2b.SnapshotPaginator",
    "SecretPaginator": "e2b.SecretPaginator",
    "ReadyCmd": "e2b.ReadyCmd",
}
NOT_ABOUT = ("ApiClient", "ConnectionConfig", "VolumeConnectionConfig", "EntryInfo", "WriteInfo")
"""Classes with public methods that are the SDK's own insides: settings, and what answers are read into."""
PATIENCE_S = 30.0
SERVER = r"""exec perl -MIO::Socket::INET -e '
$s = IO::Socket::INET->new(Listen => 5, LocalAddr => "127.0.0.1", LocalPort => 8000, ReuseAddr => 1) or die;
while ($c = $s->accept) { while (<$c>) { last if /^\r\n$/ } print $c "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"; close $c }'"""
"""A server on port 8000; one of Python takes seconds to start under emulation."""

results: dict[str, str] = {}
told: list[Any] = []
"""Of git."""
uses: list[tuple[tuple[str, ...], Callable[..., None]]] = []


def classes() -> dict[str, Any]:
    """Those that this version has."""
    found = {}
    for name, path in CLASSES.items():
        module, _, member = path.rpartition(".")
        one = getattr(importlib.import_module(module), member, None)
        if one is not None:
            found[name] = one
    return found


def public() -> list[str]:
    """All public methods, and nothing of object's."""
    found = [f"{name}.{member}" for name, one in classes().items() for member in members(one)]
    return sorted([*found, *(f"E2B.{name}" for name in bound() if not name.startswith("Async"))])


def members(one: Any) -> list[str]:
    """The public methods of a class."""
    return [member for member in dir(one) if not member.startswith("_") and callable(getattr(one, member, None))]


def bound() -> dict[str, Any]:
    """The classes that belong to a client with settings of its own, by their names, where there are such clients."""
    if not hasattr(e2b, "E2B"):
        return {}
    given = ("E2B_API_KEY", "api_key"), ("E2B_API_URL", "api_url"), ("E2B_SANDBOX_URL", "sandbox_url"), ("E2B_DOMAIN", "domain")  # fmt: skip
    return vars(e2b.E2B(**{name: os.environ[variable] for variable, name in given if variable in os.environ}))


def unknown() -> list[str]:
    """Classes with public methods that the SDK exports and nobody here has heard of."""
    known = {*CLASSES, *NOT_ABOUT, "TemplateBase", "CommandInputHandle"}
    exported = [getattr(e2b, name) for name in e2b.__all__]
    data = (dict, str, bytes, BaseException, Enum)
    return sorted(
        one.__name__
        for one in exported
        if inspect.isclass(one) and not issubclass(one, data) and members(one)
        if one.__name__.removeprefix("Async") not in known
    )


def use(*methods: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a function that uses these methods; it gets a sandbox that runs."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        uses.append((methods, function))
        return function

    return mark


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    """Waits for a condition."""
    until = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < until, what
        time.sleep(0.1)
    return found


def has(one: object, method: str) -> bool:
    return callable(getattr(one, method, None))


def takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


# -- sandboxes


@use("Sandbox.create", "Sandbox.get_info", "Sandbox.is_running", "Sandbox.set_timeout")
def a_sandbox(_: Any) -> None:
    with Sandbox.create(timeout=120, metadata={"k y": "v&1"}, envs={"A": "1"}) as made:
        info = made.get_info()
        assert (info.metadata, info.state.value) == ({"k y": "v&1"}, "running"), info
        assert made.is_running()
        made.set_timeout(600)
        assert (made.get_info().end_at - info.end_at).total_seconds() > 300
    assert not made.is_running()


@use("Sandbox.list", "SandboxPaginator.next_items")
def a_list(sandbox: Any) -> None:
    pages = Sandbox.list()
    found = []
    while pages.has_next:
        found += pages.next_items()
    assert sandbox.sandbox_id in {one.sandbox_id for one in found}


@use("Sandbox.kill")
def a_kill(_: Any) -> None:
    made = Sandbox.create(timeout=60)
    assert made.kill() is True
    assert made.kill() is False
    assert Sandbox.kill(made.sandbox_id) is False


@use("Sandbox.pause", "Sandbox.connect")
def a_pause(_: Any) -> None:
    made = Sandbox.create(timeout=120)
    pause = made.pause if has(made, "pause") else made.beta_pause
    for _round in range(2):
        pause()
        assert made.get_info().state.value == "paused"
        assert Sandbox.connect(made.sandbox_id, timeout=120).sandbox_id == made.sandbox_id
        assert made.get_info().state.value == "running"
    made.connect(timeout=120)
    made.kill()


@use("Sandbox.connect")
def an_open_sandbox(_: Any) -> None:
    """One that asks for no token, by a handle that knows nothing but the id."""
    made = Sandbox.create(timeout=60, secure=False)
    other = Sandbox.connect(made.sandbox_id)
    assert other.commands.run("echo here").stdout == "here\n"
    made.kill()


@use("Sandbox.beta_pause")
def a_beta_pause(_: Any) -> None:
    made = Sandbox.create(timeout=120)
    made.beta_pause()
    assert made.get_info().state.value == "paused"
    made.kill()


@use("Sandbox.beta_create")
def a_beta_creation(_: Any) -> None:
    made = Sandbox.beta_create(auto_pause=True, timeout=60)
    assert made.get_info().state.value == "running"
    made.kill()


@use("Sandbox.fork")
def a_fork(sandbox: Any) -> None:
    (branch,) = sandbox.fork(timeout=60)
    assert branch.sandbox_id != sandbox.sandbox_id
    assert branch.get_info().state.value == "running"
    branch.kill()


@use("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot", "SnapshotPaginator.next_items")
def snapshots(sandbox: Any) -> None:
    kept = sandbox.create_snapshot()
    pages = Sandbox.list_snapshots()
    found = []
    while pages.has_next:
        found += pages.next_items()
    assert kept.snapshot_id in {one.snapshot_id for one in found}
    again = Sandbox.create(kept.snapshot_id, timeout=60)
    again.kill()
    assert Sandbox.delete_snapshot(kept.snapshot_id) is True
    assert Sandbox.delete_snapshot(kept.snapshot_id) is False


@use("Sandbox.get_metrics")
def metrics(sandbox: Any) -> None:
    sample = wait_for(sandbox.get_metrics, "a sample")[-1]
    assert sample.cpu_count >= 1


@use("Sandbox.get_host")
def a_port(sandbox: Any) -> None:
    assert sandbox.get_host(8000).startswith(f"8000-{sandbox.sandbox_id}.")
    sandbox.commands.run(SERVER, background=True, timeout=0)
    base = os.environ.get("E2B_SANDBOX_URL")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8000"} if base else {}
    base = base or f"https://{sandbox.get_host(8000)}"

    def answered() -> bool:
        try:
            with urllib.request.urlopen(urllib.request.Request(base + "/", headers=headers), timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False

    wait_for(answered, "the port answers")


@use("Sandbox.update_network")
def a_network(sandbox: Any) -> None:
    sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    sandbox.update_network({})


@use("Sandbox.upload_url", "Sandbox.download_url")
def signed_urls(sandbox: Any) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n\r\nby a link\r\n--x--\r\n'
    more = {"Content-Type": "multipart/form-data; boundary=x"}
    urllib.request.urlopen(urllib.request.Request(sandbox.upload_url("signed.txt"), form, more), timeout=60).close()
    with urllib.request.urlopen(sandbox.download_url("signed.txt"), timeout=60) as answer:
        assert answer.read() == b"by a link"


@use("Sandbox.get_mcp_url")
def an_mcp_url(sandbox: Any) -> None:
    assert sandbox.sandbox_id in sandbox.get_mcp_url()


@use("Sandbox.get_mcp_token")
def an_mcp_token(sandbox: Any) -> None:
    assert sandbox.get_mcp_token()


# -- commands


@use("Commands.run")
def a_command(sandbox: Any) -> None:
    came: list[str] = []
    done = sandbox.commands.run("echo out; echo err >&2; printf $A", envs={"A": "x"}, on_stdout=came.append)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nx", "err\n", 0), done
    assert "".join(came) == "out\nx"
    assert sandbox.commands.run("id -un; pwd").stdout.split() == ["user", "/home/user"]


@use(
    "Commands.list",
    "Commands.kill",
    "CommandHandle.kill",
    "CommandHandle.wait",
    "CommandHandle.disconnect",
    "Commands.connect",
)
def commands(sandbox: Any) -> None:
    handle = sandbox.commands.run("sleep 100", background=True)
    assert handle.pid in {one.pid for one in sandbox.commands.list()}
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    assert again.kill() is True
    other = sandbox.commands.run("sleep 100", background=True)
    assert sandbox.commands.kill(other.pid) is True
    assert sandbox.commands.kill(999_999) is False
    third = sandbox.commands.run("echo done", background=True)
    assert third.wait().stdout == "done\n"


@use("Commands.send_stdin", "Commands.close_stdin")
def input_(sandbox: Any) -> None:
    more = {"stdin": True} if takes(sandbox.commands.run, "stdin") else {}
    handle = sandbox.commands.run(
        "head -n1" if not has(sandbox.commands, "close_stdin") else "cat", background=True, **more
    )
    sandbox.commands.send_stdin(handle.pid, "hello\n")
    if has(sandbox.commands, "close_stdin"):
        sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello\n"


@use("CommandHandle.send_stdin", "CommandHandle.close_stdin")
def input_by_handle(sandbox: Any) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    handle.send_stdin("hello\n")
    handle.close_stdin()
    assert handle.wait().stdout == "hello\n"


@use("Commands.stream_input")
def streamed_input(sandbox: Any) -> None:
    handle = sandbox.commands.run("head -n2", background=True, stdin=True)
    sandbox.commands.stream_input(handle.pid, iter(["one\n", b"two\n"]))
    assert handle.wait().stdout == "one\ntwo\n"


@use("Pty.create", "Pty.send_stdin", "Pty.resize", "Pty.connect", "Pty.kill")
def a_terminal(sandbox: Any) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    again = sandbox.pty.connect(terminal.pid)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    shown = bytearray()
    again.wait(on_pty=shown.extend)
    assert b"30 100" in shown, bytes(shown)
    other = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    assert sandbox.pty.kill(other.pid) is True


@use("Pty.stream_input")
def a_terminal_with_a_stream(sandbox: Any) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    sandbox.pty.stream_input(terminal.pid, iter([b"echo 6*7=$((6*7)); exit\n"]))
    shown = bytearray()
    terminal.wait(on_pty=shown.extend)
    assert b"6*7=42" in shown, bytes(shown)


# -- files


@use(
    "Filesystem.write",
    "Filesystem.read",
    "Filesystem.exists",
    "Filesystem.get_info",
    "Filesystem.remove",
    "Filesystem.rename",
)
def files(sandbox: Any) -> None:
    sandbox.files.write("a/b.txt", "hello")
    assert sandbox.files.read("a/b.txt") == "hello"
    assert bytes(sandbox.files.read("a/b.txt", format="bytes")) == b"hello"
    assert b"".join(sandbox.files.read("a/b.txt", format="stream")) == b"hello"
    assert sandbox.files.exists("a/b.txt")
    assert sandbox.files.get_info("a/b.txt").path == "/home/user/a/b.txt"
    sandbox.files.rename("a/b.txt", "a/c.txt")
    sandbox.files.remove("a/c.txt")
    assert not sandbox.files.exists("a/c.txt")


@use("Filesystem.write_files", "Filesystem.list", "Filesystem.make_dir")
def several_files(sandbox: Any) -> None:
    assert sandbox.files.make_dir("several") is True
    assert sandbox.files.make_dir("several") is False
    sandbox.files.write_files([{"path": f"several/{name}", "data": name} for name in "xyz"])
    assert [one.name for one in sandbox.files.list("several")] == ["x", "y", "z"]


@use("Filesystem.watch_dir", "WatchHandle.get_new_events", "WatchHandle.stop")
def a_watch(sandbox: Any) -> None:
    sandbox.files.make_dir("watched")
    watch = sandbox.files.watch_dir("watched")
    sandbox.files.write("watched/new.txt", "x")
    assert "new.txt" in {event.name for event in wait_for(watch.get_new_events, "events")}
    watch.stop()


# -- git


@use(*git_steps.METHODS)
def git(sandbox: Any) -> None:
    commands = git_steps.Commands(sandbox.commands)
    own = type(sandbox.git)(commands)
    for step in git_steps.STEPS:
        if step.method != git_steps.WRITE:
            git_steps.check(step, getattr(own, step.method)(*step.arguments, **step.more))
        elif not commands.known:
            sandbox.files.write(*step.arguments)
    if commands.known:
        assert not commands.told, f"this is not asked for: {commands.told}"
    told.extend(commands.told)


# -- what is not about one sandbox


@use("Template.exists", "Template.alias_exists")
def a_template(_: Any) -> None:
    exists = Template.exists if has(Template, "exists") else Template.alias_exists
    assert exists("base") is True
    assert exists("no-such-template") is False
    assert Template.alias_exists("base") is True


@use(
    *(
        f"Template.{one}"
        for one in (
            "from_base_image",
            "from_image",
            "from_template",
            "from_dockerfile",
            "from_debian_image",
            "from_ubuntu_image",
            "from_python_image",
            "from_node_image",
            "from_bun_image",
            "from_alpine_image",
            "from_arch_image",
            "from_fedora_image",
            "from_aws_registry",
            "from_gcp_registry",
            "skip_cache",
            "to_json",
            "to_dockerfile",
        )
    )
)
def descriptions(_: Any) -> None:
    """They are put together in the SDK alone; building is what needs a service."""
    for method in (
        "from_base_image",
        "from_debian_image",
        "from_ubuntu_image",
        "from_python_image",
        "from_node_image",
        "from_bun_image",
        "from_alpine_image",
        "from_arch_image",
        "from_fedora_image",
    ):
        if has(Template, method):
            getattr(Template(), method)()
    Template().from_template("base")
    Template().from_dockerfile("FROM debian:12")
    Template().skip_cache()
    assert Template.to_json(Template().from_image("debian:12"))
    assert "debian:12" in Template.to_dockerfile(Template().from_image("debian:12"))


@use("Template.build")
def a_build(_: Any) -> None:
    Template.build(Template().from_template("base").run_cmd("true"), alias="built-here")


@use("Template.build_in_background")
def a_background_build(_: Any) -> None:
    Template.build_in_background(Template().from_template("base").run_cmd("true"), alias="built-here")


@use("Template.get_tags")
def tags(_: Any) -> None:
    assert Template.get_tags("base")


@use("Template.assign_tags")
def assigned_tags(_: Any) -> None:
    Template.assign_tags("base:latest", "v1")


@use("Template.remove_tags")
def removed_tags(_: Any) -> None:
    Template.remove_tags("base", "v1")


@use("Volume.create")
def a_volume(_: Any) -> None:
    from e2b import Volume

    Volume.create("shared")


@use("Volume.list")
def volumes(_: Any) -> None:
    from e2b import Volume

    Volume.list()


@use("Secret.create")
def a_secret(_: Any) -> None:
    from e2b import Secret

    Secret.create("name", "value")


@use("Secret.list", "SecretPaginator.next_items")
def secrets(_: Any) -> None:
    from e2b import Secret

    Secret.list().next_items()


# -- a client with settings of its own


@contextlib.contextmanager
def without_settings() -> Iterator[None]:
    """No variable says where the service is."""
    kept = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("E2B_") and name != "E2B_SDK"}
    try:
        yield
    finally:
        os.environ.update(kept)


@use("E2B.Sandbox", "E2B.Template")
def a_client(_: Any) -> None:
    classes = bound()
    with without_settings():
        with classes["Sandbox"].create(timeout=60) as made:
            assert made.commands.run("echo here").stdout == "here\n"
        assert classes["Template"].exists("base") is True


@use("E2B.Volume")
def volumes_of_a_client(_: Any) -> None:
    bound()["Volume"].list()


@use("E2B.Secret")
def secrets_of_a_client(_: Any) -> None:
    bound()["Secret"].list().next_items()


def main() -> None:
    there = set(public())
    sandbox = Sandbox.create(timeout=1800)
    wanted = set(sys.argv[1:])
    try:
        for methods, function in uses:
            mine = [method for method in methods if method in there]
            if not mine or (wanted and function.__name__ not in wanted):
                continue
            began = time.monotonic()
            try:
                function(sandbox)
                outcome = "ok"
            except Exception as error:  # what came of it is the result
                where = traceback.extract_tb(error.__traceback__)
                line = next((one.lineno for one in reversed(where) if one.filename == __file__), 0)
                outcome = f"{type(error).__name__} in line {line}: {error}"[:400]
            print(f"{function.__name__}: {outcome} ({time.monotonic() - began:.1f} s)", file=sys.stderr, flush=True)
            for method in mine:
                if results.get(method, "ok") == "ok":
                    results[method] = outcome
    finally:
        sandbox.kill()
    print(
        json.dumps(
            {"version": version("e2b"), "public": sorted(there), "unknown": unknown(), "results": results, "git": told}
        )
    )


if __name__ == "__main__":
    main()
