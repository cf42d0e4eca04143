"""A whole service, as `hatchway up` starts it, for the tests of what a user does.

`HATCHWAY_TEST_DATA_DIR` names the data folder of a service that is up and is to be used as it is; without it a service of
their own is started.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support import baked, native

from hatchway.client import Hatchway

ROOT = Path(__file__).parents[2]
HATCHWAY = [sys.executable, "-m", "hatchway.cli.main"]
UP_WITHIN_S = 900
WITHIN_S = 180


@dataclass
class Service:
    """A service that is up, and how a user's programs are run against it."""

    data_dir: Path
    environ: dict[str, str] = field(default_factory=dict)
    before: frozenset[str] = frozenset()
    """Ids of the sandboxes that were there before the tests."""
    inside: tuple[str, ...] = ()
    """What command lines begin with, where it runs in a network namespace of its own; `client` does not reach it then."""

    def __post_init__(self) -> None:
        without = ("HATCHWAY_URL", "HATCHWAY_API_KEY")
        kept = {name: value for name, value in os.environ.items() if name not in without}
        self.environ = {
            "HATCHWAY_IMAGES_DIR": str(native.images().absolute()),
            **kept,
            "HATCHWAY_DATA_DIR": str(self.data_dir),
        }

    @property
    def url(self) -> str:
        """URL of the API."""
        return str(json.loads((self.data_dir / "endpoint.json").read_text())["api"])

    @property
    def key(self) -> str:
        """The development key."""
        return (self.data_dir / "dev.key").read_text().strip()

    def client(self) -> Hatchway:
        """A client of the SDK."""
        return Hatchway(self.url, self.key)

    def bake(self) -> None:
        """Waits until the usual shapes are baked, for those who wait for no creation as long as the first one may take."""
        with baked.alone():
            baked.lend(self.data_dir)
            with self.client() as hatchway:
                for shape in ({}, {"memory_mib": 256}):
                    hatchway.sandboxes.create(timeout=UP_WITHIN_S, **shape).delete()
            baked.keep(self.data_dir)

    def run(self, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
        """Runs `hatchway ARGUMENTS` to its end, without input unless `input` is given."""
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("timeout", WITHIN_S)
        return subprocess.run(
            [*self.inside, *HATCHWAY, *arguments], env=self.environ, capture_output=True, check=False, **options
        )

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Starts a program of a user with this service in its environment; its output can be read."""
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        return subprocess.Popen([*self.inside, *command], env=self.environ, **options)

    def sandboxes(self) -> list[dict[str, Any]]:
        """What `hatchway ls` shows, apart from what was there before the tests."""
        done = self.run("ls", "--json")
        assert done.returncode == 0, done.stderr
        return [sandbox for sandbox in json.loads(done.stdout) if sandbox["id"] not in self.before]

    def up(self) -> "subprocess.CompletedProcess[bytes]":
        """Starts the service on ports of its own, or again after it ended."""
        ports = ("--api-port", "0", "--data-port", "0")
        done = self.run("up", "--no-bake", "--data-dir", str(self.data_dir), "--detach", *ports, timeout=UP_WITHIN_S)
        if done.returncode == 0:
            baked.lend(self.data_dir)
        return done


def make_service(folders: pytest.TempPathFactory) -> Iterator[Service]:
    """A service in a new data folder, down again at the end. Templates are built and baked once for all, in `HATCHWAY_TEST_CACHE`."""
    service = Service(folders.mktemp("hatchway"))
    try:
        up = service.up()
        assert up.returncode == 0, up.stderr.decode()
        service.bake()
        yield service
    finally:
        baked.keep(service.data_dir)
        down = service.run("down", "--data-dir", str(service.data_dir))
    assert down.returncode == 0, down.stderr.decode()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service that the tests of a worker share."""
    given = os.environ.get("HATCHWAY_TEST_DATA_DIR")
    yield from [_as_it_is(Path(given))] if given else make_service(tmp_path_factory)


def _as_it_is(data_dir: Path) -> Service:
    service = Service(data_dir)
    service.before = frozenset(sandbox["id"] for sandbox in service.sandboxes())
    return service
