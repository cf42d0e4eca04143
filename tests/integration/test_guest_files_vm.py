"""The files program in a real virtual machine: on overlayfs, over what the agent mounts, as the users of the template."""

import asyncio
import contextlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from guest_machine import WITHIN, Shell, machine, release, shell

from hatchway.node.guest.seam import GuestError, GuestStream

pytestmark = pytest.mark.vm
__all__ = ["machine", "release", "shell"]


@asynccontextmanager
async def program(
    shell: Shell, op: str, user: str, *, stdin: bool = False, **named: object
) -> AsyncIterator[GuestStream]:
    argv = ["files", op, *(f"{key}={value}" for key, value in named.items())]
    stream = await shell.link.open_builtin(argv, user=user, stdin=stdin)
    try:
        async with asyncio.timeout(WITHIN):
            yield stream
    finally:
        await stream.close()


async def drain(read: Any) -> bytes:
    octets = bytearray()
    while piece := await read():
        octets += piece
    return bytes(octets)


async def run(
    shell: Shell, op: str, user: str = "user", *, upload: bytes | None = None, **named: object
) -> tuple[dict[str, Any], bytes]:
    """The last line, and the data."""
    async with program(shell, op, user, stdin=upload is not None, **named) as stream:

        async def give() -> None:
            with contextlib.suppress(GuestError):  # it ended before it had all: its last line says why
                await stream.write(upload or b"")
                await stream.write_eof()

        async with asyncio.TaskGroup() as tasks:
            if upload is not None:
                tasks.create_task(give())
            data = tasks.create_task(drain(stream.read))
            said = tasks.create_task(drain(stream.read_error))
        return json.loads(said.result().splitlines()[-1]), data.result()


async def ok(
    shell: Shell, op: str, user: str = "user", *, upload: bytes | None = None, **named: object
) -> dict[str, Any]:
    said, _ = await run(shell, op, user, upload=upload, **named)
    assert "ok" in said, said
    return dict(said["ok"])


async def fails(shell: Shell, op: str, user: str = "user", *, upload: bytes | None = None, **named: object) -> str:
    said, _ = await run(shell, op, user, upload=upload, **named)
    assert "code" in said, said
    return str(said["code"])


async def test_writes_at_home_whole_or_not_at_all(shell: Shell) -> None:
    made = await ok(shell, "write", path="made/f", parents=1, size=20_000, upload=b"x" * 20_000)
    assert (made["entry"]["path"], made["entry"]["user"], made["entry"]["mode"]) == ("/home/user/made/f", "user", 0o644)
    _, data = await run(shell, "read", path="made/f")
    assert data == b"x" * 20_000
    assert await fails(shell, "write", path="made/f", size=30_000, upload=b"y" * 20_000) == "EMSGSIZE"
    assert await shell.output("ls -A /home/user/made; tail -c1 /home/user/made/f") == "f\nx"


async def test_an_upload_that_is_broken_off_leaves_nothing_for_long(shell: Shell) -> None:
    """This kernel's overlayfs may have no files without a name: then the next write sweeps what the killed run left."""
    await ok(shell, "write", path="half/f", parents=1, upload=b"old")
    async with program(shell, "write", "user", stdin=True, path="half/f") as stream:
        await stream.write(b"n" * 200_000)
    await shell.output("until ! pgrep -x files >/dev/null; do sleep 0.05; done; grep -q old /home/user/half/f")
    await ok(shell, "write", path="half/f", upload=b"new")
    assert await shell.output("ls -A /home/user/half; cat /home/user/half/f") == "f\nnew"


async def test_what_the_image_holds_is_replaced_moved_and_removed(shell: Shell) -> None:
    await ok(shell, "write", "root", path="/etc/issue", upload=b"new")
    assert await shell.output("stat -c '%a %U' /etc/issue; cat /etc/issue") == "644 root\nnew"
    await ok(shell, "move", "root", **{"from": "/etc/apt", "to": "/etc/moved"})
    assert await shell.output("test ! -e /etc/apt && ls /etc/moved") != ""
    removed = await ok(shell, "remove", "root", path="/etc/moved", recursive=1)
    assert removed["removed"] > 3
    assert await shell.output("ls -d /etc/moved /etc/apt 2>&1 || true") != "/etc/moved\n"
    assert await fails(shell, "stat", path="/etc/moved") == "ENOENT"


async def test_what_the_agent_mounts_is_written_in_place(shell: Shell) -> None:
    hosts = (await run(shell, "read", "root", path="/etc/hosts"))[1]
    assert b"127.0.0.1" in hosts
    assert await fails(shell, "write", "root", path="/etc/hosts", upload=hosts) == "EBUSY"
    await ok(shell, "write", "root", path="/etc/hosts", in_place=1, upload=hosts + b"192.0.2.1 somewhere.test\n")
    assert "192.0.2.1" in await shell.output("getent hosts somewhere.test")


async def test_a_user_may_what_he_may(shell: Shell) -> None:
    await shell.output("mkdir -p /srv/roots && touch /srv/roots/f && chmod 700 /srv/roots")
    assert await fails(shell, "read", path="/srv/roots/f") == "EACCES"
    assert await fails(shell, "write", path="/etc/passwd", upload=b"") == "EACCES"
    assert await fails(shell, "remove", path="/srv/roots", recursive=1) == "EACCES"
    assert await fails(shell, "chmod", path="/srv", mode="0777") == "EPERM"
    assert (await ok(shell, "stat", "root", path="/srv/roots/f"))["entry"]["user"] == "root"
    assert (await ok(shell, "move", **{"from": "/home/user/.profile", "to": "/dev/shm/profile"}))["entry"]["size"] > 0


async def test_archives(shell: Shell) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("d/ü", "d/" + "n" * 200, "../evil"):
            info = tarfile.TarInfo(name)
            info.size, info.uid = 3, 4242
            tar.addfile(info, io.BytesIO(b"abc"))
    said, _ = await run(shell, "unpack", path="archive", parents=1, upload=made.getvalue())
    assert (said["code"], said["files"]) == ("EBADMSG", 2)
    assert await shell.output("ls /home/user/archive/d | wc -l; stat -c %U /home/user/archive/d/*") == "2\nuser\nuser\n"
    _, packed = await run(shell, "pack", path="archive")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert {member.name for member in tar} == {"d", "d/ü", "d/" + "n" * 200}


async def test_changes_of_the_image_and_of_new_folders_are_told(shell: Shell) -> None:
    async with program(shell, "watch", "root", path="/opt", recursive=1) as stream:
        assert b'"head"' in await stream.read_error()
        await shell.output("mkdir -p /opt/a/b && echo x >/opt/a/b/c")
        told = b""
        while b"/opt/a/b/c" not in told:
            told += await stream.read()
        await shell.output("mv /opt/a /opt/z && rm -r /opt/z")
        while b'"event":"remove","path":"/opt/z"' not in told:
            told += await stream.read()
        assert b'"event":"rename","path":"/opt/z"' in told


async def test_large_files_move_both_ways(shell: Shell) -> None:
    content = bytes(range(256)) * (64 << 12)
    await ok(shell, "write", path="large", size=len(content), upload=content)
    _, data = await run(shell, "read", path="large")
    assert data == content
    await ok(shell, "remove", path="large")
