"""A shard of the gateway, a broker and an audit writer as processes of their own, started again on the same sockets as the supervisor does.

Run as a program it is the process: `egress_process.py WHAT JSON`, with the listening sockets inherited.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """One of them."""

    def __init__(self, what: str, config: dict[str, Any], sockets: dict[str, socket.socket]) -> None:
        self._what = what
        self._config = config
        self._sockets = sockets
        self._process: asyncio.subprocess.Process | None = None
        self.stderr: int | None = None
        """A descriptor for what it says."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it serves."""
        reading, writing = os.pipe()
        fds = {name: sock.fileno() for name, sock in self._sockets.items()}
        config = {**self._config, "fds": fds, "ready": writing}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, self._what, json.dumps(config),
            pass_fds=(*fds.values(), writing), stderr=self.stderr, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )  # fmt: skip
        os.close(writing)
        try:
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(os.read, reading, 1) == b"!", "it did not come up"
        finally:
            os.close(reading)

    async def kill(self) -> None:
        """SIGKILL, and waits."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def end(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            return await self._process.wait()


def _main() -> None:
    what, config = sys.argv[1], json.loads(sys.argv[2])
    sockets = {name: socket.socket(fileno=fd) for name, fd in config["fds"].items()}

    def ready() -> None:
        os.write(config["ready"], b"!")
        os.close(config["ready"])

    uid = os.getuid()
    if what == "audit":
        from hatchway.audit.main import AuditConfig
        from hatchway.audit.main import run as run_audit

        audit = AuditConfig(Path(config["folder"]), senders={uid: frozenset({"*"})}, readers=frozenset({uid}))
        run_audit(audit, rpc=sockets["rpc"], ready=ready)
        return
    if what == "broker":
        from hatchway.broker.main import BrokerConfig
        from hatchway.broker.main import run as run_broker

        own = config.get("become", uid)
        broker = BrokerConfig(
            folder=Path(config["folder"]),
            control_uids=frozenset(config.get("control", [uid])),
            node_uids=frozenset(config.get("node", [uid])),
            egress_uids=tuple(config.get("egress", [uid])),
            audit=Path(config["audit"]) if "audit" in config else None,
            upstream_ca=(Path(config["ca"]),),
            reachable=tuple((network, port) for network, port in config["reachable"]),
        )
        import concurrent.futures.thread  # noqa: F401  # another user may not be able to read where Python lies

        os.setresuid(own, own, own)
        run_broker(broker, rpc=sockets["rpc"], legs=sockets["legs"], ready=ready)
        return
    import ipaddress

    from hatchway.egress.main import EgressConfig, run
    from hatchway.egress.resolver import NameServer
    from hatchway.egress.upstream import HostService, OutConfig

    net = ipaddress.ip_network(config["net"])
    out = OutConfig(
        servers=(NameServer(*config["resolver"]),),
        extra_ca=(Path(config["ca"]),),
        host_services=tuple(HostService(net, port) for port in config["ports"]),
        broker=Path(config["broker"]) if "broker" in config else None,
    )
    shard = EgressConfig(shard=0, run_dir=Path(config["run"]), node_uids=frozenset({config.get("uid", uid)}), out=out)
    run(shard, rpc=sockets["rpc"], fds=sockets["fds"], ready=ready)


if __name__ == "__main__":
    _main()
