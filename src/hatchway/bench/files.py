"""Files through the data plane, against the bare channel of the same machine."""

import time
from collections.abc import Iterator

import httpx

from hatchway.bench.memory import Growth
from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.bench.stream import LARGE_MIB, MIB, PIECE_MIB, against_floors, bare_ports, in_turn
from hatchway.client import Hatchway
from hatchway.client.config import find

PATH = "/tmp/bench"
WITHIN_S = 600.0


class Files:
    """The files of one sandbox, as a program without the SDK uses them; `close` at the end."""

    def __init__(self, sandbox_id: str) -> None:
        config = find()
        made = (
            httpx.post(
                f"{config.url}/v1/sandboxes/{sandbox_id}/tokens",
                headers={"Authorization": f"Bearer {config.key}"},
                json={"scopes": ["files"], "ttl_s": 3600},
            )
            .raise_for_status()
            .json()
        )
        self._http = httpx.Client(
            base_url=f"{made['data_plane_url']}/v1/sandboxes/{sandbox_id}/files",
            headers={"Authorization": f"Bearer {made['token']}", "Accept-Encoding": "identity"},
            timeout=WITHIN_S,
        )

    def write(self, mib: int) -> float:
        """Writes a file of this size; returns the seconds. Raises `httpx.HTTPError`."""
        size = mib * MIB
        began = time.perf_counter()
        answer = self._http.put(
            "/content", params={"path": PATH}, content=_zeros(size), headers={"Content-Length": str(size)}
        )
        answer.raise_for_status()
        return time.perf_counter() - began

    def read(self, mib: int) -> float:
        """Reads the file, which has this size; returns the seconds. Raises `httpx.HTTPError`."""
        began = time.perf_counter()
        with self._http.stream("GET", "/content", params={"path": PATH}) as answer:
            answer.raise_for_status()
            count = sum(map(len, answer.iter_raw()))
        if count != mib * MIB:
            raise RuntimeError(f"the file has {count} octets, not {mib * MIB}")
        return time.perf_counter() - began

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


def files(options: Options) -> list[Metric]:
    """MiB/s of a file up and down; what our processes grow by while 1 GiB goes each way."""
    with Hatchway() as hatchway, bare_ports(options.data_dir) as floors, hatchway.sandboxes.create() as sandbox:
        ours = Files(sandbox.id)
        try:
            moves = {
                **floors,
                "file_write": lambda: PIECE_MIB / ours.write(PIECE_MIB),
                "file_read": lambda: PIECE_MIB / ours.read(PIECE_MIB),
            }
            rates = in_turn(moves, options.progress)
            options.progress(f"{LARGE_MIB} MiB each way")
            with Growth(options.data_dir) as growth:
                ours.write(LARGE_MIB)
                ours.read(LARGE_MIB)
        finally:
            ours.close()
    return [
        *against_floors("files", rates, {"file_read": "out", "file_write": "in"}),
        Metric("files", "rss_growth_mib", growth.mib, "MiB", 1),
    ]


def _zeros(size: int) -> Iterator[bytes]:
    piece = bytes(256 * 1024)
    for _ in range(size // len(piece)):
        yield piece
