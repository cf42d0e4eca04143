"""`hatchway bench recovery`: how long a sandbox's connections outlive the policy that let them pass, and for how long nothing passes when a process
of the way out was killed.

It kills processes of the service that is measured, as root beside it. The program in the sandbox asks the gateway alone, which refuses each request: no
site is needed, and none is asked.
"""

import os
import queue
import statistics
import threading
import time
from typing import Any

from hatchway.bench.options import Options
from hatchway.bench.report import Metric
from hatchway.chaos.roles import Roles
from hatchway.client import Hatchway, HatchwayError, Sandbox, Session
from hatchway.domain.errors import Unavailable

CONNECTIONS = 16
WITHIN_S = 60.0
MAX_RUNS = 5
"""A role is killed again when it has lived for some seconds: one that ends over and over is started more slowly."""
LOOK_EVERY_S = 0.01

PROGRAM = f"""
import socket, threading, time

def ask():
    sock = socket.create_connection(("probe.example", 80), timeout=5)
    sock.sendall(b"GET /refused HTTP/1.1\\r\\nHost: probe.example\\r\\n\\r\\n")
    if b" 403 " not in sock.recv(65536):
        raise OSError("this is no refusal")
    sock.settimeout(None)
    return sock

def until_open():
    while True:
        try:
            return ask()
        except OSError:
            time.sleep(0.02)

def until_cut(sock):
    try:
        while sock.recv(65536):
            pass
    except OSError:
        pass

while True:
    first = until_open()
    print("open", flush=True)
    rest = []
    try:
        rest = [ask() for _ in range({CONNECTIONS - 1})]
    except OSError:
        pass
    print("all", flush=True)
    for sock in [first, *rest]:
        until_cut(sock)
    print("cut", flush=True)
"""


def recovery(options: Options) -> list[Metric]:
    """Milliseconds: from a change of policy to the end of the last open connection; from the end of a gateway process to the next answer of the
    gateway in the sandbox; from the end of the broker to the next secret that it can lend."""
    if os.geteuid() != 0:
        raise Unavailable("not_allowed", "The bench `recovery` kills processes of the service.", "Run it as root.")
    runs, roles = min(options.runs, MAX_RUNS), Roles(options.data_dir)
    found: dict[str, list[float]] = {"policy_cut": [], "gateway_killed": [], "broker_killed": []}
    with Hatchway() as hatchway:
        name = f"bench-{os.getpid()}"
        hatchway.credentials.put(name, ["probe.example"], value="a-secret-of-the-bench")
        sandbox = hatchway.sandboxes.create(policy=_policy(let=True))
        try:
            with sandbox.start(["/usr/bin/python3", "-c", PROGRAM]) as session:
                said = _Said(session)
                for run in range(runs):
                    options.progress(f"recovery {run + 1} of {runs}")
                    found["policy_cut"].append(_policy_cut(sandbox, said))
                    found["gateway_killed"].append(_gateway_killed(roles, said))
                    found["broker_killed"].append(_broker_killed(roles, hatchway, name))
                session.kill()
        finally:
            sandbox.delete()
            hatchway.credentials.delete(name)
    metrics = []
    for what, times in found.items():
        metrics.append(Metric("recovery", what, statistics.median(times), "ms", runs))
        metrics.append(Metric("recovery", f"{what}_longest", max(times), "ms", runs))
    return metrics


def _policy(*, let: bool) -> dict[str, Any]:
    host = "probe.example" if let else "another.example"
    allow = [{"methods": ["GET"], "paths": ["/allowed"]}]
    rule = {"id": "probe", "to": {"hosts": [host]}, "ports": [80], "protocol": "http", "tls": {"mode": "none"}}
    return {"version": 1, "rules": [{**rule, "http": {"allow": allow}}]}


class _Said:
    """What the program said, and when it was heard."""

    def __init__(self, session: Session) -> None:
        self._lines: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        threading.Thread(target=self._hear, args=(session,), daemon=True).start()
        self.until("all")

    def _hear(self, session: Session) -> None:
        rest = b""
        for octets in session.output():
            *lines, rest = (rest + octets).split(b"\n")
            for line in lines:
                self._lines.put((line.decode(), time.perf_counter()))

    def until(self, wanted: str) -> float:
        """When it said this next."""
        until = time.monotonic() + WITHIN_S
        while True:
            try:
                line, at = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Unavailable(
                    "not_ready",
                    f"The sandbox's program did not come to {wanted!r} within {WITHIN_S:g} s.",
                    "Try again.",
                ) from None
            if line == wanted:
                return at


def _policy_cut(sandbox: Sandbox, said: _Said) -> float:
    began = time.perf_counter()
    sandbox.update(policy=_policy(let=False))
    took = said.until("cut") - began
    sandbox.update(policy=_policy(let=True))
    said.until("all")
    return took * 1e3


def _gateway_killed(roles: Roles, said: _Said) -> float:
    gateways = [role for role in roles.pids() if role.startswith("egress")]
    _until(lambda: all(roles.settled(role) for role in gateways), "the gateways have lived for long enough")
    began = time.perf_counter()
    for role in gateways:
        roles.kill(role)
    said.until("cut")
    took = said.until("open") - began
    said.until("all")
    return took * 1e3


def _broker_killed(roles: Roles, hatchway: Hatchway, name: str) -> float:
    _until(lambda: roles.settled("broker"), "the broker has lived for long enough")

    def lends() -> bool:
        try:
            return bool(hatchway.credentials.get(name, check=True).available)
        except HatchwayError:
            return False

    _until(lends, "the broker lends")
    began = time.perf_counter()
    roles.kill("broker")
    _until(lends, "the broker lends again")
    return (time.perf_counter() - began) * 1e3


def _until(true: Any, what: str) -> None:
    until = time.monotonic() + WITHIN_S
    while not true():
        if time.monotonic() > until:
            raise Unavailable("not_ready", f"It took longer than {WITHIN_S:g} s until {what}.", "Try again.")
        time.sleep(LOOK_EVERY_S)
