"""What a hostile VMM that takes its files by path gets of its shim. Needs root: real namespaces, cgroups and users."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from launcher_harness import WITHIN, Site, Talk, site

from hatchway.node.vmm.seam import VmmDied
from hatchway.node.vmm.shim import AGENT, API, ShimClient, ShimError
from hatchway.wire.launcher import VmRecord


@pytest.fixture
async def here() -> AsyncIterator[Site]:
    assert os.geteuid() == 0, "these tests need root"
    async with site("--stock", "1") as made:
        yield made


async def started(here: Site, *fds: int, **changes: object) -> tuple[VmRecord, ShimClient, Talk]:
    vm = await here.start_vm(*fds, argv=("/vmm", "paths"), paths=True, **changes)
    shim = await here.shim_of(vm)
    async with asyncio.timeout(WITHIN):
        while True:
            try:
                sock = await shim.dial(API)
            except ShimError as error:
                if error.code != "refused":
                    raise
                await asyncio.sleep(0.002)  # it does not listen yet
                continue
            return vm, shim, Talk(*await asyncio.open_unix_connection(sock=sock))


def file(folder: Path, octets: bytes, mode: int = os.O_RDONLY) -> int:
    """A descriptor of a file that the VM's user could never open."""
    path = folder / f"file-{os.urandom(4).hex()}"
    path.write_bytes(octets)
    path.chmod(0o600)
    return os.open(path, mode | os.O_CLOEXEC)


async def test_a_path_means_the_descriptor_that_was_passed(here: Site, tmp_path: Path) -> None:
    fds = [file(tmp_path, b"x" * 100), file(tmp_path, b"y" * 200, os.O_RDWR)]
    _, _, talk = await started(here, *fds)
    # Nothing was given to it: its own socket and this conversation are all.
    assert await talk.say("fds") == "0 1 2 3 4 "
    assert await talk.say("size /hatchway/20") == "ok 100"
    assert await talk.say("size /hatchway/21") == "ok 200"
    for number, words in (("20", "errno 9"), ("21", "ok 1")):
        opened = (await talk.say(f"try write /hatchway/{number}")).split()
        assert opened[0] == "ok"
        assert await talk.say(f"write {opened[1]}") == words  # as it was opened by whoever opened it
    for path in ("/hatchway/22", "/hatchway/020", "/hatchway/20/", "/hatchway", "/hatchway/3", "/etc/passwd"):
        assert await talk.attempt("read", path) == errno.ENOENT, path
    for path in ("/dev/net/tun", "/dev/zero"):
        assert await talk.attempt("read", path) == 0
    assert await talk.attempt("create", "/tmp/scratch") == 0
    for fd in fds:
        os.close(fd)
    await talk.close()


async def test_a_path_that_cannot_be_read_is_the_kernels_error(here: Site, tmp_path: Path) -> None:
    fd = file(tmp_path, b"x")
    _, _, talk = await started(here, fd)
    os.close(fd)
    for address in (4096, 1, 0):  # 0: a path that does not end where its memory does
        assert await talk.errno(f"badopen {address}") == errno.EFAULT
    assert await talk.attempt("read", "/hatchway/20") == 0
    await talk.close()


async def test_an_offer_stands_until_it_is_withdrawn(here: Site, tmp_path: Path) -> None:
    _, shim, talk = await started(here)
    assert await talk.attempt("write", "/hatchway/40") == errno.ENOENT
    for size in (3, 5):
        fd = file(tmp_path, b"x" * size, os.O_RDWR)
        await shim.offer(40, fd)
        os.close(fd)
        assert await talk.say("size /hatchway/40") == f"ok {size}"
        assert await talk.attempt("write", "/hatchway/40") == 0
    await shim.withdraw(40)
    assert await talk.attempt("write", "/hatchway/40") == errno.ENOENT
    for number in (20, 39, 50, 400):
        fd = file(tmp_path, b"")
        with pytest.raises(ShimError) as caught:
            await shim.offer(number, fd)
        os.close(fd)
        assert caught.value.code == "invalid"
    pair = socket.socketpair()
    with pytest.raises(ShimError):
        await shim.offer(40, pair[0].fileno())  # no file
    with pytest.raises(ShimError):
        await shim.withdraw(41)
    for sock in pair:
        sock.close()
    await talk.close()


async def test_its_tap_is_attached_by_name_and_no_other_can_be_made(here: Site) -> None:
    _, _, talk = await started(here)
    tun = (await talk.say("try write /dev/net/tun")).split()[1]
    assert await talk.errno(f"tun {tun} tap1") == errno.EPERM
    assert await talk.errno(f"tun {tun} tap0") == 0
    assert sorted((await talk.say("interfaces")).split()) == ["lo", "tap0"]
    await talk.close()
    _, _, without = await started(here, network=False)
    assert await without.attempt("write", "/dev/net/tun") == errno.ENOENT
    await without.close()


async def test_a_dial_never_leaves_the_jail(here: Site) -> None:
    _, shim, talk = await started(here)
    for port in (2, 99):
        with pytest.raises(ShimError, match="must be"):
            await shim.dial(port)
    with pytest.raises(ShimError) as caught:
        await shim.dial(AGENT)
    assert caught.value.code == "refused"
    # The VMM lays a link to a socket of the host, which is there: names mean what they mean in the jail.
    assert await talk.say(f"link {here.run}/launcher.sock /tmp/api.sock") == "ok 0"
    with pytest.raises(ShimError) as caught:
        await shim.dial(API)
    assert caught.value.code == "refused"
    assert (await shim.status()).exit is None
    await talk.close()


async def test_a_full_queue_is_said_and_holds_up_nobody(here: Site) -> None:
    _, shim, talk = await started(here)
    waiting = []
    async with asyncio.timeout(WITHIN):  # it serves one at a time
        while True:
            try:
                waiting.append(await shim.dial(API))
            except ShimError as error:
                if error.code != "busy":
                    raise
                break
    assert len(waiting) < 20
    assert (await shim.status()).exit is None
    for sock in waiting:
        sock.close()
    await talk.close()


async def test_its_console_is_bounded_and_apart_from_its_errors(here: Site) -> None:
    vm, shim, talk = await started(here)
    assert await talk.say("print words") == "ok"
    assert await talk.say("console 4096") == "ok"
    async with asyncio.timeout(WITHIN):
        while not (said := await shim.console()).endswith(b"%063d\n" % (4096 * 16 - 1)):
            await asyncio.sleep(0.01)
    assert len(said) == 65_536
    assert await shim.log() == b"words\n"
    talk.tell("exit 3")
    status = await shim.watch()
    assert status.code == 3
    # What it wrote stays known; nothing can be asked of it any more.
    assert await shim.console() == said
    fd = os.memfd_create("late")
    with pytest.raises(ShimError):
        await shim.offer(40, fd)
    os.close(fd)
    with pytest.raises(ShimError) as caught:
        await shim.dial(API)
    assert caught.value.code == "refused"
    await talk.close()
    await here.client.kill_vm(vm.sandbox_id)
    with pytest.raises(VmmDied):
        await shim.status()


async def test_a_vmm_with_descriptors_is_refused_what_is_for_one_with_paths(here: Site) -> None:
    shim = await here.shim_of(await here.start_vm())
    fd = os.memfd_create("file")
    with pytest.raises(ShimError):
        await shim.offer(40, fd)
    os.close(fd)
    with pytest.raises(ShimError):
        await shim.dial(API)
    assert await shim.console() == b""
    await shim.close()
