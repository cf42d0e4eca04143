"""Like `use_python.py`, with the SDK's `AsyncSandbox` and what belongs to it; methods are told under the names of the other one's classes.

What ends while it is used, and what lives through pauses, is tried here.
"""

import asyncio
import importlib
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import git_steps
from e2b import AsyncSandbox, AsyncTemplate
from e2b.sandbox.commands.command_handle import PtySize
from use_python import has, takes

CLASSES = {
    "Sandbox": "e2b.AsyncSandbox",
    "Commands": "e2b.sandbox_async.commands.command.Commands",
    "CommandHandle": "e2b.sandbox_async.commands.command_handle.AsyncCommandHandle",
    "Pty": "e2b.sandbox_async.commands.pty.Pty",
    "Filesystem": "e2b.sandbox_async.filesystem.filesystem.Filesystem",
    "WatchHandle": "e2b.sandbox_async.filesystem.watch_handle.AsyncWatchHandle",
    "Git": "e2b.sandbox_async.git.Git",
    "Template": "e2b.AsyncTemplate",
    "Volume": "e2b.AsyncVolume",
    "Secret": "e2b.AsyncSecret",
    "AsyncCommandInputHandle": "e2b.AsyncCommandInputHandle",
}
PATIENCE_S = 60.0
ROUNDS = int(os.environ.get("ROUNDS", "3"))
Use = Callable[[Any], Awaitable[None]]

results: dict[str, str] = {}
uses: list[tuple[tuple[str, ...], Use]] = []
took: dict[str, float] = {}


def public() -> list[str]:
    """All public methods."""
    found = []
    for name, path in CLASSES.items():
        module, _, member = path.rpartition(".")
        one = getattr(importlib.import_module(module), member, None)
        found += [f"{name}.{method}" for method in dir(one) if not method.startswith("_") and callable(getattr(one, method, None))]  # fmt: skip
    return sorted(found)


def use(*methods: str) -> Callable[[Use], Use]:
    """Marks a function that uses these methods; it gets a sandbox that runs."""

    def mark(function: Use) -> Use:
        uses.append((methods, function))
        return function

    return mark


async def wait_for(holds: Callable[[], Any], what: str) -> None:
    """Waits for a condition."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.05)


async def all_of(pages: Any) -> list[Any]:
    found = []
    while pages.has_next:
        found += await pages.next_items()
    return found


# -- sandboxes


@use("Sandbox.create", "Sandbox.get_info", "Sandbox.is_running", "Sandbox.set_timeout", "Sandbox.list", "Sandbox.kill")
async def a_sandbox(_: Any) -> None:
    made = await AsyncSandbox.create(timeout=120, metadata={"k y": "v&1"}, envs={"A": "1"})
    try:
        info = await made.get_info()
        assert (info.metadata, info.state.value) == ({"k y": "v&1"}, "running"), info
        assert await made.is_running()
        await made.set_timeout(600)
        assert ((await made.get_info()).end_at - info.end_at).total_seconds() > 300
        assert made.sandbox_id in {one.sandbox_id for one in await all_of(AsyncSandbox.list())}
    finally:
        assert await made.kill() is True
    assert await made.kill() is False
    assert not await made.is_running()


@use("Sandbox.beta_create", "Sandbox.beta_pause")
async def a_beta(_: Any) -> None:
    more = {"timeout": 60}
    made = await (AsyncSandbox.beta_create if has(AsyncSandbox, "beta_create") else AsyncSandbox.create)(**more)
    await made.beta_pause()
    assert (await made.get_info()).state.value == "paused"
    await made.kill()


@use("Sandbox.pause", "Sandbox.connect")
async def rounds_of_pause_and_resume(_: Any) -> None:
    """Files, memory, what runs and the boot stay, from the second resume on too; by the handle that was there, and by a new one.

    What runs is heard again by its number, with what it writes from then on.
    """
    one = await AsyncSandbox.create(timeout=300)
    try:
        process = await one.commands.run(
            "touch /dev/shm/rounds; exec tail -n0 -f /dev/shm/rounds", background=True, timeout=0
        )
        script = "cat /proc/sys/kernel/random/boot_id"
        booted = (await one.commands.run(script)).stdout
        for number in range(ROUNDS):
            await one.files.write(f"kept/{number}", f"round {number}")
            heard: list[str] = []
            again = await one.commands.connect(process.pid, on_stdout=heard.append, timeout=0)
            await one.commands.run(f"echo {number} >>/dev/shm/rounds")
            await wait_for(lambda heard=heard: heard, "what it wrote")
            assert "".join(heard) == f"{number}\n", heard
            await again.disconnect()
            await (one.pause() if has(one, "pause") else one.beta_pause())
            assert (await AsyncSandbox.get_info(one.sandbox_id)).state.value == "paused"
            if number % 2:
                await one.connect(timeout=300)
            else:
                one = await AsyncSandbox.connect(one.sandbox_id, timeout=300)
            names = [entry.name for entry in await one.files.list("kept")]
            assert names == [str(earlier) for earlier in range(number + 1)], names
            assert await one.files.read(f"kept/{number}") == f"round {number}"
            told = (
                await one.commands.run(f"{script}; cat /dev/shm/rounds; kill -0 {process.pid} && echo there")
            ).stdout
            assert told == booted + "".join(f"{earlier}\n" for earlier in range(number + 1)) + "there\n", told
            assert process.pid in {entry.pid for entry in await one.commands.list()}
    finally:
        await one.kill()


@use("Sandbox.kill", "CommandHandle.wait")
async def streams_end_with_their_sandbox(_: Any) -> None:
    """A command, a terminal and a watch that are waited for, and the sandbox is killed: the SDK says so by an exception of its own, at once."""
    made = await AsyncSandbox.create(timeout=300)
    ended: list[BaseException | None] = []
    await made.files.make_dir("watched")
    await made.files.watch_dir("watched", on_event=lambda _: None, on_exit=ended.append, timeout=0)
    command = await made.commands.run("sleep 1000", background=True, timeout=0)
    terminal = await made.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None, timeout=0)
    waiting = [asyncio.ensure_future(one.wait()) for one in (command, terminal)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    assert await made.kill() is True
    killed = time.monotonic()
    done, _ = await asyncio.wait(waiting, timeout=PATIENCE_S)
    assert len(done) == len(waiting), "a stream went on"
    await wait_for(lambda: ended, "the watch went on")
    took["kill"] = time.monotonic() - killed
    for error in (*(one.exception() for one in waiting), *ended):
        assert type(error).__module__.startswith("e2b"), repr(error)


@use("Sandbox.pause", "CommandHandle.wait")
async def streams_end_with_a_pause(_: Any) -> None:
    made = await AsyncSandbox.create(timeout=300)
    try:
        command = await made.commands.run("sleep 1000", background=True, timeout=0)
        waiting = asyncio.ensure_future(command.wait())
        await (made.pause() if has(made, "pause") else made.beta_pause())
        paused = time.monotonic()
        await asyncio.wait({waiting}, timeout=PATIENCE_S)
        assert waiting.done(), "the stream went on"
        took["pause"] = time.monotonic() - paused
        assert type(waiting.exception()).__module__.startswith("e2b"), repr(waiting.exception())
    finally:
        await made.kill()


@use("Sandbox.fork")
async def a_fork(sandbox: Any) -> None:
    (branch,) = await sandbox.fork(timeout=60)
    assert (await branch.get_info()).state.value == "running"
    await branch.kill()


@use("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot")
async def snapshots(sandbox: Any) -> None:
    kept = await sandbox.create_snapshot()
    assert kept.snapshot_id in {one.snapshot_id for one in await all_of(AsyncSandbox.list_snapshots())}
    assert await AsyncSandbox.delete_snapshot(kept.snapshot_id) is True
    assert await AsyncSandbox.delete_snapshot(kept.snapshot_id) is False


@use("Sandbox.get_metrics", "Sandbox.get_host", "Sandbox.update_network", "Sandbox.get_mcp_url")
async def small_things(sandbox: Any) -> None:
    assert (await sandbox.get_metrics())[-1].cpu_count >= 1
    assert sandbox.get_host(8000).startswith(f"8000-{sandbox.sandbox_id}.")
    assert sandbox.sandbox_id in sandbox.get_mcp_url()
    if has(sandbox, "update_network"):
        await sandbox.update_network({"deny_out": ["0.0.0.0/0"]})


@use("Sandbox.upload_url", "Sandbox.download_url")
async def signed_urls(sandbox: Any) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="signed.txt"\r\n\r\nby a link\r\n--x--\r\n'
    more = {"Content-Type": "multipart/form-data; boundary=x"}

    def ask() -> bytes:
        urllib.request.urlopen(urllib.request.Request(sandbox.upload_url("signed.txt"), form, more), timeout=60).close()
        with urllib.request.urlopen(sandbox.download_url("signed.txt"), timeout=60) as answer:
            return bytes(answer.read())

    assert await asyncio.to_thread(ask) == b"by a link"


# -- commands


@use("Commands.run", "Commands.list", "Commands.kill", "Commands.connect", "CommandHandle.kill", "CommandHandle.wait", "CommandHandle.disconnect")  # fmt: skip
async def commands(sandbox: Any) -> None:
    told: list[str] = []
    done = await sandbox.commands.run("echo out; echo err >&2; printf $A", envs={"A": "x"}, on_stdout=told.append)
    assert (done.stdout, done.stderr, done.exit_code, "".join(told)) == ("out\nx", "err\n", 0, "out\nx"), done
    handle = await sandbox.commands.run("sleep 100", background=True)
    assert handle.pid in {one.pid for one in await sandbox.commands.list()}
    await handle.disconnect()
    again = await sandbox.commands.connect(handle.pid)
    assert await again.kill() is True
    other = await sandbox.commands.run("sleep 100", background=True)
    assert await sandbox.commands.kill(other.pid) is True
    assert await sandbox.commands.kill(999_999) is False


@use("Commands.send_stdin", "Commands.close_stdin", "CommandHandle.send_stdin", "CommandHandle.close_stdin")
async def input_(sandbox: Any) -> None:
    more = {"stdin": True} if takes(sandbox.commands.run, "stdin") else {}
    handle = await sandbox.commands.run("head -n2", background=True, **more)
    await sandbox.commands.send_stdin(handle.pid, "hello\n")
    await (handle.send_stdin if has(handle, "send_stdin") else lambda text: sandbox.commands.send_stdin(handle.pid, text))("there\n")  # fmt: skip
    assert (await handle.wait()).stdout == "hello\nthere\n"
    for close in ("close_stdin",) if has(sandbox.commands, "close_stdin") else ():
        for owner in ("commands", "handle"):
            handle = await sandbox.commands.run("cat", background=True, stdin=True)
            await (getattr(sandbox.commands, close)(handle.pid) if owner == "commands" else getattr(handle, close)())
            assert (await handle.wait()).stdout == ""


@use("Commands.stream_input", "Pty.stream_input", "AsyncCommandInputHandle.send", "AsyncCommandInputHandle.close")
async def streamed_input(sandbox: Any) -> None:
    handle = await sandbox.commands.run("head -n2", background=True, stdin=True)
    stream = sandbox.commands.stream_input(handle.pid)
    await stream.send("one\n")
    await stream.send(b"two\n")
    await stream.close()
    assert (await handle.wait()).stdout == "one\ntwo\n"
    shown = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=shown.extend, timeout=0)
    stream = sandbox.pty.stream_input(terminal.pid)
    await stream.send(b"echo 6*7=$((6*7)); exit\n")
    await stream.close()
    await terminal.wait()
    assert b"6*7=42" in shown, bytes(shown)


@use("Pty.create", "Pty.send_stdin", "Pty.resize", "Pty.connect", "Pty.kill")
async def a_terminal(sandbox: Any) -> None:
    shown = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None, timeout=0)
    await sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    again = await sandbox.pty.connect(terminal.pid, on_data=shown.extend)
    await sandbox.pty.send_stdin(terminal.pid, b"stty size; exit\n")
    await again.wait()
    assert b"30 100" in shown, bytes(shown)
    other = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None, timeout=0)
    assert await sandbox.pty.kill(other.pid) is True


# -- files


@use(*(f"Filesystem.{one}" for one in ("write", "read", "exists", "get_info", "remove", "rename", "write_files", "list", "make_dir")))  # fmt: skip
async def files(sandbox: Any) -> None:
    await sandbox.files.write("a/b.txt", "hello")
    assert await sandbox.files.read("a/b.txt") == "hello"
    assert bytes(await sandbox.files.read("a/b.txt", format="bytes")) == b"hello"
    assert b"".join([piece async for piece in await sandbox.files.read("a/b.txt", format="stream")]) == b"hello"
    assert (await sandbox.files.get_info("a/b.txt")).path == "/home/user/a/b.txt"
    await sandbox.files.rename("a/b.txt", "a/c.txt")
    assert await sandbox.files.exists("a/c.txt")
    await sandbox.files.remove("a/c.txt")
    assert not await sandbox.files.exists("a/c.txt")
    assert await sandbox.files.make_dir("several") is True
    assert await sandbox.files.make_dir("several") is False
    await sandbox.files.write_files([{"path": f"several/{name}", "data": name} for name in "xyz"])
    assert [one.name for one in await sandbox.files.list("several")] == ["x", "y", "z"]


@use("Filesystem.watch_dir", "WatchHandle.stop", "Sandbox.connect")
async def a_watch(sandbox: Any) -> None:
    """By a handle that knows nothing but the id, as another program has it."""
    other = await AsyncSandbox.connect(sandbox.sandbox_id)
    await other.files.make_dir("seen")
    seen: list[str] = []
    watch = await other.files.watch_dir("seen", on_event=lambda event: seen.append(event.name))
    await other.files.write("seen/new.txt", "x")
    await wait_for(lambda: "new.txt" in seen, "events")
    await watch.stop()


# -- git


@use(*git_steps.METHODS)
async def git(sandbox: Any) -> None:
    """The commands of `Sandbox`, see `git_steps`."""
    commands = git_steps.AsyncCommands(sandbox.commands)
    own = type(sandbox.git)(commands)
    for step in git_steps.STEPS:
        if step.method != git_steps.WRITE:
            git_steps.check(step, await getattr(own, step.method)(*step.arguments, **step.more))
    assert not commands.told, f"this is not asked for: {commands.told}"


# -- what is not about one sandbox


@use("Template.exists", "Template.alias_exists", "Template.get_tags")
async def a_template(_: Any) -> None:
    exists = AsyncTemplate.exists if has(AsyncTemplate, "exists") else AsyncTemplate.alias_exists
    assert await exists("base") is True
    assert await exists("no-such-template") is False
    assert await AsyncTemplate.alias_exists("base") is True
    if has(AsyncTemplate, "get_tags"):
        assert await AsyncTemplate.get_tags("base")


@use("Template.build")
async def a_build(_: Any) -> None:
    await AsyncTemplate.build(AsyncTemplate().from_template("base").run_cmd("true"), alias="built-here")


@use("Volume.list")
async def volumes(_: Any) -> None:
    from e2b import AsyncVolume

    await AsyncVolume.list()


@use("Secret.list")
async def secrets(_: Any) -> None:
    from e2b import AsyncSecret

    await AsyncSecret.list().next_items()


@use("Sandbox.connect")
async def an_open_sandbox(_: Any) -> None:
    """One that asks for no token, by a handle that knows nothing but the id."""
    made = await AsyncSandbox.create(timeout=60, secure=False)
    other = await AsyncSandbox.connect(made.sandbox_id)
    assert (await other.commands.run("echo here")).stdout == "here\n"
    await made.kill()


async def use_all(wanted: set[str]) -> None:
    there = set(public())
    sandbox = await AsyncSandbox.create(timeout=1800)
    try:
        for methods, function in uses:
            mine = [method for method in methods if method in there]
            if not mine or (wanted and function.__name__ not in wanted):
                continue
            began = time.monotonic()
            try:
                await function(sandbox)
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
        await sandbox.kill()


if __name__ == "__main__":
    assert os.environ["E2B_API_KEY"]
    asyncio.run(use_all(set(sys.argv[1:])))
    print(json.dumps({"version": version("e2b"), "public": public(), "results": results, "took": took}))
