"""The unit file for systemd: that it is one, and that what it takes away is what the documentation says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "hatchway.service"
EXPOSURE_AT_MOST = 60
"""Of 100, as `systemd-analyze security` counts: what is open is what namespaces, users and cgroups of VMs take."""

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def values(name: str) -> list[str]:
    """What the unit says for a setting, all its lines."""
    return [word for line in re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.M) for word in line.split()]


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the program of this checkout."""
    made = tmp_path / UNIT.name
    made.write_text(UNIT.read_text().replace("/opt/hatchway/.venv", sys.prefix))
    return made


@analyze
def test_systemd_understands_the_unit(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    # What it says of other units of this machine is not about ours.
    told = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert (done.returncode, told) == (0, [])


@analyze
def test_little_is_left_open(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_AT_MOST}", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:]


def test_the_unit_fits_how_the_service_ends_and_tells_of_itself() -> None:
    assert values("Type") == ["notify"]
    # A killed supervisor leaves its sandboxes to the next one; a unit that killed its whole cgroup would take them along.
    assert values("KillMode") == ["process"]
    assert values("Delegate") == ["yes"]
    assert int(values("TimeoutStopSec")[0]) > 120, "`down` waits for so long"
    assert values("NoNewPrivileges") == ["yes"]
    assert values("ProtectSystem") == ["strict"]


def test_devices_are_named() -> None:
    assert values("DevicePolicy") == ["closed"]
    assert [word for word in values("DeviceAllow") if word.startswith("/")] == ["/dev/kvm", "/dev/net/tun"]


@pytest.mark.parametrize("capability", ["CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_BOOT", "CAP_SYS_TIME", "CAP_SYS_PTRACE",
                                        "CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG", "CAP_NET_RAW", "CAP_MAC_ADMIN"])  # fmt: skip
def test_privileges_that_nothing_here_needs_are_gone(capability: str) -> None:
    assert capability not in values("CapabilityBoundingSet")


def test_the_settings_file_beside_it_is_one(tmp_path: Path) -> None:
    from hatchway.supervisor import configuration, profile

    path = tmp_path / "hatchway.toml"
    path.write_text((UNIT.parent / "hatchway.toml").read_text())
    path.chmod(0o644)
    found = configuration.settings(tmp_path, path)
    profile.check_listeners(found)
    assert found.production
    assert str(path.name) in UNIT.read_text()
