"""What a hostile VMM can see and do in its jail, and what its shim answers. Needs root: real namespaces, cgroups and users."""

import array
import asyncio
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from launcher_harness import WITHIN, Site, site, until

from hatchway.launcher import devices, records
from hatchway.node.vmm.seam import ExitStatus, LaunchRefused, VmmDied
from hatchway.node.vmm.shim import ShimError

PAGE = 4096


@pytest.fixture
async def here() -> AsyncIterator[Site]:
    assert os.geteuid() == 0, "these tests need root"
    async with site("--stock", "1") as made:
        yield made


def words(text: str) -> dict[str, int]:
    return {
        name: int(value, 16 if name == "caps" else 10) for name, value in (part.split("=") for part in text.split())
    }


async def test_sees_only_its_own_files(here: Site) -> None:
    talk = await here.talk(await here.start_vm())
    assert set((await talk.say("ls /")).split()) == {"dev", "tmp", "vmm"}
    assert set((await talk.say("ls /dev")).split()) == {"null", "zero", "urandom"}
    assert await talk.say("ls /tmp") == ""
    for path in ("/etc/passwd", "/proc/1/status", "/proc", "/sys", "/..//etc", here.run, "/dev/net/tun", "/dev/kvm"):
        assert await talk.attempt("read", path) == errno.ENOENT, path
    for path in ("/dev/null", "/dev/zero"):
        assert await talk.attempt("write", path) == 0
    assert await talk.attempt("create", "/tmp/scratch") == 0


async def test_has_no_privileges_and_cannot_get_any(here: Site) -> None:
    vm = await here.start_vm()
    talk = await here.talk(vm)
    me = words(await talk.say("whoami"))
    assert me["uid"] == me["euid"] == me["gid"] == vm.uid == here.uid_base + vm.slot
    assert (me["groups"], me["caps"], me["bound"], me["nnp"], me["core"]) == (0, 0, 0, 1, 0)
    for what, argument in [
        ("mount", "/tmp"),
        ("remount", "/"),
        ("umount", "/dev"),
        ("setuid", "0"),
        ("setgroups", "-"),
        ("chroot", "/tmp"),
        ("mknod", "/tmp/mem"),
        ("raise", "-"),
        ("rawsocket", "-"),
        ("uring", "-"),
        ("ptrace", "1"),
        *(("unshare", flag) for flag in (0x10000000, 0x40000000, 0x20000000, 0x00020000)),
    ]:
        assert await talk.attempt(what, argument) == errno.EPERM, what


async def test_gets_no_socket_that_reaches_beyond_its_network(here: Site) -> None:
    talk = await here.talk(await here.start_vm())
    for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG, socket.AF_KEY, 45, "16:6", "16:12"):
        # A family that the kernel has, but only for root (AF_PACKET), shows that it is the filter that says this.
        assert await talk.attempt("socket", int(family) if isinstance(family, int) else family) == errno.EAFNOSUPPORT
    assert await talk.attempt("socket", "16:0") == 0  # the list of interfaces
    assert await talk.attempt("socket", int(socket.AF_UNIX)) == 0


async def test_cannot_write_its_root(here: Site) -> None:
    # Whatever the modes in the tree say: the mount is read-only.
    (here.root / "file").write_bytes(b"")
    (here.root / "file").chmod(0o666)
    (here.root / "folder").mkdir()
    (here.root / "folder").chmod(0o777)
    vm = await here.start_vm()
    os.chown(here.root / "file", vm.uid, vm.uid)
    talk = await here.talk(vm)
    assert await talk.attempt("read", "/file") == 0
    assert await talk.attempt("write", "/file") == errno.EROFS
    assert await talk.attempt("chmod", "/file") == errno.EROFS
    assert await talk.attempt("create", "/folder/new") == errno.EROFS
    assert await talk.attempt("mkdir", "/folder/new") == errno.EROFS
    for path in ("/new", "/dev/new"):
        assert await talk.attempt("create", path) in (errno.EROFS, errno.EACCES)
    assert await talk.attempt("write", "/dev/null") == 0
    assert os.listdir(here.root / "folder") == os.listdir(here.root / "dev") == os.listdir(here.root / "tmp") == []


async def test_a_shim_ends_with_its_vmm_when_the_launcher_goes_before_the_commit(here: Site) -> None:
    for committed in (False, True):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, vmm_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), socket.socket(socket.AF_UNIX)
        for number, listener in enumerate((control, vmm_socket)):
            listener.bind(f"\0hatchway-test-{here.uid_base}-{committed}-{number}")
            listener.listen(1)
        argv, env = os.memfd_create("argv"), os.memfd_create("env")
        os.write(argv, b"/vmm\0")
        root = os.open(here.root, os.O_PATH | os.O_DIRECTORY)
        uid = str(here.uid_base + 90)
        fds = [control.fileno(), root, argv, env, theirs.fileno(), vmm_socket.fileno()]
        names = ["--control-fd", "--root-fd", "--argv-fd", "--env-fd", "--report-fd"]
        words = [str(here.shim), "--id", "a" * 20, "--uid", uid, "--gid", uid, "--generation", "1"]
        words += [word for name, fd in zip(names, fds, strict=False) for word in (name, str(fd))]
        shim = subprocess.Popen([*words, "--pass", f"{vmm_socket.fileno()}:10"], pass_fds=fds)
        for fd in (root, argv, env):
            os.close(fd)
        for sock in (theirs, control, vmm_socket):
            sock.close()
        ours.settimeout(WITHIN)
        report = dict(part.split("=") for part in ours.recv(1024).decode().split())
        pid = int(report["pid"])
        assert records.start_time(pid) == int(report["starttime"])
        assert shim.wait(WITHIN) == 0  # the first process; the jail's init is a child of ours too
        pidfd = os.pidfd_open(pid)
        mine = f"Uid:\t{uid}\t"
        assert sum(mine in Path(f"/proc/{found}/status").read_text() for found in here.processes()) == 2
        if committed:
            ours.send(b"commit")
            # It closes its end when it has taken that: it does not depend on ours any more.
            assert ours.recv(1024) == b""
        ours.close()
        if committed:
            assert not select.select([pidfd], [], [], 0.3)[0]
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], WITHIN)[0]
        os.waitpid(pid, 0)
        os.close(pidfd)


async def test_a_claim_of_nothing_but_ends_of_words_is_refused(here: Site) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WITHIN)
    with ours:
        words = [str(here.shim), "--park", "--report-fd", str(theirs.fileno())]
        shim = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        assert ours.recv(1024) == b"parked"
        ours.send(bytes(16_384))
        assert ours.recv(1024).startswith(b"error=invalid")
        assert shim.wait(WITHIN) == 2


async def test_is_in_namespaces_of_its_own(here: Site) -> None:
    vm, other = await here.start_vm(), await here.start_vm()
    talk = await here.talk(vm)
    me = words(await talk.say("whoami"))
    assert (me["pid"], me["ppid"]) == (2, 1)
    pid = (await (await here.shim_of(vm)).status()).pid
    for name in ("pid", "mnt", "net", "ipc", "uts"):
        spaces = {os.readlink(f"/proc/{who}/ns/{name}") for who in ("self", pid, other.shim_pid)}
        assert len(spaces) == 3, name
    assert sorted((await talk.say("interfaces")).split()) == ["lo", "tap0"]
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "500"
    assert Path(f"/proc/{pid}/status").read_text().split("Seccomp:\t")[1][0] == "2"
    net = Path(f"/proc/{pid}/net")
    # tap0's own network, and nothing that leads elsewhere.
    routes = [line.split()[:3] for line in (net / "route").read_text().splitlines()[1:]]
    assert routes == [["tap0", "0000C80A", "00000000"]]
    assert (net / "if_inet6").read_text() == ""


async def test_without_a_network_there_is_no_descriptor_of_one(here: Site) -> None:
    with_tap = await here.talk(await here.start_vm())
    without = await here.talk(await here.start_vm(network=False))
    assert {"10", "11", "12"} <= set((await with_tap.say("fds")).split())
    assert {"10", "11"} <= set((await without.say("fds")).split())
    assert "12" not in (await without.say("fds")).split()


async def test_gets_kvm_only_where_it_is_asked_for(here: Site) -> None:
    if os.path.exists("/dev/kvm"):
        vm = await here.start_vm(kvm=True)
        talk = await here.talk(vm)
        assert set((await talk.say("ls /dev")).split()) == {"kvm", "null", "zero", "urandom"}
        assert await talk.attempt("write", "/dev/kvm") == 0
        assert await talk.attempt("chmod", "/dev/kvm") == errno.EROFS
    else:
        with pytest.raises(LaunchRefused) as refused:
            await here.start_vm(kvm=True)
        assert refused.value.code == "denied"


async def test_cannot_reach_other_processes(here: Site) -> None:
    vm, other = await here.start_vm(), await here.start_vm()
    talk = await here.talk(vm)
    for pid in (os.getpid(), other.shim_pid):
        assert await talk.attempt("kill", pid) == errno.ESRCH
    # The kernel throws away what a PID namespace sends to its first process.
    await talk.attempt("kill", 1)
    assert (await (await here.shim_of(vm)).status()).exit is None
    assert await (await here.talk(other)).say("whoami")


async def test_gets_the_descriptors_it_was_given_and_no_others(here: Site, tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(b"m" * PAGE)
    memory = os.open(tmp_path / "memory", os.O_RDONLY)
    disk = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    vm = await here.start_vm(memory, disk, env={"HATCHWAY_RAM_FD": "20"})
    os.close(memory)
    os.close(disk)
    talk = await here.talk(vm)
    assert set(map(int, (await talk.say("fds")).split())) == {0, 1, 2, 3, 10, 11, 12, 20, 21}  # 3: this conversation
    assert await talk.say("getenv HATCHWAY_RAM_FD") == "20"
    assert await talk.say("getenv PATH") == "unset"
    assert await talk.errno("write 20") == errno.EBADF
    assert await talk.errno("share 20 4096") == errno.EACCES
    assert await talk.errno("write 21") == 0
    assert (tmp_path / "disk").read_bytes() == b"x"
    assert (tmp_path / "memory").read_bytes() == b"m" * PAGE


async def test_is_limited(here: Site, tmp_path: Path) -> None:
    disk = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    vm = await here.start_vm(disk, disk_limit_mib=1, memory_limit_mib=48)
    os.close(disk)
    talk = await here.talk(vm)
    assert await talk.errno(f"fill 20 {1 << 20}") == 0
    shim = await here.shim_of(vm)
    made = int((await talk.say("fork 400")).split()[1])
    assert 0 < made < 100
    assert (await here.client.hello()).cgroups != "none"
    talk.tell("hog 200")
    async with asyncio.timeout(WITHIN):
        assert await shim.watch() == ExitStatus(signal=9)
    await shim.close()


async def test_an_end_for_lack_of_memory_is_counted_until_the_vm_is_forgotten(here: Site) -> None:
    vm = await here.start_vm(memory_limit_mib=48)
    before = await here.client.inspect_vm(vm.sandbox_id)
    assert (before.oom_kills, before.memory_limit_bytes) == (0, 48 << 20)
    assert 0 < before.memory_bytes <= before.memory_peak_bytes
    assert before.processes >= 2
    shim = await here.shim_of(vm)
    (await here.talk(vm)).tell("hog 200")
    async with asyncio.timeout(WITHIN):
        assert await shim.watch() == ExitStatus(signal=9)
    await shim.close()
    here.kill9()  # a launcher that came up since can still tell it
    here.start()
    assert (await here.client.inspect_vm(vm.sandbox_id)).oom_kills >= 1
    await here.client.kill_vm(vm.sandbox_id)
    await here.client.forget_vm(vm.sandbox_id)
    assert (await here.client.inspect_vm(vm.sandbox_id)).oom_kills == 0


async def test_all_vms_together_are_bounded(tmp_path: Path) -> None:
    """Two VMs within their own bounds are more than the installation gives: one ends, the launcher's own processes do not."""
    async with site("--stock", "0", "--memory-mib", "96") as here:
        vms = [await here.start_vm(memory_limit_mib=80) for _ in range(2)]
        talks = [await here.talk(vm) for vm in vms]
        shims = [await here.shim_of(vm) for vm in vms]
        ends = [asyncio.create_task(shim.watch()) for shim in shims]
        for talk in talks:
            talk.tell("hog 64")
        async with asyncio.timeout(WITHIN):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        kills = [(await here.client.inspect_vm(vm.sandbox_id)).oom_kills for vm in vms]
        assert sum(kills) >= 1
        for task, shim in zip(ends, shims, strict=True):
            task.cancel()
            await shim.close()


async def test_input_and_output_are_bounded(here: Site) -> None:
    """Only writes that reach the disk are held: those that stay in the page cache are the memory's matter."""
    if not (await here.client.hello()).io_limits:
        pytest.skip("no controller of input and output here")
    path = here.folder / "disk"
    disk = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DSYNC)
    name = devices.disk_of(os.fstat(disk).st_dev)
    if not name:
        pytest.skip("the file system has no disk of its own")
    bps = 4 << 20
    vm = await here.start_vm(disk, io_bps=bps, io_iops=700)
    os.close(disk)
    said = "".join(
        file.read_text()
        for folder in here.cgroups()
        for file in (*folder.glob("blkio.throttle.*_device"), *folder.glob("io.max"))
    )
    assert name in said
    assert str(bps) in said
    assert "700" in said
    talk = await here.talk(vm)
    began = time.monotonic()
    assert await talk.errno("pour 20 12") == 0
    assert time.monotonic() - began > 1.5, "12 MiB passed at more than twice 4 MiB/s"


async def test_a_file_larger_than_its_bound_ends_the_vmm(here: Site, tmp_path: Path) -> None:
    disk = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    vm = await here.start_vm(disk, disk_limit_mib=1)
    os.close(disk)
    shim = await here.shim_of(vm)
    (await here.talk(vm)).tell(f"fill 20 {(1 << 20) + 1}")
    async with asyncio.timeout(WITHIN):
        assert await shim.watch() == ExitStatus(signal=25)  # SIGXFSZ
    assert (tmp_path / "disk").stat().st_size == 0
    await shim.close()


@pytest.mark.parametrize(
    ("word", "ended"), [("exit 7", ExitStatus(code=7)), ("exit 0", ExitStatus(code=0)), ("abort", ExitStatus(signal=6))]
)
async def test_the_shim_tells_how_it_ended_and_keeps_it(here: Site, word: str, ended: ExitStatus) -> None:
    vm = await here.start_vm()
    talk, shim = await here.talk(vm), await here.shim_of(vm)
    watching = asyncio.create_task(shim.watch())
    with pytest.raises(ShimError, match="not ended"):
        await shim.reap()
    talk.tell(word)
    async with asyncio.timeout(WITHIN):
        assert await watching == ended
    status = await shim.status()
    assert (status.exit, status.sandbox_id, status.generation) == (ended, vm.sandbox_id, 1)
    assert await (await here.shim_of(vm)).watch() == ended  # whoever comes late
    await shim.kill()
    await shim.reap()
    await here.client.forget_vm(vm.sandbox_id)
    with pytest.raises(VmmDied):
        await shim.status()


async def test_kill_ends_all_that_the_vmm_started(here: Site) -> None:
    vm = await here.start_vm()
    assert await (await here.talk(vm)).say("fork 5") == "ok 5"
    shim = await here.shim_of(vm)
    await shim.kill()
    assert await shim.watch() == ExitStatus(signal=9)
    uid = f"Uid:\t{vm.uid}\t"

    def left() -> set[int]:
        return {pid for pid in here.processes() if uid in (Path(f"/proc/{pid}/status").read_text())}

    await until(lambda: left() == {vm.shim_pid}, "only the shim is left")


async def test_kill_9_of_the_shim_ends_its_vmm(here: Site) -> None:
    vm = await here.start_vm()
    shim = await here.shim_of(vm)
    pid = (await shim.status()).pid
    watching = asyncio.create_task(shim.watch())
    await asyncio.sleep(0)
    os.kill(vm.shim_pid, 9)
    with pytest.raises(VmmDied):
        async with asyncio.timeout(WITHIN):
            await watching
    await until(lambda: not Path(f"/proc/{pid}").exists(), "the VMM is gone")
    (left,) = await here.client.list_vms()
    assert not left.alive


async def test_keeps_the_end_of_what_the_vmm_wrote_and_no_more(here: Site) -> None:
    vm = await here.start_vm()
    talk, shim = await here.talk(vm), await here.shim_of(vm)
    await talk.say("print first")
    assert await shim.log() == b"first\n"
    assert await talk.say("flood 2048") == "ok"
    await talk.say("print last")
    log = await shim.log()
    assert log.endswith(b"\nlast\n")
    assert len(log) == 3072
    assert b"first" not in log


async def test_a_vmm_that_cannot_start_is_reported_and_leaves_nothing(here: Site) -> None:
    with pytest.raises(LaunchRefused, match="No such file") as refused:
        await here.start_vm(argv=("/none",))
    assert refused.value.code == "spawn_failed"
    (here.root / "dev").rmdir()
    with pytest.raises(LaunchRefused, match="/dev") as refused:
        await here.start_vm()
    assert refused.value.code == "jail_failed"
    (here.root / "dev").mkdir()
    assert here.vm_folders() == []
    vm = await here.start_vm(argv=("/vmm", "exit-at-once"))
    shim = await here.shim_of(vm)
    assert await shim.watch() == ExitStatus(code=3)
    assert await shim.log() == b"no such machine\n"


def raw(here: Site, vm_id: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(WITHIN)
    folder = os.open(here.run / "vm" / vm_id, os.O_PATH)
    sock.connect(f"/proc/self/fd/{folder}/shim.sock")
    os.close(folder)
    return sock


async def test_the_shim_bears_hostile_requests(here: Site) -> None:
    vm = await here.start_vm()
    with raw(here, vm.sandbox_id) as sock:
        for request in (
            b"x",
            b"\0",
            b"status ",
            b"status\n",
            b"nothing",
            b"capture",
            b"capture map=",
            b"capture map=20",
            b"k" * 4096,
        ):
            sock.send(request)
            assert sock.recv(4096).startswith(b"error code="), request
        sock.send(b"s" * 5000)
        assert sock.recv(4096).startswith(b"error code=invalid")
        sock.sendmsg([b"capture map=10"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
        assert sock.recv(4096).startswith(b"error code=invalid")

        def descriptors() -> int:
            sock.send(b"status")  # it is done with a request when it takes the next
            assert sock.recv(4096).startswith(b"ok state=running")
            return len(os.listdir(f"/proc/{vm.shim_pid}/fd"))

        before = descriptors()
        for count in (1, 2, 3, 200):
            fds = array.array("i", [0] * count)
            sock.sendmsg([b"capture map=10"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            assert sock.recv(4096).startswith(b"error code=invalid")
        assert descriptors() == before
    socks = [raw(here, vm.sandbox_id) for _ in range(4)]
    for sock in socks:
        sock.send(b"status")
        assert sock.recv(4096).startswith(b"ok")
    with raw(here, vm.sandbox_id) as fifth:
        assert fifth.recv(4096).startswith(b"error code=busy")
        assert fifth.recv(4096) == b""
    # One that never reads its answers is dropped; the others are served.
    flood = socks.pop()
    flood.setblocking(False)
    with pytest.raises(OSError):  # noqa: PT011, PT012
        for _ in range(100_000):
            flood.send(b"log")
            await asyncio.sleep(0)
    socks[0].send(b"status")
    assert socks[0].recv(4096).startswith(b"ok")
    for sock in (*socks, flood):
        sock.close()


async def test_the_shim_serves_only_its_peers(here: Site) -> None:
    vm = await here.start_vm()
    path = here.run / "vm" / vm.sandbox_id / "shim.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    folder = os.open(path.parent, os.O_PATH)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(12345)
            os.setuid(12345)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(f"/proc/self/fd/{folder}/shim.sock")
            sock.send(b"status")
            code = 0 if sock.recv(4096) == b"" else 2
        except (BrokenPipeError, ConnectionResetError):
            code = 0
        finally:
            os._exit(code)
    os.close(folder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (await (await here.shim_of(vm)).status()).exit is None


def parse(capture: bytes) -> tuple[int, dict[int, bytes]]:
    magic, page, size, count = struct.unpack_from("<8s3Q", capture)
    assert (magic, page) == (b"HWCAP1\0\0", PAGE)
    pages: dict[int, bytes] = {}
    at = 32 + 16 * count
    for first, length in struct.iter_unpack("<2Q", capture[32:at]):
        for number in range(first, first + length):
            pages[number] = capture[at : at + PAGE]
            at += PAGE
    assert at == len(capture)
    return size, pages


async def test_captures_what_the_vmm_changed_and_injects_it_into_another(here: Site, tmp_path: Path) -> None:
    pages = 16_384
    memory = tmp_path / "memory"
    with memory.open("wb") as file:
        for number in range(4):
            file.write(bytes([65 + number]) * PAGE)
        file.truncate(pages * PAGE)
    fd = os.open(memory, os.O_RDONLY)
    source, child = await here.start_vm(fd), await here.start_vm(fd)
    os.close(fd)
    talk, shim = await here.talk(source), await here.shim_of(source)
    out = os.open(tmp_path / "capture", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ShimError) as refused:
        await shim.capture(20, out)
    assert refused.value.code == "unmapped"
    await talk.say(f"map 20 {pages * PAGE}")
    for number in (0, 3, 100):
        await talk.say(f"peek {number} 0")  # read, not changed
    for number, value in ((2, 200), (7, 201), (8, 202), (pages - 1, 203)):
        await talk.say(f"poke {number} {value}")
    done = await shim.capture(20, out)
    assert (done.pages, done.runs, done.bytes) == (4, 3, 4 * PAGE)
    size, found = parse((tmp_path / "capture").read_bytes())
    assert size == pages * PAGE
    assert found == {n: bytes([v]) * PAGE for n, v in ((2, 200), (7, 201), (8, 202), (pages - 1, 203))}

    there, other = await here.talk(child), await here.shim_of(child)
    await there.say(f"map 20 {pages * PAGE}")
    assert await other.inject(20, out) == done
    for number, value in ((0, 65), (1, 66), (2, 200), (3, 68), (7, 201), (8, 202), (9, 0), (pages - 1, 203)):
        assert await there.say(f"peek {number} 4095") == f"ok {value}", number
    # The file that both map is as it was, and a capture of the child is the same as the one that went in.
    with memory.open("rb") as file:
        assert file.read(4 * PAGE) == b"".join(bytes([65 + n]) * PAGE for n in range(4))
    again = os.open(tmp_path / "again", os.O_RDWR | os.O_CREAT)
    assert await other.capture(20, again) == done
    assert (tmp_path / "again").read_bytes() == (tmp_path / "capture").read_bytes()
    # Many pages far apart.
    await talk.say("pokemany 8000 2")
    many = os.open(tmp_path / "many", os.O_RDWR | os.O_CREAT)
    assert (await shim.capture(20, many)).pages == 8002
    assert parse((tmp_path / "many").read_bytes())[1][2 * 500] == bytes([500 % 251 + 1]) * PAGE
    assert (await other.inject(20, many)).pages == 8002
    assert await there.say("peek 1000 17") == f"ok {500 % 251 + 1}"
    for number in (out, again, many):
        os.close(number)


async def test_refuses_captures_that_make_no_sense(here: Site, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(16 * PAGE))
    fd = os.open(memory, os.O_RDWR)
    vm = await here.start_vm(fd, fd)
    os.close(fd)
    talk, shim = await here.talk(vm), await here.shim_of(vm)
    await talk.say(f"map 20 {16 * PAGE}")
    bad = tmp_path / "bad"

    async def refused(content: bytes, code: str) -> None:
        bad.write_bytes(content)
        file = os.open(bad, os.O_RDONLY)
        with pytest.raises(ShimError) as error:
            await shim.inject(20, file)
        os.close(file)
        assert error.value.code == code, (content[:48], error.value)

    def head(size: int, *runs: tuple[int, int], count: int | None = None) -> bytes:
        table = b"".join(struct.pack("<2Q", *run) for run in runs)
        return struct.pack("<8s3Q", b"HWCAP1\0\0", PAGE, size, len(runs) if count is None else count) + table

    whole = 16 * PAGE
    await refused(b"", "io")
    await refused(b"HWCAP2\0\0" + bytes(24), "invalid")
    await refused(head(whole + PAGE), "invalid")
    await refused(head(whole, (16, 1)) + bytes(PAGE), "invalid")
    await refused(head(whole, (0, 17)) + bytes(17 * PAGE), "invalid")
    await refused(head(whole, (0, 0)), "invalid")
    await refused(head(whole, (2**64 - 1, 2)), "invalid")
    await refused(head(whole, (1, 2**64 - 1)), "invalid")
    await refused(head(whole, (5, 1), (4, 1)) + bytes(2 * PAGE), "invalid")
    await refused(head(whole, count=2**60), "invalid")
    await refused(head(whole, (0, 4)) + bytes(PAGE), "io")
    pipe = os.pipe()
    for number in pipe:
        with pytest.raises(ShimError):
            await shim.capture(20, number)
        os.close(number)
    read_only = os.open(bad, os.O_RDONLY)
    with pytest.raises(ShimError) as error:
        await shim.capture(20, read_only)
    assert error.value.code == "io"
    await talk.say(f"share 21 {whole}")
    with pytest.raises(ShimError) as error:
        await shim.capture(21, read_only)
    assert error.value.code == "shared"
    os.close(read_only)
    assert (await shim.status()).exit is None
    # A mapping that is larger than the file could keep the shim busy for as long as it likes.
    other = await here.start_vm(large := os.open(memory, os.O_RDWR))
    os.close(large)
    assert await (await here.talk(other)).say(f"map 20 {1 << 30}") == "ok 0"
    out = os.open(bad, os.O_RDWR)
    with pytest.raises(ShimError) as error:
        await (await here.shim_of(other)).capture(20, out)
    os.close(out)
    assert error.value.code == "unsupported"
