"""Whether a VMM ended is the shim's word; that we could not ask is none."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hatchway.domain.shapes import Shape
from hatchway.node.vmm import seqpacket, shim_vm
from hatchway.node.vmm.qemu_vm import QemuVm
from hatchway.node.vmm.qmp import Qmp
from hatchway.node.vmm.seam import BootFiles, ExitStatus, VmmDied, VmmError, VmmTimeout, VmSpec
from hatchway.node.vmm.shim import ShimClient
from hatchway.node.vmm.shim_vm import Kind
from hatchway.wire.launcher import VmUsage


class Launcher:
    """Counts nothing."""

    async def inspect_vm(self, _: str) -> VmUsage:
        return VmUsage()


def machine(tmp_path: Path) -> QemuVm:
    boot = BootFiles(kernel=tmp_path, initrd=tmp_path, base=tmp_path, upper=tmp_path, cmdline="")
    spec = VmSpec(sandbox_id="a" * 20, generation=1, shape=Shape(), boot=boot, folder=tmp_path)
    return QemuVm(spec, tmp_path, Launcher(), Kind("played", "emulated"))  # type: ignore[arg-type]


class Shim:
    """Answers `watch` with what it is given, one after the other."""

    def __init__(self, *answers: ExitStatus | VmmError) -> None:
        self.answers = list(answers)

    async def watch(self) -> ExitStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, VmmError):
            raise answer
        return answer

    async def log(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    "trouble", [VmmTimeout("the shim takes no connection"), VmmError("Too many open files"), VmmError("not understood")]
)
async def test_a_shim_that_cannot_be_asked_now_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: VmmError
) -> None:
    monkeypatch.setattr(shim_vm, "WATCH_AGAIN_S", 0.0)
    vm, shim = machine(tmp_path), Shim(trouble, trouble, ExitStatus(code=0))
    await asyncio.wait_for(vm._watch(shim), 10)  # type: ignore[arg-type]
    assert shim.answers == []
    assert vm.ended.is_set()
    assert vm.exit == ExitStatus(code=0, guest_shutdown=True)


async def test_a_shim_that_is_gone_is_the_end(tmp_path: Path) -> None:
    vm = machine(tmp_path)
    await asyncio.wait_for(vm._watch(Shim(VmmDied("gone"))), 10)  # type: ignore[arg-type]
    assert vm.exit == ExitStatus()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_a_node_without_descriptors_takes_nothing_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def connect(_: Path) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(seqpacket, "connect", connect)
    with pytest.raises(VmmError) as caught:
        await ShimClient.connect(tmp_path / "shim.sock")
    assert not isinstance(caught.value, VmmDied)

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(VmmError) as caught:
        await Qmp.connect(tmp_path / "qmp.sock")
    assert not isinstance(caught.value, VmmDied)


async def test_a_socket_that_is_not_there_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(VmmDied):
        await ShimClient.connect(tmp_path / "shim.sock")
    with pytest.raises(VmmDied):
        await Qmp.connect(tmp_path / "qmp.sock")


async def test_a_control_socket_that_closed_first_waits_for_the_shims_word(tmp_path: Path) -> None:
    vm = machine(tmp_path)
    asking = asyncio.create_task(vm.status())
    await asyncio.sleep(0)
    vm._ended_as(ExitStatus(code=0))
    with pytest.raises(VmmDied) as caught:
        await asking
    assert caught.value.status == ExitStatus(code=0, guest_shutdown=True)
