"""The network slot of a VM: the sockets that the gateway gets, what holds when processes are killed, and rules that somebody removes.

Needs root, /dev/net/tun and nft: without them a launcher gives VMs no network, which `test_launcher` shows.
"""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_harness import Site, build, python_for_anybody, record_of, site, until
from slot_harness import Guest, inside

from hatchway.bench import slots as bench_slots
from hatchway.bench.options import Options
from hatchway.bench.slots import slots
from hatchway.domain.ids import new_id
from hatchway.node.egress.drops import Drops
from hatchway.node.vmm.seam import LaunchRefused
from hatchway.wire.launcher import VmRecord

IP_PKTINFO, IP_ORIGDSTADDR = 8, 20  # of linux/in.h


@pytest.fixture
async def here() -> AsyncIterator[Site]:
    assert os.geteuid() == 0, "these tests need root"
    async with site("--stock", "1", "--slots", "16") as made:
        assert (await made.client.hello()).network, made.log.read_text()
        yield made


async def sockets(here: Site, vm: VmRecord) -> list[socket.socket]:
    return [socket.socket(fileno=fd) for fd in await here.client.listeners(vm.sandbox_id, vm.generation)]


async def test_what_the_guest_dials_arrives_at_the_sockets_that_the_node_is_given(here: Site) -> None:
    vm = await here.start_vm()
    tcp, udp, dns = await sockets(here, vm)
    guest = await Guest.of(here, vm)
    with tcp, udp, dns, guest:
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        assert not os.get_blocking(tcp.fileno())
        for address, port in (("203.0.113.9", 443), ("10.200.0.1", 15001), ("198.18.3.4", 1)):
            await guest.connect(address, port)
            connection, peer = tcp.accept()
            with connection:
                assert peer[0] == "10.200.0.2"
                assert connection.getsockname() == (address, port)
        await guest.connect("192.0.2.53", 53)
        connection, _ = dns.accept()
        with connection:
            assert connection.getsockname() == ("192.0.2.53", 53)
        guest.ask("8.8.8.8", 4444, b"what")
        data, controls, _, peer = udp.recvmsg(512, 512)
        assert (data, peer) == (b"what", ("10.200.0.2", 4444))
        destinations = {kind: payload for level, kind, payload in controls if level == socket.IPPROTO_IP}
        assert socket.inet_ntoa(destinations[IP_ORIGDSTADDR][4:8]) == "8.8.8.8"
        # An answer comes from the address that was asked, which is no address of anybody's here.
        source = (0).to_bytes(4, "little") + socket.inet_aton("8.8.8.8") + bytes(4)
        udp.sendmsg([b"that"], [(socket.IPPROTO_IP, IP_PKTINFO, source)], 0, peer)
        assert await guest.answer() == ("8.8.8.8", 53, b"that")
        assert not any((await here.client.dropped(vm.sandbox_id)).packets.values())


async def test_the_next_vm_of_a_slot_has_a_namespace_and_sockets_of_its_own(here: Site) -> None:
    first = await here.start_vm()
    old = await sockets(here, first)
    before = os.stat(f"/proc/{first.shim_pid}/ns/net").st_ino
    await here.client.kill_vm(first.sandbox_id)
    await here.client.forget_vm(first.sandbox_id)
    vms = [await here.start_vm() for _ in range(2)]
    assert first.slot in {vm.slot for vm in vms}
    for vm in vms:
        assert os.stat(f"/proc/{vm.shim_pid}/ns/net").st_ino != before
        with await Guest.of(here, vm) as guest:
            await guest.connect("203.0.113.9", 80)
    for held in old:  # whoever kept the former ones hears nothing of the next
        with held, pytest.raises(BlockingIOError):
            held.recv(1) if held.type == socket.SOCK_DGRAM else os.close(held._accept()[0])


async def test_listeners_are_refused_for_what_has_none(here: Site) -> None:
    vm, without = await here.start_vm(generation=5), await here.start_vm(network=False)
    for sandbox_id, generation, code in (
        (vm.sandbox_id, 4, "unknown"),
        (vm.sandbox_id, 6, "unknown"),
        (new_id(), 1, "unknown"),
        (without.sandbox_id, without.generation, "no_network"),
    ):
        with pytest.raises(LaunchRefused) as refused:
            await here.client.listeners(sandbox_id, generation)
        assert refused.value.code == code
    await here.client.kill_vm(vm.sandbox_id)
    with pytest.raises(LaunchRefused) as refused:
        await here.client.listeners(vm.sandbox_id, 5)
    assert refused.value.code == "unknown"
    assert (await here.client.dropped(vm.sandbox_id)).packets["source"] == 0  # it is kept until the VM is forgotten
    await here.client.forget_vm(vm.sandbox_id)
    with pytest.raises(LaunchRefused) as refused:
        await here.client.dropped(vm.sandbox_id)
    assert refused.value.code == "unknown"


async def test_connections_wait_while_launcher_and_node_are_gone(here: Site) -> None:
    vm = await here.start_vm()
    guest = await Guest.of(here, vm)
    with guest:
        for held in await sockets(here, vm):
            held.close()
        here.kill9()
        await guest.connect("203.0.113.9", 80)
        here.start()
        tcp, udp, dns = await sockets(here, vm)
        with tcp, udp, dns:
            connection, _ = tcp.accept()
            with connection:
                assert connection.getsockname() == ("203.0.113.9", 80)


async def test_rules_that_somebody_removes_are_put_back(here: Site) -> None:
    vm = await here.start_vm()
    guest = await Guest.of(here, vm)
    tcp, udp, dns = await sockets(here, vm)
    with guest, tcp, udp, dns:
        for turn in range(1, 3):
            inside(vm, "nft", "flush", "ruleset")
            await until_restored(here, vm, turn)
            guest.frame(guest.syn("203.0.113.9", 80, source="192.0.2.1"))
            assert (await here.client.dropped(vm.sandbox_id)).packets["source"] == 1
            await guest.connect("203.0.113.9", 80 + turn)
            tcp.accept()[0].close()
        assert record_of(here, vm)["rules"] != vm.rules
        # The next launcher takes the state for the right one, and sees what happens while there is none.
        here.kill9()
        here.start()
        await guest.connect("203.0.113.9", 90)
        assert (await here.client.dropped(vm.sandbox_id)).restored == 0
        here.kill9()
        inside(vm, "nft", "delete", "table", "netdev", "guest")
        here.start()
        await until_restored(here, vm, 1)
        await guest.connect("203.0.113.9", 91)


async def test_a_launcher_of_another_release_puts_its_own_rules_in_place(here: Site) -> None:
    vm = await here.start_vm()
    here.kill9()
    record = here.run / "vm" / vm.sandbox_id / "launch.json"
    record.write_text(record.read_text().replace(f'"ruleset":{vm.ruleset}', f'"ruleset":{vm.ruleset ^ 1}'))
    here.start()
    await until_restored(here, vm, 1)
    assert record_of(here, vm)["ruleset"] == vm.ruleset
    with await Guest.of(here, vm) as guest:
        await guest.connect("203.0.113.9", 80)


async def until_restored(here: Site, vm: VmRecord, times: int) -> None:
    async with asyncio.timeout(30):
        while (await here.client.dropped(vm.sandbox_id)).restored < times:
            await asyncio.sleep(0.01)


async def test_what_is_dropped_becomes_records(here: Site, tmp_path: Path) -> None:
    vm = await here.start_vm()
    told: list[tuple[str, str, int]] = []
    drops = Drops(here.client, lambda entry: told.append((entry.kind, entry.reason, entry.count)))
    machine = Machine(vm.sandbox_id, "p", vm.generation, tmp_path)
    with await Guest.of(here, vm) as guest:
        for _ in range(3):
            guest.frame(guest.syn("203.0.113.9", 80, source="192.0.2.1"))
        guest.ask("203.0.113.9", 4444, b"x", port=443)
        await guest.connect("203.0.113.9", 80)  # and what came before it was judged
        await drops.look(machine)
        assert told == [("egress.frames", "source", 3), ("egress.frames", "udp", 1)]
        inside(vm, "nft", "flush", "ruleset")
        await until_restored(here, vm, 1)
        guest.frame(guest.syn("203.0.113.9", 80, source="192.0.2.1"))
        await guest.connect("203.0.113.9", 81)
    await here.client.kill_vm(vm.sandbox_id)
    await drops.last(machine)
    assert told[2:] == [("egress.rules", "rules_changed", 1), ("egress.frames", "source", 1)]


@dataclass
class Machine:
    """What the node knows of a sandbox, as far as its drops go."""

    sandbox_id: str
    project: str
    generation: int
    folder: Path
    wanted: bool = True


async def test_a_network_whose_rules_cannot_be_put_back_stays_down(here: Site) -> None:
    vm = await here.start_vm()
    guest = await Guest.of(here, vm)
    with guest:
        await guest.connect("203.0.113.9", 80)
        here.shim.unlink()  # what enters the namespace
        inside(vm, "nft", "flush", "ruleset")

        async def refusal() -> str:
            try:
                for fd in await here.client.listeners(vm.sandbox_id, vm.generation):
                    os.close(fd)
            except LaunchRefused as error:
                return error.code
            return ""

        async with asyncio.timeout(30):
            while await refusal() != "no_network":
                await asyncio.sleep(0.01)
        assert "UP" not in inside(vm, "ip", "-br", "link", "show", "dev", "tap0").split("<")[1].split(">")[0].split(",")
        assert not await guest.reached("203.0.113.9", 81)
    await until(lambda: "has no network any more" in here.log.read_text(), "it was said")


async def test_a_slot_stands_as_it_must(here: Site) -> None:
    vm = await here.start_vm()
    for name, value in (
        ("ipv4/ip_forward", "0"),
        ("ipv4/conf/tap0/rp_filter", "1"),
        ("ipv4/conf/tap0/accept_redirects", "0"),
        ("ipv4/conf/tap0/accept_source_route", "0"),
        ("ipv6/conf/tap0/disable_ipv6", "1"),
        ("ipv6/conf/tap0/accept_ra", "0"),
    ):
        assert inside(vm, "cat", f"/proc/sys/net/{name}").strip() == value, name
    assert [line.split()[1].rstrip(":") for line in inside(vm, "ip", "-o", "link").splitlines()] == ["lo", "tap0"]
    assert inside(vm, "ip", "route") == "10.200.0.0/24 dev tap0 proto kernel scope link src 10.200.0.1 \n"
    assert "02:fc:00:00:00:02 PERMANENT" in inside(vm, "ip", "neigh", "show", "dev", "tap0")


async def test_without_root_a_network_is_the_same_where_the_device_may_be_opened() -> None:
    """In a mount namespace of its own the launcher finds the device with the rights that distributions give it."""
    here = Site("--stock", "1")
    node = here.top / "tun"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(10, 200))
    node.chmod(0o666)
    anybody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *python_for_anybody()]
    here.command = ["unshare", "-m", "sh", "-c", f'mount --bind {node} /dev/net/tun && exec "$@"', "sh", *anybody]
    for path in (here.top, *here.top.rglob("*")):
        if path != node:
            os.chown(path, 65534, 65534)
    here.client_uid = 65534
    try:
        here.start()
        with here.acting():
            hello = await here.client.hello()
            assert hello.rootless
            assert hello.network, hello.warnings
            vm = await here.start_vm()
        guest = await Guest.of(here, vm)
        with guest:
            with here.acting():
                tcp, udp, dns = await sockets(here, vm)
            with tcp, udp, dns:
                await guest.connect("203.0.113.9", 443)
                connection, _ = tcp.accept()
                with connection:
                    assert connection.getsockname() == ("203.0.113.9", 443)
                guest.frame(guest.syn("203.0.113.9", 80, source="10.200.0.77"))
                inside(vm, "nft", "flush", "ruleset")
                with here.acting():
                    await until_restored(here, vm, 1)
                await guest.connect("203.0.113.9", 444)
                guest.frame(guest.syn("203.0.113.9", 80, source="10.200.0.77"))
                await guest.connect("203.0.113.9", 445)
                with here.acting():
                    assert (await here.client.dropped(vm.sandbox_id)).packets["source"] == 1
    finally:
        await here.clean_up()


def test_the_bench_of_slots_measures_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCHWAY_LIBEXEC", str(build()))
    monkeypatch.setattr(bench_slots, "MANY", 4)
    monkeypatch.setattr(bench_slots, "MEMORY_RUNS", 1)
    made, claimed, kernel = slots(Options(tmp_path, runs=1))
    assert (made.metric, claimed.metric, claimed.floor) == ("slot_made", "slot_claimed", made.value)
    assert claimed.value > 0
    assert kernel.metric == "slot_kernel"
