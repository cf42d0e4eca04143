"""The template that everybody gets: built for real, booted, and held to what it promises."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from images_harness import Result, build, cache, seed, site

from hatchway.domain.shapes import DEFAULT_DISK_MIB, Shape
from hatchway.node.images import files, warm
from hatchway.node.images.bake import Baker
from hatchway.node.images.bakes import Bakes
from hatchway.node.images.store import Images, Release

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(os.geteuid() != 0, reason="building a template and starting jails need root"),
]

PROMISES = {
    "python": ("python --version && python3 -c 'print(6 * 7)'", "Python 3."),
    "pip": ("pip --version", "pip "),
    "venv": ("python3 -m venv v && v/bin/python -m pip --version", "/home/user/v/"),
    "git": (
        "git init -q r && cd r && echo hi > f && git add f && git -c user.name=a -c user.email=a@b.example commit -qm first && git log --format=%s",
        "first",
    ),
    "git daemon": (
        "git init -q --bare s && (git daemon --export-all --base-path=$HOME --listen=127.0.0.1 --port=9418 & "
        "p=$!; for i in $(seq 100); do git ls-remote git://127.0.0.1/s && echo served && break; sleep 0.1; done; kill $p)",
        "served",
    ),
    "curl": ("curl --version", "https"),
    "curl reads files": ("curl -s file:///etc/hostname", "box-7"),
    "sudo": ("sudo -n id -un", "root"),
    "user": ("id -un; id -u; id -gn; pwd; getent passwd user | cut -d: -f7", "user\n1000\nuser\n/home/user\n/bin/bash"),
    "tput": ("tput -T xterm cols", "80"),
    "realpath": ("realpath /bin/sh", "/usr/bin/"),
    "user attributes": (
        "touch x && python3 -c \"import os; os.setxattr('x', 'user.a', b'1'); print(os.getxattr('x', 'user.a'))\"",
        "b'1'",
    ),
    "attributes of shared files": (
        "sudo python3 -c \"import os; p = '/usr/bin/less'; os.setxattr(p, 'user.a', b'2'); print(os.getxattr(p, 'user.a'))\"",
        "b'2'",
    ),
    "home": ("echo a > ~/a && cat ~/a", "a"),
    "temporary files": ("echo b > /tmp/b && cat /tmp/b && stat -c %a /tmp", "b\n1777"),
    "user namespaces": ("unshare -Ur id -u", "0"),
    "moving shared folders": ("sudo mv /usr/share/perl /usr/share/perl-moved && ls -d /usr/share/perl-moved", "moved"),
    "host name": ("hostname; getent ahosts $(hostname) | head -1; cat /proc/sys/kernel/hostname", "box-7"),
    "locale": ("python3 -c \"print('\\u00e9')\"; locale charmap", "é\nUTF-8"),
    "ps": ("ps -o user= -p $$; :", "user"),
    "memory resume can be told from a boot": ("cat /proc/sys/kernel/random/boot_id", "-"),
}


@dataclass
class Seen:
    """What one run of real guests gave, for the tests below."""

    release: Release
    inside: dict[str, Result]
    leftovers: Result
    restored: dict[str, Result]
    bake_verified: bool
    baked_disk_mib: int
    bake_modes: set[int]
    host_keys: bool
    host_keys_seen: str
    left_in_work: list[str]
    left_vms: int


@pytest.fixture(scope="module")
def seen() -> Seen:
    return asyncio.run(_see(seed()))


async def _see(release: Release) -> Seen:
    async with site() as here:
        async with here.guest(release, Shape(memory_mib=512, disk_mib=1024)) as guest:
            inside = {name: await guest.run(command) for name, (command, _) in PROMISES.items()}
            leftovers = await guest.run(
                "cat /etc/machine-id | wc -c; find /etc/ssh -name '*key*' 2>/dev/null; ls -A /var/lib/apt/lists; echo;"
                " cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null; ls -A /etc/apt/auth.conf.d /etc/apt/apt.conf.d;"
                " ls /mcp-gateway /usr/bin/mcp-gateway /usr/local/bin/mcp-gateway",
                "root",
            )
        folder = here.folder / "baked"
        baker = Baker(here.driver, here.launcher, folder)
        shape = Shape(memory_mib=256, disk_mib=2 * DEFAULT_DISK_MIB)
        baked = await baker.baked(release, shape)
        restored = {}
        async with here.guest(release, shape, baked) as guest:
            restored["python"] = await guest.run("python3 -c 'print(6 * 7)'")
            restored["processes"] = await guest.run("ps -e -o user= | grep -c ^user", "root")
            restored["disk"] = await guest.run("df -m --output=size / | tail -1")
            await guest.vm.resize_disk(shape.disk_mib)
            await guest.link.resize_disk(shape.disk_mib)
            restored["grown"] = await guest.run(
                "df -m --output=size / | tail -1; dd if=/dev/zero of=f bs=1M count=8 conv=fsync"
            )
            await guest.run("mkdir -p /etc/ssh && touch /etc/ssh/ssh_host_ed25519_key", "root")
            host_keys_seen = await warm._run(guest.link, 9_001, *warm._HOST_KEYS)
        return Seen(
            release=release,
            inside=inside,
            leftovers=leftovers,
            restored=restored,
            bake_verified=Bakes(folder).verify(baked),
            baked_disk_mib=baked.shape.disk_mib,
            bake_modes={path.stat().st_mode & 0o777 for path in baked.folder.iterdir()},
            host_keys=baked.host_keys,
            host_keys_seen=host_keys_seen,
            left_in_work=[path.name for path in (folder / ".work").iterdir()],
            left_vms=len(await here.launcher.list_vms()),
        )


@pytest.mark.parametrize("name", list(PROMISES))
def test_promise(seen: Seen, name: str) -> None:
    result = seen.inside[name]
    assert result.code == 0, result
    assert PROMISES[name][1] in result.out, result


def test_nothing_of_the_build_host_is_in_it(seen: Seen) -> None:
    lines = seen.leftovers.out.splitlines()
    assert lines[0] == "33", "the machine id is the sandbox's own"
    assert lines[1:3] == ["partial", ""], "no host keys, no package lists"
    sources = [line for line in lines if line.startswith(("deb", "URIs"))]
    assert sources
    assert not [line for line in lines if "99mmdebstrap" in line or "proxy" in line.lower() or line.endswith("lock")]
    assert seen.leftovers.code == 2, "no mcp-gateway"


def test_host_keys_are_looked_for_once(seen: Seen) -> None:
    assert not seen.host_keys
    assert seen.host_keys_seen == "/etc/ssh/ssh_host_ed25519_key\n"


def test_a_restored_guest_works_and_grows(seen: Seen) -> None:
    assert seen.restored["python"].out == "42\n", seen.restored["python"]
    assert seen.restored["processes"].out == "0\n", "nothing of the first jobs runs on"
    before, after = int(seen.restored["disk"].out), int(seen.restored["grown"].out.split()[0])
    assert seen.baked_disk_mib == DEFAULT_DISK_MIB
    assert 0.9 * DEFAULT_DISK_MIB < before <= DEFAULT_DISK_MIB
    assert 0.9 * 2 * DEFAULT_DISK_MIB < after <= 2 * DEFAULT_DISK_MIB
    assert seen.restored["grown"].code == 0


def test_a_bake_is_whole_read_only_and_leaves_nothing_else(seen: Seen) -> None:
    assert seen.bake_verified
    assert seen.bake_modes == {0o444}
    assert seen.left_in_work == []
    assert seen.left_vms == 0


def test_the_release_is_what_its_manifest_says(seen: Seen) -> None:
    seen.release.verify()
    for path in seen.release.folder.iterdir():
        assert path.stat().st_uid == 0
        assert path.stat().st_mode & 0o777 == 0o644
    assert seen.release.folder.stat().st_mode & 0o777 == 0o755
    assert seen.release.part("packages").read_text().count("\n") > 80


def test_building_again_makes_the_same_release_from_cached_parts() -> None:
    release = seed()
    folder = cache() / "images"
    before = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")}
    done = build(folder)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert events[-1]["phase"] == "ready"
    assert events[-1]["release"]["digest"] == release.digest
    assert "root_tree" not in {event["phase"] for event in events}
    assert {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*")} == before


def test_another_agent_makes_another_release_and_keeps_the_first(tmp_path: Path) -> None:
    first = seed()
    folder = tmp_path / "images"
    (folder / "cache").mkdir(parents=True)
    for part in (cache() / "images" / "cache").iterdir():
        (folder / "cache" / part.name).mkdir()
        for path in part.iterdir():
            files.place(path, folder / "cache" / part.name / path.name)
    assert build(folder).returncode == 0
    assert Images(folder).resolve("seed").digest == first.digest, "the same parts make the same release anywhere"
    other = tmp_path / "agent"
    other.write_bytes(b"\x7fELF another agent")
    done = build(folder, "--agent", str(other))
    assert done.returncode == 0, done.stderr
    images = Images(folder)
    assert images.resolve("seed").digest != first.digest
    assert images.resolve(f"seed@{first.digest}").digest == first.digest


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    folder.chmod(0o777)
    done = build(folder)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "unsafe_folder"
    assert "remedy: Make it yours alone" in done.stderr
