"""What is learned of a host, the machine table, QEMU's command line, advisories and the probe's parts that need no VM."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from hatchway.domain.host_limits import HostLimits
from hatchway.domain.shapes import Shape
from hatchway.node.vmm import advisories, machines, probe, qemu_args
from hatchway.node.vmm.host import Host
from hatchway.node.vmm.qemu_args import Layer, Parts
from hatchway.node.vmm.seam import VmmError, VmmMissing

CPU = """processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC
stepping	: 1
cpu MHz		: {mhz}
flags		: {flags}
bogomips	: {bogomips}

processor	: 1
cpu MHz		: 1.0
"""


def host(
    tmp_path: Path, mhz: str = "2596.138", bogomips: str = "5192.27", flags: str = "fpu sse", tsc: str = ""
) -> Host:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (proc / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (proc / "sys/kernel/random/boot_id").write_text("6f1e\n")
    (proc / "cpuinfo").write_text(CPU.format(mhz=mhz, flags=flags, bogomips=bogomips))
    if tsc:
        (sys / "devices/system/cpu/cpu0").mkdir(parents=True, exist_ok=True)
        (sys / "devices/system/cpu/cpu0/tsc_freq_khz").write_text(tsc)
    return Host.read(proc, sys)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the counter is x86's")
def test_counter_frequency_comes_from_the_best_source(tmp_path: Path) -> None:
    assert host(tmp_path).tsc_khz == 2_596_138
    # Frequency scaling: "cpu MHz" is the momentary clock and says nothing of the counter.
    assert host(tmp_path, mhz="800.000").tsc_khz == 2_596_135
    assert host(tmp_path, mhz="3900.1", tsc="2596140").tsc_khz == 2_596_140
    with pytest.raises(VmmError, match="bogomips"):
        host(tmp_path / "other", bogomips="?")


def test_cpu_digest_ignores_the_clock_and_sees_the_flags(tmp_path: Path) -> None:
    first = host(tmp_path)
    assert host(tmp_path, mhz="800.000").cpu_digest == first.cpu_digest
    assert host(tmp_path, flags="fpu sse avx").cpu_digest != first.cpu_digest
    assert first.boot_id == "6f1e"


def test_missing_vmm_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(VmmMissing, match=r"apt-get install .*qemu-system-x86"):
        machines.find(machines.machine_of("x86_64"), hardware=False, path=str(tmp_path))
    with pytest.raises(VmmMissing, match="riscv64"):
        machines.machine_of("riscv64")


def test_a_vmm_that_does_not_run_says_so(tmp_path: Path) -> None:
    fake = tmp_path / "qemu-system-x86_64"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(VmmError, match="does not run"):
        machines.find(machines.machine_of("x86_64"), hardware=False, path=str(tmp_path))


def parts(**changes: object) -> Parts:
    given: dict[str, object] = {
        "machine": machines.machine_of("x86_64"),
        "hardware": False,
        "shape": Shape(vcpus=2, memory_mib=512, disk_mib=1024),
        "layers": (Layer("raw"), Layer("qcow2")),
        "network": True,
        **changes,
    }
    return Parts(**given)  # type: ignore[arg-type]  # the test's own table of members


def devices(argv: tuple[str, ...]) -> list[str]:
    return [argv[at + 1] for at, word in enumerate(argv) if word in ("-device", "-M", "-cpu", "-smp", "-m")]


def test_a_restored_machine_has_the_devices_of_the_baked_one() -> None:
    booted = qemu_args.arguments(parts(share_memory=True, cmdline="quiet"))
    layered = (Layer("raw"), Layer("qcow2"), Layer("qcow2"))
    restored = qemu_args.arguments(parts(incoming=True, layers=layered))
    assert devices(booted) == devices(restored)
    assert "-kernel" in booted
    assert "-kernel" not in restored
    assert restored[-2:] == ("-incoming", "defer")


def test_only_the_bake_writes_memory_and_only_the_top_is_writable() -> None:
    for incoming in (True, False):
        argv = " ".join(qemu_args.arguments(parts(incoming=incoming)))
        assert "share=off" in argv
        assert "share=on" not in argv
    nodes = [
        word
        for word in qemu_args.arguments(parts(layers=(Layer("raw"), Layer("qcow2"), Layer("qcow2"))))
        if "node-name=" in word
    ]
    writable = [word for word in nodes if "read-only=off" in word]
    assert [word.split("node-name=")[1].split(",")[0] for word in writable] == ["upper-file", "upper"]
    assert "backing=layer1" in writable[1]


def test_no_path_of_the_host_and_no_balloon_reach_the_vmm() -> None:
    argv = " ".join(qemu_args.arguments(parts(cmdline="x")))
    assert "balloon" not in argv
    assert "free-page" not in argv
    assert "spawn=deny" in argv
    for path in ("/home", "/root", "/var", "/tmp", "/dev/kvm"):
        assert path not in argv


def test_bounds() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        qemu_args.arguments(parts(layers=(Layer("raw"), *[Layer("qcow2")] * 16)))
    small = qemu_args.translation_cache_mib(Shape(vcpus=1, memory_mib=256, disk_mib=512))
    assert 64 <= small < qemu_args.translation_cache_mib(Shape(vcpus=8, memory_mib=8192, disk_mib=512))


def test_kernel_command_line_has_the_counter_only_under_emulation() -> None:
    machine = machines.machine_of("x86_64")
    emulated = qemu_args.kernel_command_line(machine, "quiet", hardware=False, tsc_khz=2_500_000)
    assert "tsc_early_khz=2500000" in emulated
    assert emulated.endswith("quiet")
    assert "tsc_early_khz" not in qemu_args.kernel_command_line(machine, "quiet", hardware=True, tsc_khz=1)


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("7.2.22", []),
        ("7.2.10", ["CVE-2024-3446"]),
        ("7.2.8", ["CVE-2023-6693", "CVE-2024-3446"]),
        ("6.2.0", ["CVE-2023-6693", "CVE-2024-3446"]),
        ("8.1.5", ["CVE-2024-3446"]),
        ("8.2.3", []),
        ("9.0.0", []),
        ("10.0.3", []),
    ],
)
def test_advisories(version: str, names: list[str]) -> None:
    assert [advisory.name for advisory in advisories.affecting(version)] == names


# -- probe


def verdict(**changes: object) -> probe.Verdict:
    base = probe.Verdict(
        boot_id="b", vmm_sha256="v", kernel_sha256="k", works=True, detail="it came through", taken_at=1.0
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> machines.Installed:
    binary = tmp_path / "emulator"
    binary.write_bytes(b"#!/bin/sh\n")
    found = machines.Installed(
        machine=machines.machine_of("x86_64"), binary=binary, version="7.2.22", firmware=(), modules=()
    )
    monkeypatch.setattr(machines, "find", lambda *_, **__: found)
    return found


async def test_verdict_is_taken_once_per_boot_binary_and_kernel(
    tmp_path: Path, emulator: machines.Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bytes] = []

    async def tried(installed: machines.Installed, kernel: Path) -> tuple[bool, str]:
        tries.append(kernel.read_bytes())
        return kernel.read_bytes() == b"good", "as seen"

    monkeypatch.setattr(probe, "try_kvm", tried)
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"good")
    machine = emulator.machine
    assert not await probe.kvm_works(machine, tmp_path, None)
    assert await probe.kvm_works(machine, tmp_path, kernel)
    assert await probe.kvm_works(machine, tmp_path, kernel)
    assert await probe.kvm_works(machine, tmp_path, None)
    assert tries == [b"good"]
    kernel.write_bytes(b"bad")
    assert not await probe.kvm_works(machine, tmp_path, kernel)
    emulator.binary.write_bytes(b"#!/bin/false\n")
    assert not await probe.kvm_works(machine, tmp_path, kernel)
    assert tries == [b"good", b"bad", b"bad"]
    stored = msgspec.json.decode((tmp_path / probe.VERDICTS_FILE).read_bytes(), type=list[probe.Verdict])
    earlier = [msgspec.structs.replace(each, boot_id="an earlier boot") for each in stored]
    (tmp_path / probe.VERDICTS_FILE).write_bytes(msgspec.json.encode(earlier))
    assert await probe.kvm_verdict(machine, tmp_path, None) is None


async def test_damaged_verdicts_are_taken_anew(
    tmp_path: Path, emulator: machines.Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tried(*_: object) -> tuple[bool, str]:
        return True, "as seen"

    monkeypatch.setattr(probe, "try_kvm", tried)
    (tmp_path / probe.VERDICTS_FILE).write_bytes(b"{")
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"k")
    assert await probe.kvm_works(emulator.machine, tmp_path, kernel)


@pytest.mark.parametrize(
    ("files", "status", "word"),
    [
        ({"cgroup.controllers": "cpu memory pids io"}, "ok", "version 2"),
        ({"cgroup.controllers": "cpu io"}, "degraded", "Not enforced: memory, pids"),
        ({"memory/cgroup.procs": "", "cpu/cgroup.procs": "", "pids/cgroup.procs": ""}, "ok", "version 1"),
        ({"memory/cgroup.procs": ""}, "degraded", "Not enforced: cpu, pids"),
        ({}, "degraded", "not enforced"),
    ],
)
def test_cgroups(tmp_path: Path, files: dict[str, str], status: str, word: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    found = probe._cgroups(tmp_path)
    assert (found.status, word in found.detail) == (status, True)
    assert (found.remedy == "") == (status == "ok")


async def test_every_finding_that_is_not_ok_has_a_remedy(tmp_path: Path) -> None:
    found = await probe.examine(data=tmp_path / "not" / "yet", verdicts=tmp_path)
    assert [each.name for each in found][:2] == ["qemu", "kvm"]
    assert len({each.name for each in found}) == len(found) == 8
    for each in found:
        assert each.status == "ok" or each.remedy, each


def test_the_disk_is_bounded_in_every_way_of_starting() -> None:
    limits = HostLimits(disk_mib_s=3, disk_ops_s=7)
    for options in ({"incoming": True}, {"cmdline": "quiet"}, {"incoming": True, "devices_only": True}):
        argv = qemu_args.arguments(parts(limits=limits, **options))
        group = json.loads(next(word for word in argv if "throttle-group" in word and word.startswith("{")))
        assert group["limits"] == {
            "bps-total": 3 << 20,
            "bps-total-max": 12 << 20,
            "bps-total-max-length": 10,
            "iops-total": 7,
            "iops-total-max": 28,
            "iops-total-max-length": 10,
        }
        for node in (qemu_args.BASE_NODE, qemu_args.DISK_NODE):
            assert any(f"drive={node}," in word for word in argv)
    assert qemu_args.throttle_limits(HostLimits(disk_mib_s=0, disk_ops_s=0)) == {}
