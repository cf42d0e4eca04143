"""The real QEMU in the jail: it starts there with its network and its own filter, and its memory is captured and injected."""

import os
import time
from pathlib import Path

import pytest
from launcher_harness import BUILD, Site, site

from hatchway.node.vmm import machines, tree
from hatchway.node.vmm.qmp import Qmp, command
from hatchway.wire.launcher import VmRecord

pytestmark = pytest.mark.vm
MEMORY_MIB = 256
WORD = 0x1122334455667788
ADDRESS = 0x2000000


async def start(here: Site, memory: int, *, marked: bool) -> VmRecord:
    argv = [tree.VMM_PATH, "-L", tree.FIRMWARE_PATH, "-nodefaults", "-no-user-config", "-display", "none", "-S"]
    argv += ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    argv += ["-M", "microvm,memory-backend=ram", "-accel", "tcg,tb-size=32", "-m", str(MEMORY_MIB)]
    argv += ["-object", f"memory-backend-file,id=ram,size={MEMORY_MIB}M,mem-path=/hatchway/ram,share=off"]
    argv += ["-chardev", "socket,id=qmp,fd=10,server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    argv += ["-netdev", "tap,id=net,fd=12", "-device", "virtio-net-device,netdev=net"]
    if marked:
        argv += ["-device", f"loader,addr={ADDRESS},data={WORD},data-len=8"]
    env = {
        "LD_LIBRARY_PATH": tree.LIBRARIES_PATH,
        "LD_PRELOAD": tree.PRELOAD_PATH,
        "QEMU_MODULE_DIR": tree.MODULES_PATH,
        "HATCHWAY_RAM_FD": "20",
    }
    before = time.perf_counter()
    vm = await here.start_vm(memory, argv=tuple(argv), env=env, memory_limit_mib=MEMORY_MIB + 256)
    print(f"start_vm answered after {(time.perf_counter() - before) * 1000:.1f} ms")
    return vm


async def word_at(qmp: Qmp, address: int) -> int:
    (text,) = await qmp.run(command("human-monitor-command", command_line=f"xp /1gx 0x{address:x}"), within=20.0)
    return int(text.split(":")[1], 16)


async def test_qemu_runs_in_the_jail_and_gives_and_takes_memory(tmp_path: Path) -> None:
    async with site("--stock", "2") as here:
        machine = machines.MACHINES["x86_64"]
        found = machines.find(machine, hardware=False)
        files = tree.gather(
            found.binary, firmware=found.firmware, modules=found.modules, preload=BUILD / "hatchway-ram.so"
        )
        here.root = tree.build(here.folder / "roots", files).folder
        baked = tmp_path / "memory"
        with baked.open("wb") as file:
            file.truncate(MEMORY_MIB << 20)
        memory = os.open(baked, os.O_RDONLY)
        source = await start(here, memory, marked=True)
        source_qmp = await Qmp.connect(here.run / "vm" / source.sandbox_id / "qmp.sock")
        assert await word_at(source_qmp, ADDRESS) == WORD
        shim = await here.shim_of(source)
        out = os.open(tmp_path / "capture", os.O_RDWR | os.O_CREAT)
        before = time.perf_counter()
        done = await shim.capture(20, out)
        print(f"captured {done.pages} pages in {(time.perf_counter() - before) * 1000:.1f} ms")
        assert 1 <= done.pages < (MEMORY_MIB << 20) // 4096 // 4

        child = await start(here, memory, marked=False)
        child_qmp = await Qmp.connect(here.run / "vm" / child.sandbox_id / "qmp.sock")
        assert await word_at(child_qmp, ADDRESS) == 0
        before = time.perf_counter()
        assert await (await here.shim_of(child)).inject(20, out) == done
        print(f"injected in {(time.perf_counter() - before) * 1000:.1f} ms")
        assert await word_at(child_qmp, ADDRESS) == WORD
        os.close(out)
        os.close(memory)
        # The file that both map was opened read-only: nothing of this is in it.
        with baked.open("rb") as file:
            file.seek(ADDRESS)
            assert file.read(8) == bytes(8)
        carrier = Path(f"/proc/{child.shim_pid}/net/dev").read_text()
        assert "tap0" in carrier

        await child_qmp.run(command("quit"), within=20.0)
        ended = await (await here.shim_of(child)).watch()
        assert (ended.code, ended.signal) == (0, None)
        child_qmp.close()
        source_qmp.close()
        assert (await shim.status()).exit is None, "the other one goes on"
        await shim.close()
