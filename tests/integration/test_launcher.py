"""The launcher as a process: what it refuses, and what holds when it is killed at any moment. Needs root."""

import array
import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from launcher_harness import WITHIN, Site, python_for_anybody, record_of, site, until

from hatchway.domain.ids import new_id
from hatchway.node.vmm import launcher as client_module
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import LauncherUnavailable, LaunchRefused
from hatchway.wire.launcher import Answer, Failed, Hello, HelloAnswer, ListVms, VmRecord

ANSWER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


@pytest.fixture
async def here() -> AsyncIterator[Site]:
    assert os.geteuid() == 0, "these tests need root"
    async with site("--stock", "1", "--slots", "16") as made:
        await made.client.hello()
        yield made


async def test_says_what_it_can_do(here: Site) -> None:
    hello = await here.client.hello()
    assert not hello.rootless
    assert hello.network == os.path.exists("/dev/net/tun")
    assert hello.cgroups in ("v1", "v2")
    assert hello.warnings == ()
    pss = int(Path(f"/proc/{here.process.pid}/smaps_rollup").read_text().split("Pss:")[1].split()[0])
    assert pss < 16 * 1024, "KiB"


async def test_start_kill_and_forget_are_idempotent(here: Site) -> None:
    request = here.request(generation=7)
    vm = await here.ask_start(request)
    assert await here.ask_start(request) == vm
    assert (vm.generation, vm.uid, vm.network, vm.alive) == (7, here.uid_base + vm.slot, True, True)
    assert record_of(here, vm)["shim_pid"] == vm.shim_pid
    for generation in (6, 8):
        with pytest.raises(LaunchRefused) as refused:
            await here.ask_start(msgspec.structs.replace(request, generation=generation))
        assert refused.value.code == "exists"
    with pytest.raises(LaunchRefused) as refused:
        await here.client.forget_vm(vm.sandbox_id)
    assert refused.value.code == "running"
    for _ in range(2):
        await here.client.kill_vm(vm.sandbox_id)
    with pytest.raises(LaunchRefused) as refused:
        await here.ask_start(request)
    assert refused.value.code == "exists"
    assert [record.alive for record in await here.client.list_vms()] == [False]
    for _ in range(2):
        await here.client.forget_vm(vm.sandbox_id)
    assert await here.client.list_vms() == ()
    assert await here.ask_start(request)
    await here.client.kill_vm(new_id())
    await here.client.forget_vm(new_id())


async def test_the_same_start_asked_twice_at_once_starts_one_vm(here: Site) -> None:
    request = here.request()
    first, second = await asyncio.gather(here.ask_start(request), here.ask_start(request))
    assert first == second
    assert len(await here.client.list_vms()) == 1


async def test_starts_many_at_once_with_slots_of_their_own(here: Site) -> None:
    vms = await asyncio.gather(*(here.start_vm() for _ in range(10)))
    assert len({vm.slot for vm in vms}) == len({vm.uid for vm in vms}) == len({vm.shim_pid for vm in vms}) == 10
    for vm in vms:
        assert f"uid={vm.uid} " in await (await here.talk(vm)).say("whoami")
    await asyncio.gather(*(here.client.kill_vm(vm.sandbox_id) for vm in vms))


async def test_says_so_when_all_slots_are_taken() -> None:
    async with site("--slots", "2", "--stock", "1") as here:
        first, _ = await here.start_vm(), await here.start_vm()
        with pytest.raises(LaunchRefused) as refused:
            await here.start_vm()
        assert refused.value.code == "no_slot"
        await here.client.kill_vm(first.sandbox_id)
        await here.client.forget_vm(first.sandbox_id)
        assert (await here.start_vm()).slot == first.slot


async def test_kills_a_shim_that_hangs(here: Site) -> None:
    vm = await here.start_vm()
    os.kill(vm.shim_pid, signal.SIGSTOP)
    await here.client.kill_vm(vm.sandbox_id)
    await until(lambda: not any(f"Uid:\t{vm.uid}\t" in _status(pid) for pid in here.processes()), "all dead")


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


async def test_vms_outlive_a_killed_launcher_and_are_adopted(here: Site) -> None:
    request = here.request(generation=3)
    vm, gone, other = await here.ask_start(request), await here.start_vm(), await here.start_vm(network=False)
    talk = await here.talk(vm)
    here.kill9()
    os.kill(gone.shim_pid, signal.SIGKILL)
    assert "pid=2" in await talk.say("whoami")
    waiting = asyncio.create_task(here.client.list_vms())  # there is no launcher now; the client waits for the next
    await asyncio.sleep(0)
    here.start()
    found = {record.sandbox_id: record for record in await waiting}
    assert {name: record.alive for name, record in found.items()} == {
        vm.sandbox_id: True,
        gone.sandbox_id: False,
        other.sandbox_id: True,
    }
    assert found[vm.sandbox_id] == vm
    assert await here.ask_start(request) == vm
    fresh = await here.start_vm()
    assert fresh.slot not in {vm.slot, gone.slot, other.slot}
    await here.client.kill_vm(vm.sandbox_id)
    assert await talk.say("whoami") == ""
    await here.client.forget_vm(vm.sandbox_id)
    await here.client.forget_vm(gone.sandbox_id)


async def test_a_launcher_killed_at_any_step_of_a_start_leaves_a_vm_or_nothing(here: Site) -> None:
    started = 0
    for step in range(14):
        request = here.request()
        asking = asyncio.create_task(here.ask_start(request))
        await asyncio.sleep(0.0006 * step)
        here.kill9()
        here.start()
        # The client asks the next launcher again, which starts it afresh, or finds it.
        vm = await asking
        assert [record for record in await here.client.list_vms() if record.alive] == [vm]
        assert await (await here.talk(vm)).say("fds")
        mine = f"Uid:\t{vm.uid}\t"
        assert sum(mine in _status(pid) for pid in here.processes()) == 2  # one shim, one VMM
        await here.client.kill_vm(vm.sandbox_id)
        await here.client.forget_vm(vm.sandbox_id)
        started += 1
    assert started == 14


async def test_half_made_folders_and_leftover_cgroups_are_removed(here: Site) -> None:
    vm = await here.start_vm()
    here.kill9()
    half, torn = new_id(), new_id()
    (here.run / "vm" / half).mkdir()
    (here.run / "vm" / half / "qmp.sock").write_bytes(b"")
    (here.run / "vm" / torn).mkdir()
    (here.run / "vm" / torn / "launch.json").write_text('{"sandbox_id": "')
    for path in here.cgroups():
        (path.parent / "slot-15").mkdir(exist_ok=True)
    here.start()
    assert [record.sandbox_id for record in await here.client.list_vms()] == [vm.sandbox_id]
    assert here.vm_folders() == [vm.sandbox_id]
    await until(lambda: not any(path.name == "slot-15" for path in here.cgroups()), "cgroup is gone")


async def test_a_record_of_another_boot_or_another_process_is_not_alive(here: Site) -> None:
    vm = await here.start_vm()
    await here.client.kill_vm(vm.sandbox_id)
    here.kill9()
    path = here.run / "vm" / vm.sandbox_id / "launch.json"
    own_start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    for record in (
        msgspec.structs.replace(vm, shim_pid=os.getpid()),
        msgspec.structs.replace(vm, shim_pid=os.getpid(), shim_starttime=own_start, host_boot_id="another"),
    ):
        path.write_bytes(msgspec.json.encode(record))
        here.start()
        (found,) = await here.client.list_vms()
        assert not found.alive
        await here.client.kill_vm(vm.sandbox_id)  # must not reach this test's own process
        here.kill9()
    here.start()


async def test_stopping_lets_vms_go_on(here: Site) -> None:
    vm = await here.start_vm()
    await until(lambda: len(here.processes()) == 3, "one slot is in stock")
    assert here.end() == 0
    await until(lambda: len(here.processes()) == 2, "the parked shim is gone")
    assert {path.name for path in here.cgroups()} == {f"slot-{vm.slot}"}
    assert await (await here.talk(vm)).say("fds")
    here.start()


def _exchange(here: Site, data: bytes, fds: list[int], *, sock: socket.socket | None = None) -> Answer | None:
    own = sock or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(WITHIN)
    folder = os.open(here.run, os.O_PATH)
    own.connect(f"/proc/self/fd/{folder}/launcher.sock")
    os.close(folder)
    with own:
        own.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
        answer = own.recv(65536)
    return ANSWER.decode(answer) if answer else None


async def test_refuses_hostile_requests(here: Site, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    open_to_all, foreign = tmp_path / "open", tmp_path / "foreign"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    foreign.mkdir()
    os.chown(foreign, 12345, 12345)
    paths = {"root": here.root, "open": open_to_all, "foreign": foreign, "file": here.root / "vmm"}
    fds = {name: os.open(path, os.O_PATH) for name, path in paths.items()}
    fds["device"] = os.open("/dev/null", os.O_RDWR)
    good = msgspec.to_builtins(here.request())

    def request(**changes: object) -> bytes:
        return msgspec.json.encode({"type": "start_vm", **good, **changes})

    root = [fds["root"]]
    cases: list[tuple[bytes, list[int]]] = [
        (b"\xff", root),
        (b"[]", root),
        (b'{"type":"run","command":"id"}', root),
        (request(), []),
        (request().replace(b'"/vmm"', rb'"/vmm","\ud800"'), root),
        (request(sandbox_id="../../../../../../etc"), root),
        (request(sandbox_id=good["sandbox_id"] + "a"), root),
        (request(sandbox_id=good["sandbox_id"][:19] + "/"), root),
        (request(sandbox_id=good["sandbox_id"][:19] + "\n"), root),
        (request(generation=-1), root),
        (request(argv=()), root),
        (request(argv=("vmm",)), root),
        (request(argv=("/vmm", "a\0--uid\x000")), root),
        (request(argv=("/vmm", *["a"] * 512)), root),
        (request(env={"A=B": "c"}), root),
        (request(env={"A": "b\0C=d"}), root),
        (request(vcpus=0), root),
        (request(vcpus=10**9), root),
        (request(memory_limit_mib=1), root),
        (request(disk_limit_mib=0), root),
        (request(pass_as=(20,)), root),
        (request(pass_as=(10,)), [*root, fds["file"]]),
        (request(pass_as=(100,)), [*root, fds["file"]]),
        (request(pass_as=(20, 20)), [*root, fds["file"], fds["file"]]),
        (request(pass_as=(20,)), [*root, fds["root"]]),  # a way out of the jail
        (request(pass_as=(20,)), [*root, fds["device"]]),
        (request(), [fds["file"]]),
        (request(), [fds["open"]]),
        (request(), [fds["foreign"]]),
        (request(pass_as=tuple(range(20, 100))), root * 120),
        (b'{"type":"kill_vm","sandbox_id":"*"}', []),
        (b'{"type":"forget_vm","sandbox_id":"../vm"}', []),
        (b'{"type":"hello","a":"' + b"x" * 60_000 + b'"}', []),
    ]
    for data, given in cases:
        answer = _exchange(here, data, given)
        assert isinstance(answer, Failed), data[:200]
        assert answer.code in ("invalid", "denied"), (data[:200], answer)
    for fd in fds.values():
        os.close(fd)
    assert here.vm_folders() == []
    # Nothing that came with them is still open there.
    await until(lambda: len(os.listdir(f"/proc/{here.process.pid}/fd")) < 20, "descriptors are closed")
    assert (await here.start_vm()).alive


async def test_serves_only_its_peers(here: Site) -> None:
    assert (here.run / "launcher.sock").stat().st_mode & 0o777 == 0o600
    (here.run / "launcher.sock").chmod(0o666)
    os.chmod(here.run, 0o711)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgid(12345)
            os.setuid(12345)
            code = 0 if _exchange(here, msgspec.json.encode(Hello()), []) is None else 2
        except (BrokenPipeError, ConnectionResetError):
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_one_client_cannot_stall_the_others(here: Site) -> None:
    folder = os.open(here.run, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as greedy:
        greedy.connect(f"/proc/self/fd/{folder}/launcher.sock")
        greedy.setblocking(False)
        sent = 0
        try:
            for sent in range(100_000):
                greedy.send(msgspec.json.encode(ListVms()))
                if sent % 100 == 0:
                    assert isinstance(await here.client.hello(), HelloAnswer)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 99_999
        assert isinstance(await here.client.hello(), HelloAnswer)
    os.close(folder)


async def test_pages_through_more_vms_than_fit_into_an_answer(here: Site) -> None:
    vm = await here.start_vm()
    here.kill9()
    for _ in range(320):
        sandbox_id = new_id()
        folder = here.run / "vm" / sandbox_id
        folder.mkdir()
        record = msgspec.structs.replace(vm, sandbox_id=sandbox_id, shim_pid=2**22, slot=9)
        (folder / "launch.json").write_bytes(msgspec.json.encode(record))
    here.start()
    found = await here.client.list_vms()
    assert len(found) == 321
    assert [record.sandbox_id for record in found] == sorted(os.listdir(here.run / "vm"))
    assert sum(record.alive for record in found) == 1


async def test_the_client_gives_up_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RECONNECT_WITHIN_S", 0.2)
    with pytest.raises(LauncherUnavailable, match="no launcher"):
        await LauncherClient(tmp_path / "launcher.sock").hello()


async def test_takes_a_socket_that_the_supervisor_keeps() -> None:
    here = Site("--stock", "0")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(here.run, os.O_PATH)
    listener.bind(f"/proc/self/fd/{folder}/launcher.sock")
    os.close(folder)
    listener.listen(8)
    here.options += ["--listen-fd", str(listener.fileno())]
    listener.set_inheritable(True)
    before = here.start

    def start() -> None:
        with open(here.log, "ab") as log:
            command = [*here.command, *here.arguments()]
            here.process = subprocess.Popen(command, stderr=log, pass_fds=[listener.fileno()])

    here.start = start  # type: ignore[method-assign]
    assert before
    try:
        waiting = asyncio.create_task(here.client.hello())  # before the launcher runs
        await asyncio.sleep(0)
        here.start()
        assert (await waiting).cgroups
        here.kill9()
        here.start()
        assert (await here.client.hello()).cgroups
    finally:
        await here.clean_up()
        listener.close()


def _complaint(here: Site) -> str:
    done = subprocess.run(
        [*here.command, *here.arguments()], capture_output=True, text=True, timeout=WITHIN, check=False
    )
    assert done.returncode == 1, done
    return done.stderr


async def test_refuses_a_run_folder_that_others_own_or_can_write(here: Site) -> None:
    assert "another launcher" in _complaint(here)
    other = Site()
    try:
        other.run.chmod(0o777)
        assert "can be written by others" in _complaint(other)
        other.run.chmod(0o755)
        os.chown(other.run, 12345, 12345)
        assert "belongs to uid 12345" in _complaint(other)
        os.chown(other.run, 0, 0)
        other.folder.chmod(0o777)
        assert f"{other.folder} can be written by others" in _complaint(other)
        other.folder.chmod(0o755)
        (other.folder / "link").symlink_to(other.run)
        other.run = other.folder / "link"
        assert "not a folder" in _complaint(other)
        other.run = other.folder / "run"
        os.chown(other.shim, 12345, 12345)
        assert "can be exchanged by others" in _complaint(other)
        other.shim.unlink()
        assert "No such file" in _complaint(other)
    finally:
        shutil.rmtree(other.top)


async def test_without_root_it_works_in_a_user_namespace_and_says_what_is_lacking() -> None:
    here = Site("--stock", "1")
    here.command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *python_for_anybody()]
    for path in (here.top, *here.top.rglob("*")):
        os.chown(path, 65534, 65534)
    here.client_uid = 65534
    try:
        here.start()
        with here.acting():
            vm, hello = await _use_rootless(here)
        here.kill9()
        here.start()
        with here.acting():
            (found,) = await here.client.list_vms()
            assert found == vm
            await here.client.kill_vm(vm.sandbox_id)
            await here.client.forget_vm(vm.sandbox_id)
            if not hello.network:
                with pytest.raises(LaunchRefused) as refused:
                    await here.start_vm()
                assert refused.value.code == "denied"
        with pytest.raises(LauncherUnavailable):  # this one belongs to one user, and not to root
            await LauncherClient(here.run / "launcher.sock").hello()
    finally:
        await here.clean_up()


async def _use_rootless(here: Site) -> tuple[VmRecord, HelloAnswer]:
    hello = await here.client.hello()
    assert hello.rootless
    assert any("Run as root" in warning for warning in hello.warnings)
    assert hello.network or any("/dev/net/tun" in warning for warning in hello.warnings)
    assert hello.cgroups != "none" or any("cgroup" in warning for warning in hello.warnings)
    memory = here.folder / "memory"
    memory.write_bytes(bytes(64 * 4096))
    fd = os.open(memory, os.O_RDONLY)
    vm = await here.start_vm(fd, network=hello.network)
    os.close(fd)
    assert vm.uid == 65534
    assert "Uid:\t65534\t65534" in _status(vm.shim_pid)
    talk, shim = await here.talk(vm), await here.shim_of(vm)
    me = await talk.say("whoami")
    assert " caps=0 bound=0 nnp=1 " in me
    assert set((await talk.say("ls /")).split()) == {"dev", "tmp", "vmm"}
    assert await talk.attempt("read", "/etc/passwd") == errno.ENOENT
    assert await talk.attempt("write", "/dev/null") == 0
    for what, argument in (("mount", "/tmp"), ("unshare", 0x10000000), ("mknod", "/tmp/mem"), ("ptrace", 1)):
        assert await talk.attempt(what, argument) == errno.EPERM, what
    await talk.say("map 20 262144")
    await talk.say("poke 5 9")
    out = os.open(here.folder / "capture", os.O_RDWR | os.O_CREAT)
    assert (await shim.capture(20, out)).pages == 1
    os.close(out)
    return vm, hello
