"""What services of the tests lend each other can be captured from: its files belong to who has them."""

import os
from pathlib import Path

import pytest
from tests.support import baked

ONE, OTHER = 60_001, 60_002
NAME = "0" * 40


def service(folder: Path, uid: int) -> Path:
    """A data folder whose node is this user."""
    kept = folder / "node" / "baked"
    kept.mkdir(parents=True)
    os.chown(kept, uid, uid)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="services have users of their own only where they are started by root")
def test_a_bake_that_is_lent_belongs_to_who_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(baked, "cache", lambda: tmp_path / "cache")
    first, again, other = (service(tmp_path / name, uid) for name, uid in (("a", ONE), ("b", ONE), ("c", OTHER)))
    made = first / "node" / "baked" / NAME
    made.mkdir()
    for name, content in (("bake.json", b"{}"), ("memory", b"pages")):
        (made / name).write_bytes(content)
        os.chown(made / name, ONE, ONE)
    baked.keep(first)
    for one, uid in ((again, ONE), (other, OTHER)):
        baked.lend(one)
        lent = one / "node" / "baked" / NAME / "memory"
        assert lent.read_bytes() == b"pages"
        assert lent.stat().st_uid == uid
        assert lent.samefile(made / "memory") == (uid == ONE), "one file as long as the kernel lets it have more names"
