"""What Firecracker is told, what is believed of its answers, which releases may run, and which driver a node takes."""

import asyncio
import gzip
import json
import lzma
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hatchway.domain.errors import Unavailable
from hatchway.domain.host_limits import HostLimits
from hatchway.domain.shapes import Shape
from hatchway.domain.vmm_policy import VmmPolicy
from hatchway.node.vmm import (
    advisories,
    captures,
    choice,
    disk,
    firecracker_args,
    firecracker_install,
    firecracker_probe,
    firecracker_vm,
    kernel_elf,
)
from hatchway.node.vmm.firecracker_api import MAX_ANSWER, Api, FirecrackerError
from hatchway.node.vmm.firecracker_args import Machine
from hatchway.node.vmm.firecracker_install import FirecrackerRefused, Installed
from hatchway.node.vmm.firecracker_vm import FirecrackerVm
from hatchway.node.vmm.probe import Verdict
from hatchway.node.vmm.seam import BootFiles, SnapshotMismatch, VmmDied, VmmError, VmmMissing, VmmTimeout, VmSpec
from hatchway.node.vmm.shim import ShimError
from hatchway.node.vmm.shim_vm import Kind
from hatchway.supervisor import profile
from hatchway.supervisor.settings import Settings

MIB = 2**20


# -- what it is told


def test_a_machine_has_what_it_needs_and_no_balloon() -> None:
    requests = firecracker_args.boot(
        Machine(Shape(vcpus=2, memory_mib=384, disk_mib=640), network=True, cmdline="quiet")
    )
    assert [path for _, path, _ in requests] == [
        *("/machine-config", "/boot-source", "/drives/base", "/drives/upper", "/vsock", "/entropy"),
        *("/network-interfaces/net", "/actions"),
    ]
    bodies = {path: body for _, path, body in requests}
    assert bodies["/machine-config"] == {"vcpu_count": 2, "mem_size_mib": 384}
    assert str(bodies["/boot-source"]["boot_args"]).endswith(" quiet")
    assert (bodies["/drives/base"]["is_read_only"], bodies["/drives/upper"]["is_read_only"]) == (True, False)
    assert bodies["/drives/upper"]["cache_type"] == "Writeback"
    assert "rate_limiter" in bodies["/drives/upper"]
    assert "rate_limiter" in bodies["/entropy"]
    # Every file is a descriptor under a name that every jail has.
    assert {body["path_on_host"] for path, body in bodies.items() if "drives" in path} == {
        "/hatchway/30",
        "/hatchway/31",
    }
    without = firecracker_args.boot(Machine(Shape(), network=False, cmdline=""))
    assert not any("network" in path for _, path, _ in without)
    assert "--enable-pci" not in firecracker_args.arguments()
    assert "--no-seccomp" not in firecracker_args.arguments()


@pytest.mark.parametrize(("mib_s", "ops"), [(0, 0), (100, 0), (0, 500), (100, 500)])
def test_a_disk_is_bounded_as_the_limits_say(mib_s: int, ops: int) -> None:
    limiter: dict[str, Any] = firecracker_args.rate_limiter(HostLimits(disk_mib_s=mib_s, disk_ops_s=ops))
    assert set(limiter) == {name for name, rate in (("bandwidth", mib_s), ("ops", ops)) if rate}
    assert limiter.get("bandwidth", {}).get("size", 0) == mib_s * MIB
    assert limiter.get("ops", {}).get("size", 0) == ops


def test_changes_are_tracked_by_the_name_that_the_release_has() -> None:
    for version, name in (((1, 12, 1), "enable_diff_snapshots"), ((1, 13, 0), "track_dirty_pages")):
        _, _, body = firecracker_args.load(version, resume=False)
        assert body[name] is True
        assert body["resume_vm"] is False


# -- what is believed of its answers


class Server:
    """Answers each connection with the same octets, in the pieces given, and keeps what it was asked."""

    def __init__(self, *pieces: bytes, close: bool = False) -> None:
        self.pieces = pieces
        self.close = close
        self.asked = bytearray()
        self.dialled = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def dial(self) -> socket.socket:
        self.dialled += 1
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        self.tasks.append(asyncio.get_running_loop().create_task(self._serve(theirs)))
        return ours

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while octets := await loop.sock_recv(sock, 65_536):
                self.asked += octets
                for piece in self.pieces:
                    await loop.sock_sendall(sock, piece)
                    await asyncio.sleep(0)
                if self.close:
                    return
        except OSError:
            return
        finally:
            sock.close()


GET: firecracker_args.Request = ("GET", "/", {})


async def test_answers_come_in_any_pieces_over_one_connection() -> None:
    body = b'{"state":"Paused"}'
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    server = Server(*[whole[at : at + 1] for at in range(len(whole))])
    api = Api(server.dial)
    for _ in range(3):
        assert (await api.ask(GET))["state"] == "Paused"
    assert server.dialled == 1
    api.close()
    empty = Server(b"HTTP/1.1 204 \r\nServer: x\r\nConnection: keep-alive\r\n\r\n")
    api = Api(empty.dial)
    assert await api.ask(("PUT", "/vsock", {"guest_cid": 3})) == {}
    head, _, content = bytes(empty.asked).partition(b"\r\n\r\n")
    assert head.startswith(b"PUT /vsock HTTP/1.1\r\n")
    assert json.loads(content) == {"guest_cid": 3}
    api.close()


async def test_a_refusal_is_its_own_words() -> None:
    body = b'{"fault_message":"no such drive"}'
    server = Server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    api = Api(server.dial)
    with pytest.raises(FirecrackerError, match="PUT /vsock: no such drive") as caught:
        await api.ask(("PUT", "/vsock", {"x": 1}))
    assert caught.value.status == 400
    api.close()


@pytest.mark.parametrize(
    ("pieces", "close", "error"),
    [
        ((b"not http at all\r\n\r\n",), False, VmmError),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12",), True, VmmDied),
        ((), True, VmmDied),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"a" * 4096,) * (MAX_ANSWER // 2048), False, VmmError),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", *[bytes(65_536)] * 8), False, VmmError),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), False, VmmError),
        ((), False, VmmTimeout),
    ],
)
async def test_what_is_no_answer_ends_the_connection(
    pieces: tuple[bytes, ...], close: bool, error: type[VmmError]
) -> None:
    server = Server(*pieces, close=close)
    api = Api(server.dial)
    with pytest.raises(error):
        await api.ask(GET, within=0.5)
    # The next request has a connection of its own: nothing that comes late is taken for its answer.
    with pytest.raises(VmmError):
        await api.ask(GET, within=0.1)
    assert server.dialled == 2
    api.close()


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff\xfe", b"[" * 3000, b'"text"'])
async def test_a_body_that_is_no_object_is_empty(body: bytes) -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    api = Api(server.dial)
    assert await api.ask(GET) == {}
    api.close()


# -- the guest channel


class Jail:
    """Plays a shim whose VMM's vsock answers with these octets, one list for each connection; None refuses to connect."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.heard: list[bytes] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def dial(self, _: int) -> socket.socket:
        answer = self.answers.pop(0)
        if answer is None:
            raise ShimError("refused", "nobody listens")
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        self.tasks.append(asyncio.get_running_loop().create_task(self._serve(theirs, answer)))
        return ours

    async def _serve(self, sock: socket.socket, answer: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.heard.append(await loop.sock_recv(sock, 64))
        await loop.sock_sendall(sock, answer)
        if not answer.startswith(b"OK "):
            sock.close()

    async def close(self) -> None:
        """Nothing to close."""


def machine(tmp_path: Path, jail: Jail) -> FirecrackerVm:
    boot = BootFiles(kernel=tmp_path, initrd=tmp_path, base=tmp_path, upper=tmp_path, cmdline="")
    spec = VmSpec(sandbox_id="a" * 20, generation=1, shape=Shape(), boot=boot, folder=tmp_path)
    vm = FirecrackerVm(spec, tmp_path, None, Kind("played", "hardware"))  # type: ignore[arg-type]
    vm._shim = jail  # type: ignore[assignment]
    return vm


async def test_the_agent_is_reached_as_soon_as_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker_vm, "_AGENT_AGAIN_S", 0.0)
    jail = Jail(None, b"", b"NO\n", b"O" * 500, b"OK 1073741824\nHWF1")
    vm = machine(tmp_path, jail)
    sock = await asyncio.wait_for(vm.agent_socket(), 10)
    assert set(jail.heard) == {b"CONNECT 1000\n"}
    # What came behind the line belongs to the channel, and is still there.
    assert await asyncio.get_running_loop().sock_recv(sock, 64) == b"HWF1"
    sock.close()


async def test_a_shim_that_is_gone_ends_the_dialling(tmp_path: Path) -> None:
    class Gone(Jail):
        async def dial(self, _: int) -> socket.socket:
            raise VmmDied("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await machine(tmp_path, Gone()).agent_socket()


# -- which releases may run


@pytest.mark.parametrize(
    ("version", "firecracker", "jailer"),
    [
        ("1.12.1", [], ["CVE-2026-1386"]),
        ("1.13.0", ["CVE-2026-5747"], ["CVE-2026-1386"]),
        ("1.13.2", ["CVE-2026-5747"], []),
        ("1.14.0", ["CVE-2026-5747"], ["CVE-2026-1386"]),
        ("1.14.3", ["CVE-2026-5747"], []),
        ("1.14.4", [], []),
        ("1.15.0", ["CVE-2026-5747"], []),
        ("1.15.1", [], []),
    ],
)
def test_a_release_with_a_known_hole_is_refused_unless_it_is_allowed_by_name(
    version: str, firecracker: list[str], jailer: list[str]
) -> None:
    for program, names in (("firecracker", firecracker), ("jailer", jailer)):
        assert [hole.name for hole in advisories.holes(version, program)] == names
        installed = Installed(Path("/x"), version)
        if names:
            with pytest.raises(FirecrackerRefused, match=names[0]):
                firecracker_install.check(installed, ("CVE-0000-0000",), program=program)
        firecracker_install.check(installed, names, program=program)


def test_an_old_release_is_refused_whatever_is_allowed() -> None:
    with pytest.raises(FirecrackerRefused, match=r"older than 1\.12"):
        firecracker_install.check(Installed(Path("/x"), "1.11.0"), ("CVE-2026-5747",))


def program(folder: Path, script: str) -> Path:
    path = folder / "firecracker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_program_is_found_where_it_is_said_to_be_and_on_path(tmp_path: Path) -> None:
    with pytest.raises(VmmMissing, match="the configuration names"):
        firecracker_install.find(tmp_path / "nothing")
    with pytest.raises(VmmMissing, match="not installed"):
        firecracker_install.find(path=str(tmp_path))
    binary = program(tmp_path, "echo Firecracker v1.14.4; echo; echo exiting")
    for found in (firecracker_install.find(binary), firecracker_install.find(path=str(tmp_path))):
        assert (found.binary, found.version, found.numbers) == (binary, "1.14.4", (1, 14, 4))
    for script, words in (
        ("exit 1", "does not run"),
        ("echo hello", "does not say"),
        ("printf '\\377'", "does not run"),
    ):
        program(tmp_path, script)
        with pytest.raises(VmmError, match=words):
            firecracker_install.find(binary)


# -- which driver


def host(monkeypatch: pytest.MonkeyPatch, *, version: str | None, works: bool | None) -> None:
    def find(configured: Path | None = None) -> Installed:
        if version is None:
            raise VmmMissing("firecracker is not installed.")
        return Installed(configured or Path("/firecracker"), version)

    async def verdict(*_: object) -> Verdict | None:
        if works is None:
            return None
        return Verdict(
            boot_id="b", vmm_sha256="v", kernel_sha256="k", works=works, detail="what was found", taken_at=0.0
        )

    monkeypatch.setattr(choice, "YAMA", Path("/nonexistent"))
    monkeypatch.setattr(firecracker_install, "find", find)
    monkeypatch.setattr(firecracker_probe, "verdict", verdict)


@pytest.mark.parametrize(
    ("driver", "version", "works", "before", "expected", "why"),
    [
        ("auto", "1.14.4", True, None, "firecracker", "KVM runs guests"),
        ("auto", "1.14.4", False, None, "qemu", "what was found"),
        ("auto", "1.14.4", None, None, "qemu", "not probed"),
        ("auto", "1.14.3", True, None, "qemu", "CVE-2026-5747"),
        ("auto", None, True, None, "qemu", "not installed"),
        ("auto", "1.14.4", True, "qemu", "qemu", "made with it"),
        ("auto", "1.14.4", True, "firecracker", "firecracker", "KVM runs guests"),
        ("auto", None, True, "firecracker", None, "not installed"),
        ("qemu", "1.14.4", True, None, "qemu", "by name"),
        ("qemu", "1.14.4", True, "firecracker", None, "made with firecracker"),
        ("firecracker", "1.14.4", True, None, "firecracker", "by name"),
        ("firecracker", "1.14.4", False, None, None, "what was found"),
        ("firecracker", "1.14.4", True, "qemu", None, "made with qemu"),
    ],
)
async def test_the_driver_is_what_was_asked_for_and_can_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Any,
    version: str | None,
    works: bool | None,
    before: str | None,
    expected: str | None,
    why: str,
) -> None:
    host(monkeypatch, version=version, works=works)
    if before is not None:
        (tmp_path / "sandboxes" / "one").mkdir(parents=True)
        (tmp_path / choice.MARK).write_text(json.dumps({"driver": before}))
    if expected is None:
        with pytest.raises(VmmError, match=why):
            await choice.choose(VmmPolicy(driver=driver), tmp_path, tmp_path)
        return
    found = await choice.choose(VmmPolicy(driver=driver), tmp_path, tmp_path)
    assert found.driver == expected
    assert why in found.why


@pytest.mark.parametrize(
    ("scope", "expected"), [("0", "firecracker"), ("1", "firecracker"), ("2", "qemu"), ("3", "qemu")]
)
async def test_a_host_that_hides_the_memory_of_a_child_has_no_firecracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str, expected: str
) -> None:
    host(monkeypatch, version="1.14.4", works=True)
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(choice, "YAMA", tmp_path / "scope")
    found = await choice.choose(VmmPolicy(), tmp_path, tmp_path)
    assert found.driver == expected
    assert ("ptrace scope" in found.why) == (expected == "qemu")


def test_a_node_without_sandboxes_is_bound_to_nothing(tmp_path: Path) -> None:
    (tmp_path / choice.MARK).write_text('{"driver": "firecracker"}')
    assert choice.used_before(tmp_path) is None
    (tmp_path / "sandboxes" / "one").mkdir(parents=True)
    assert choice.used_before(tmp_path) == "firecracker"
    for damaged in ("{", "[]", '{"other": 1}'):
        (tmp_path / choice.MARK).write_text(damaged)
        assert choice.used_before(tmp_path) == "qemu"


# -- files


def bzimage(payload: bytes) -> bytes:
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 64, len(payload))
    return bytes(head) + bytes(64) + payload


@pytest.mark.parametrize("pack", [lambda octets: gzip.compress(octets) + bytes(4), lzma.compress, bytes])
def test_the_kernel_is_taken_out_once(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    elf = b"\x7fELF" + os.urandom(1000)
    (tmp_path / "vmlinuz").write_bytes(bzimage(pack(elf)))
    kernels = kernel_elf.Kernels(tmp_path / "kernels")
    found = kernels.elf(tmp_path / "vmlinuz")
    assert found.read_bytes() == elf
    assert kernels.elf(tmp_path / "vmlinuz") == found
    assert kernels.elf(found) == found
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"text" * 500, bzimage(b"packed"), bzimage(gzip.compress(b"no kernel") + bytes(4))]
)
def test_what_holds_no_kernel_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vmlinuz").write_bytes(content)
    with pytest.raises(VmmError, match="vmlinuz"):
        kernel_elf.Kernels(tmp_path / "kernels").elf(tmp_path / "vmlinuz")


def capture(folder: Path, base: bytes, runs: list[tuple[int, bytes]]) -> Path:
    folder.mkdir()
    (folder / captures.BASE).write_bytes(base)
    head = struct.pack("<8sQQQ", b"HWCAP1\0\0", 4096, len(base), len(runs))
    table = b"".join(struct.pack("<QQ", first, len(octets) // 4096) for first, octets in runs)
    (folder / captures.DIFF).write_bytes(head + table + b"".join(octets for _, octets in runs))
    return folder


def test_changes_are_merged_into_a_copy_and_never_into_the_base(tmp_path: Path) -> None:
    base = bytes(8 * 4096) + os.urandom(8 * 4096)
    runs = [(1, os.urandom(4096)), (9, os.urandom(3 * 4096))]
    folder = capture(tmp_path / "one", base, runs)
    merged = captures.merged_memory(folder)
    expected = bytearray(base)
    for first, octets in runs:
        expected[first * 4096 : first * 4096 + len(octets)] = octets
    assert merged.read_bytes() == expected
    assert (folder / captures.BASE).read_bytes() == base
    assert merged.stat().st_mode & 0o777 == 0o444
    assert captures.merged_memory(folder) == merged
    assert {path.name for path in folder.iterdir()} == {captures.BASE, captures.DIFF, captures.MERGED}
    unchanged = capture(tmp_path / "two", base, [])
    assert (unchanged / captures.DIFF).read_bytes() == captures.no_changes(len(base))
    assert captures.merged_memory(unchanged) == unchanged / captures.BASE


@pytest.mark.parametrize("cut", [0, 10, 31, 40, 60, 4096])
def test_a_list_of_changes_that_is_cut_is_refused(tmp_path: Path, cut: int) -> None:
    folder = capture(tmp_path / "one", bytes(16 * 4096), [(1, os.urandom(4096)), (3, os.urandom(4096))])
    whole = (folder / captures.DIFF).read_bytes()
    (folder / captures.DIFF).write_bytes(whole[:cut])
    with pytest.raises(SnapshotMismatch):
        captures.merged_memory(folder)
    assert {path.name for path in folder.iterdir()} == {captures.BASE, captures.DIFF}


@pytest.mark.parametrize(
    "head",
    [
        (b"HWCAP2\0\0", 4096, 65_536, 0),
        (b"HWCAP1\0\0", 0, 65_536, 0),
        (b"HWCAP1\0\0", 4095, 65_536, 0),
        (b"HWCAP1\0\0", 4096, 2**60, 0),
        (b"HWCAP1\0\0", 4096, 65_536, 2**40),
    ],
)
def test_a_list_of_changes_that_makes_no_sense_is_refused(tmp_path: Path, head: tuple[bytes, int, int, int]) -> None:
    folder = capture(tmp_path / "one", bytes(65_536), [])
    (folder / captures.DIFF).write_bytes(struct.pack("<8sQQQ", *head))
    with pytest.raises(SnapshotMismatch, match="damaged"):
        captures.merged_memory(folder)


def test_a_run_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    folder = capture(tmp_path / "one", bytes(65_536), [(15, os.urandom(2 * 4096))])
    with pytest.raises(SnapshotMismatch, match="damaged"):
        captures.merged_memory(folder)


def test_zeros_take_no_space(tmp_path: Path) -> None:
    content = bytes(4 * MIB) + os.urandom(MIB) + bytes(2 * MIB) + b"end"
    path = tmp_path / "memory"
    path.write_bytes(content)
    path.chmod(0o640)
    disk.without_zeros(path)
    assert path.read_bytes() == content
    assert path.stat().st_blocks * 512 < 2 * MIB
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["memory"]


def test_of_many_kernels_the_newest_stay(tmp_path: Path) -> None:
    kernels = kernel_elf.Kernels(tmp_path / "kernels")
    for number in range(kernel_elf.KEPT + 3):
        (tmp_path / f"kernel-{number}").write_bytes(bzimage(b"\x7fELF" + bytes([number])))
        last = kernels.elf(tmp_path / f"kernel-{number}")
    assert last.exists()
    assert len(list((tmp_path / "kernels").iterdir())) == kernel_elf.KEPT


def test_a_monitor_that_cannot_be_used_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, version="1.14.4", works=False)
    asked = Settings(data_dir=tmp_path, vmm=VmmPolicy(driver="firecracker"))
    with pytest.raises(Unavailable, match="what was found") as caught:
        profile.check_vmm(asked, tmp_path)
    assert caught.value.code == "vmm_unusable"
    host(monkeypatch, version="1.14.4", works=True)
    profile.check_vmm(asked, tmp_path)
    # Production goes by the monitor that is used, not by QEMU's verdict.
    profile.check_isolation(replace(asked, profile="production"), tmp_path)


def test_a_raw_disk_is_made_once_and_the_other_kind_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "template.raw"
    source.write_bytes(bytes(MIB) + b"data" + bytes(MIB))
    made = disk.prepare_raw(tmp_path / "one", source, 8 * MIB)
    assert made.size() == 8 * MIB
    assert made.top.read_bytes()[MIB : MIB + 4] == b"data"
    with made.top.open("r+b") as file:
        file.write(b"what the guest wrote")
    for size in (8 * MIB, MIB, 16 * MIB):  # it grows with its sandbox, and never shrinks
        again = disk.prepare_raw(tmp_path / "one", source, size)
        assert again.size() == max(size, 8 * MIB)
        assert again.top.read_bytes().startswith(b"what the guest wrote")
    with pytest.raises(VmmError, match="made for Firecracker"):
        disk.prepare(tmp_path / "one", source, None, 8 * MIB)
    disk.prepare(tmp_path / "two", source, None, 8 * MIB)
    with pytest.raises(VmmError, match="only QEMU can use"):
        disk.prepare_raw(tmp_path / "two", source, 8 * MIB)
