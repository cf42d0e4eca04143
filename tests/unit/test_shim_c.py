import subprocess
from pathlib import Path


def test_the_c_parts_pass_their_own_tests(tmp_path: Path) -> None:
    """Parsers and lists of the shim under the address sanitizer; the preload library in a process of its own."""
    shim = Path(__file__).resolve().parents[2] / "shim"
    done = subprocess.run(
        ["make", "-C", str(shim), "test", f"OUT={tmp_path}"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shim unit tests passed" in done.stdout
    assert "preload library tests passed" in done.stdout
