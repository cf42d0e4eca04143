"""What slots dropped, as audit records: each packet in one of them, whatever is restarted, refused or put back meanwhile."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.domain.errors import Unavailable
from hatchway.launcher.ruleset import DROPS
from hatchway.node.egress.drops import NAME, Drops
from hatchway.node.vmm.seam import LaunchRefused
from hatchway.wire.audit import Entry
from hatchway.wire.launcher import Dropped


@dataclass
class Machine:
    folder: Path
    sandbox_id: str = "a" * 20
    project: str = "p"
    generation: int = 3
    wanted: bool = True


@dataclass
class Kernel:
    """Counts as they are told by a launcher."""

    packets: dict[str, int] = field(default_factory=dict)
    restored: int = 0
    gone: bool = False

    async def dropped(self, sandbox_id: str) -> Dropped:
        assert sandbox_id == "a" * 20
        if self.gone:
            raise LaunchRefused("unknown", "no VM of this id and generation lives")
        return Dropped(packets=dict(self.packets), restored=self.restored)


@dataclass
class Journal:
    entries: list[Entry] = field(default_factory=list)
    full: bool = False

    def record(self, entry: Entry) -> None:
        if self.full:
            raise Unavailable("audit_unavailable", "What happens cannot be recorded now.", "Wait.")
        self.entries.append(entry)

    def counted(self) -> list[tuple[str, str, int]]:
        told = [(entry.kind, entry.reason, entry.count) for entry in self.entries]
        self.entries.clear()
        return told


async def test_each_packet_is_in_one_record(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel(), Journal()
    drops = Drops(kernel, journal.record)
    await drops.look(machine)
    assert journal.counted() == []
    kernel.packets = {"source": 2, "vlan": 0}
    await drops.look(machine)
    (entry,) = journal.entries
    assert (entry.sandbox_id, entry.project, entry.generation, entry.actor, entry.decision) == (
        "a" * 20,
        "p",
        3,
        "sandbox",
        "denied",
    )
    assert journal.counted() == [("egress.frames", "source", 2)]
    kernel.packets = {"source": 2, "vlan": 5}
    await Drops(kernel, journal.record).look(machine)  # another node process
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "vlan", 5)]


async def test_counts_that_begin_anew_with_the_rules_are_told_with_the_change(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"udp": 9}), Journal()
    drops = Drops(kernel, journal.record)
    await drops.look(machine)
    journal.counted()
    kernel.packets, kernel.restored = {"udp": 1}, 1
    await drops.look(machine)
    assert [entry.actor for entry in journal.entries] == ["launcher", "sandbox"]
    assert journal.counted() == [("egress.rules", "rules_changed", 1), ("egress.frames", "udp", 1)]
    kernel.restored = 0  # the launcher was started again
    await drops.look(machine)
    assert journal.counted() == []


async def test_what_the_journal_does_not_take_is_recorded_later(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"arp": 4}), Journal(full=True)
    drops = Drops(kernel, journal.record)
    await drops.look(machine)
    journal.full = False
    kernel.packets = {"arp": 6}
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "arp", 6)]


async def test_a_journal_that_is_full_in_the_middle_has_nothing_twice(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"arp": 4, "udp": 2}), Journal()
    drops = Drops(kernel, journal.record)

    def one(entry: Entry) -> None:
        Journal.record(journal, entry)
        journal.full = True

    await Drops(kernel, one).look(machine)
    assert journal.counted() == [("egress.frames", "arp", 4)]
    journal.full = False
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "udp", 2)]


async def test_the_counts_of_a_machine_that_ended_are_not_recorded_once_more(tmp_path: Path) -> None:
    """The launcher tells them until it forgets the machine, and whoever goes round the machines may have it in hand still."""
    machine, kernel, journal = Machine(tmp_path), Kernel({"mac": 7}), Journal()
    drops = Drops(kernel, journal.record)
    machine.wanted = False
    await drops.last(machine)
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "mac", 7)]


async def test_rules_that_were_put_back_count_from_nothing_also_where_they_counted_more(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"udp": 5}), Journal()
    drops = Drops(kernel, journal.record)
    await drops.look(machine)
    journal.counted()
    kernel.packets, kernel.restored = {"udp": 7}, 2
    await drops.look(machine)
    assert journal.counted() == [("egress.rules", "rules_changed", 2), ("egress.frames", "udp", 7)]
    kernel.packets, kernel.restored = {"udp": 8}, 1  # by a launcher that was started again
    await drops.look(machine)
    assert journal.counted() == [("egress.rules", "rules_changed", 1), ("egress.frames", "udp", 8)]


async def test_the_next_slot_of_a_sandbox_counts_from_nothing(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"mac": 7}), Journal()
    drops = Drops(kernel, journal.record)
    machine.wanted = False
    await drops.last(machine)
    assert journal.counted() == [("egress.frames", "mac", 7)]
    assert not (tmp_path / NAME).exists()
    machine.wanted = True
    kernel.packets = {"mac": 8}
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "mac", 8)]


async def test_one_that_is_gone_or_has_a_spoiled_note_disturbs_nobody(tmp_path: Path) -> None:
    machine, kernel, journal = Machine(tmp_path), Kernel({"mac": 1}, gone=True), Journal()
    drops = Drops(kernel, journal.record)
    await drops.look(machine)
    await drops.last(Machine(tmp_path / "gone"))
    (tmp_path / NAME).write_text("{")
    kernel.gone = False
    await drops.look(machine)
    assert journal.counted() == [("egress.frames", "mac", 1)]


def test_every_reason_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \|$", page.partition("| `reason` of `egress.frames`")[2].partition("\n## ")[0], re.M
    )
    assert dict(rows) == DROPS
