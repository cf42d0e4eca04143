"""The official jailer starts Firecracker here, in chroot, user, cgroup and network namespace of its own, and nothing of it is left.

Our own jail (test_firecracker.py, test_jail.py) is held against it: what this one has, ours has too.
"""

import http.client
import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import jailer
from tests.support.firecracker import binaries

from hatchway.node.vmm import firecracker_install
from hatchway.node.vmm.firecracker_install import FirecrackerRefused

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer is root's")

WITHIN_S = 60.0
ALLOWED = ("CVE-2026-1386",)
"""The hole of this release: it needs a folder that others can write, which `jailer.arguments` refuses."""
_CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def jail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jailer.Jail]:
    base = tmp_path_factory.mktemp("jails")
    os.chown(base, 0, 0)
    base.chmod(0o755)
    idle = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    until(lambda: os.readlink(f"/proc/{idle.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
    version = 2 if (_CGROUPS / "cgroup.controllers").exists() else 1
    uid = 1_930_000_000 + os.getpid()
    made = jailer.Jail(
        name=f"jail-{os.getpid()}",
        uid=uid,
        gid=uid,
        base=base,
        cgroup_version=version,
        cgroups=("pids.max=64",),
        parent=f"hatchway-test-{os.getpid()}",
        netns=Path(f"/proc/{idle.pid}/ns/net"),
    )
    try:
        yield made
    finally:
        idle.kill()
        idle.wait(WITHIN_S)
        jailer.clean(made, cgroups(made))
        shutil.rmtree(base)


def cgroups(jail: jailer.Jail) -> list[Path]:
    top = _CGROUPS if jail.cgroup_version == 2 else _CGROUPS / "pids"
    return [top / jail.parent / jail.name, top / jail.parent]


def until(condition: object, what: str = "it did not come about") -> None:
    assert callable(condition)
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def ask(path: Path) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("localhost", timeout=WITHIN_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/")
    answer = connection.getresponse()
    return answer.status, answer.read()


def field(pid: int, name: str) -> str:
    found = re.search(rf"^{name}:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return found[1]


def test_a_jailed_start_is_jailed_and_leaves_nothing(jail: jailer.Jail) -> None:
    found = [firecracker_install.find(binaries() / name, program=name) for name in ("jailer", "firecracker")]
    argv = jailer.arguments(*found, jail, ALLOWED)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        api = jail.root / "api.sock"
        until(lambda: process.poll() is not None or api.exists(), "no control socket")
        assert process.poll() is None, process.stdout.read() if process.stdout else b""
        link = jail.base / "api"  # a short name: an address holds 108 octets
        link.symlink_to(api)
        until(lambda: listens(link))
        status, body = ask(link)
        assert status == 200
        assert b'"vmm_version":"1.12.1"' in body
        # Chroot, user, cgroup, network namespace and limits are those that were asked for.
        pid = process.pid
        assert os.path.samefile(f"/proc/{pid}/root", jail.root)
        assert not (jail.root / "etc").exists()
        assert field(pid, "Uid").split() == [str(jail.uid)] * 4
        assert field(pid, "Gid").split() == [str(jail.gid)] * 4
        assert field(pid, "CapEff").strip("0") == ""
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(jail.netns)
        assert str(pid) in (cgroups(jail)[0] / "cgroup.procs").read_text().split()
        assert (cgroups(jail)[0] / "pids.max").read_text().strip() == "64"
        assert re.search(r"^Max open files\s+256\s+256", Path(f"/proc/{pid}/limits").read_text(), re.M)
        kvm = (jail.root / "dev/kvm").lstat()
        assert stat.S_ISCHR(kvm.st_mode)
        assert kvm.st_uid == jail.uid
    finally:
        process.kill()
        process.wait(WITHIN_S)
    until(lambda: (cgroups(jail)[0] / "cgroup.procs").read_text() == "")
    jailer.clean(jail, cgroups(jail))
    assert not jail.root.parent.exists()
    assert not any(folder.exists() for folder in cgroups(jail))
    jailer.clean(jail, cgroups(jail))


def listens(path: Path) -> bool:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
    except ConnectionRefusedError:
        return False
    finally:
        sock.close()
    return True


def test_a_jail_that_would_be_none_is_refused(jail: jailer.Jail, tmp_path: Path) -> None:
    found = [firecracker_install.find(binaries() / name, program=name) for name in ("jailer", "firecracker")]
    with pytest.raises(FirecrackerRefused, match="CVE-2026-1386"):
        jailer.arguments(*found, jail)
    for changes in (
        {"name": "../up"},
        {"name": ""},
        {"uid": 0},
        {"gid": 0},
        {"parent": "../other"},
        {"cgroups": ("pids.max=64\nx",)},
        {"cgroup_version": 3},
    ):
        with pytest.raises(ValueError, match=r"jail|cgroup|limit|root"):
            jailer.arguments(*found, replace(jail, **changes), ALLOWED)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ValueError, match="root's alone"):
        jailer.arguments(*found, replace(jail, base=shared), ALLOWED)
    (tmp_path / "link").symlink_to(jail.base)
    with pytest.raises(ValueError, match="root's alone"):
        jailer.arguments(*found, replace(jail, base=tmp_path / "link"), ALLOWED)
