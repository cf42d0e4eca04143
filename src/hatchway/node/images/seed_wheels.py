"""Runs in the template's root tree: makes `python3 -m venv` quick where every instruction is emulated.

The distribution's `ensurepip` runs pip out of a zipped wheel, without compiled files, and lets it compile all of pip and setuptools into
every new environment. Here the wheels get the compiled files, and a pip that is unpacked and compiled already does the work. Where
`ensurepip` looks different than expected it stays as it is: slower, and right.
"""

import base64
import compileall
import ensurepip
import hashlib
import os
import py_compile
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = Path("/usr/share/python-wheels")
READY = WHEELS / "ready"
SOURCE = Path(ensurepip.__file__)
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
TIME = (2024, 1, 1, 0, 0, 0)
OLD = 1_704_067_200
EDITS = (
    (
        "sys.path = {additional_paths or []} + sys.path",
        f'sys.path = ["{READY}"] + {{additional_paths or []}} + sys.path',
    ),
    ('"--no-cache-dir", "--no-index"', '"--no-cache-dir", "--no-compile", "--no-index"'),
)


def compiled(source: bytes, name: str) -> bytes:
    """A compiled file that is not bound to its source's time, which pip does not keep."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "source.py"
        file.write_bytes(source)
        made = py_compile.compile(str(file), str(file) + "c", dfile=name, doraise=True, invalidation_mode=UNCHECKED)
        assert made is not None
        return Path(made).read_bytes()


def with_compiled_files(wheel: Path) -> None:
    """Adds `__pycache__` to a wheel, and to the list of its files."""
    with zipfile.ZipFile(wheel) as old:
        content = {info.filename: old.read(info) for info in old.infolist() if not info.is_dir()}
    record = next(name for name in content if name.endswith(".dist-info/RECORD"))
    added = {}
    for name, data in content.items():
        if name.endswith(".py") and ".data/" not in name:
            folder, _, file = name.rpartition("/")
            target = f"{folder}/__pycache__/{file[:-3]}.{sys.implementation.cache_tag}.pyc".lstrip("/")
            added[target] = compiled(data, name)
    lines = []
    for name, data in added.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    content[record] = content[record].rstrip() + b"\n" + "".join(lines).encode()
    content.update(added)
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name, TIME), data, zipfile.ZIP_DEFLATED)
    new.replace(wheel)


def main() -> None:
    """Changes all or nothing."""
    text = SOURCE.read_text(encoding="utf-8")
    wheels = sorted(WHEELS.glob("*.whl"))
    pip = [wheel for wheel in wheels if wheel.name.startswith("pip-")]
    if len(pip) != 1 or any(text.count(old) != 1 for old, _ in EDITS):
        print("ensurepip is not as expected; it stays as it is", file=sys.stderr)
        return
    with zipfile.ZipFile(pip[0]) as archive:
        archive.extractall(READY, [name for name in archive.namelist() if name.startswith("pip/")])
    compileall.compile_dir(READY, quiet=1, invalidation_mode=UNCHECKED)
    for wheel in wheels:
        with_compiled_files(wheel)
    for old, new in EDITS:
        text = text.replace(old, new)
    SOURCE.write_text(text, encoding="utf-8")
    # Its compiled file is bound to its time, and times later than the package index's do not get into the image.
    os.utime(SOURCE, (OLD, OLD))
    py_compile.compile(str(SOURCE), doraise=True)


main()
