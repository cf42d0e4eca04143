"""What the tests of a checkout build once, however many of their processes ask: the C programs, and the folder that keeps what is expensive."""

import fcntl
import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
WITHIN = 600


def cache() -> Path:
    """The folder that all tests of a checkout share: `HATCHWAY_TEST_CACHE`, else below `build/`."""
    folder = Path(os.environ.get("HATCHWAY_TEST_CACHE", REPOSITORY / "build" / "test-cache"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def images() -> Path:
    """The images folder, in which the template is built once for all: `HATCHWAY_IMAGES_DIR`, else in the cache."""
    named = os.environ.get("HATCHWAY_IMAGES_DIR")
    return Path(named) if named else cache() / "images"


def built(part: str, *targets: str) -> Path:
    """Builds targets of `guest` or `shim`; those of a test, like `test/files`, are files below the folder, which is returned."""
    folder = cache() / "native"
    folder.mkdir(exist_ok=True)
    wanted = [f"{folder}/{target}" if "/" in target else target for target in targets]
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            ["make", "-s", "-C", str(REPOSITORY / part), *wanted, f"OUT={folder}"],
            capture_output=True,
            text=True,
            timeout=WITHIN,
            check=False,
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder
