"""Makes bare VMs for the benches."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hatchway.bench.bare import BareVm, Ground, find_ground
from hatchway.domain.shapes import Shape


class Floor:
    """Makes bare VMs, each in a folder of its own that is gone at the end."""

    def __init__(self, ground: Ground, work: Path) -> None:
        self._ground = ground
        self._work = work
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def vm(self) -> Iterator[tuple[BareVm, float]]:
        """A restored VM and the milliseconds that it took."""
        vm = BareVm(self._ground, self._work / str(next(self._numbers)))
        try:
            yield vm, vm.restore()
        finally:
            vm.end()

    def restore(self) -> float:
        """Restores one VM, ends it, returns the milliseconds."""
        with self.vm() as (_, took):
            return took


@contextlib.contextmanager
def make_floor(data_dir: Path, shape: Shape | None = None) -> Iterator[Floor]:
    """What makes bare VMs of the default shape, or another that was baked. Raises what `find_ground` does."""
    with tempfile.TemporaryDirectory(prefix="hatchway-bench-") as work:
        yield Floor(find_ground(data_dir, shape), Path(work))
