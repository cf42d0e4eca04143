"""`make demo`: a Python program runs in a real virtual machine; its output and the times are shown; nothing stays."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

HATCHWAY = Path(sys.executable).with_name("hatchway")
PROGRAM = """
import json, platform, sys
print("Hello from a microVM.")
primes = [n for n in range(2, 2000) if all(n % d for d in range(2, int(n ** 0.5) + 1))]
print(f"{len(primes)} primes below 2000, the last is {primes[-1]}")
print(json.dumps({"kernel": platform.release(), "boot_id": open("/proc/sys/kernel/random/boot_id").read().strip(),
                  "python": platform.python_version(), "user": __import__("getpass").getuser()}))
"""


def hatchway(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of ours and stops at its failure."""
    return subprocess.run([str(HATCHWAY), *arguments], check=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def main() -> int:
    """Returns the exit status of the demo."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    ports = (
        "--api-port",
        os.environ.get("HATCHWAY_API_PORT", "0"),
        "--data-port",
        os.environ.get("HATCHWAY_DATA_PORT", "0"),
    )
    try:
        hatchway("up", "--detach", *ports)
        up = time.monotonic()
        print(f"\n$ hatchway run -- python3 -   (the service was up after {up - began:.1f} s)\n", flush=True)
        job = hatchway("run", "-v", "--", "python3", "-", input=PROGRAM, stdout=subprocess.PIPE)
        print(job.stdout, end="")
        inside = json.loads(job.stdout.strip().splitlines()[-1])
        host_boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        print(f"\n          {'in the VM':38} on this host")
        print(f"kernel    {inside['kernel']:38} {platform.release()}")
        print(f"boot id   {inside['boot_id']:38} {host_boot_id}")
        if inside["boot_id"] == host_boot_id or inside["kernel"] == platform.release():
            print("error: the program did not run in a virtual machine", file=sys.stderr)
            return 1
        print(f"\njob done in {time.monotonic() - up:.2f} s, everything in {time.monotonic() - began:.1f} s")
        return 0
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        hatchway("down")


if __name__ == "__main__":
    sys.exit(main())
