"""The ground of `hatchway bench egress`: an origin, gateways and, where it is installed, mitmproxy, in a network namespace of their own.

Run by `bench.egress` inside that namespace, where the addresses that names are given are the host's own: a gateway's listener is then told
the destination by the kernel, as in a slot. Prints one JSON object for each figure.
"""

import asyncio
import contextlib
import ipaddress
import json
import multiprocessing
import os
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hatchway.bench.report import percentile
from hatchway.domain.policy.reading import canonical, load
from hatchway.egress.authority import Authority
from hatchway.egress.gateway import Gateway
from hatchway.egress.http.session import HttpSession
from hatchway.egress.synthetic import SyntheticNames
from hatchway.egress.upstream import Dialler, HostService, OutConfig
from hatchway.wire.audit import Entry
from hatchway.wire.egress import EgressSpec, GatewaySpec, PolicyDocument

ORIGIN, ORIGIN_OF_FLOOD = "127.0.0.1", "127.0.0.2"
"""What is flooded through the gateway has an origin of its own: it is the gateway's sharing that is measured, not the origin's."""
TLS_PORT, TCP_PORT, PROXY_TLS_PORT, PROXY_TCP_PORT = 20443, 20432, 21443, 21432
NAMES = {"quiet": "quiet.example", "busy": "busy.example"}
CONNECTIONS = 8
FLOOD_CLIENTS = 2
LEAST = 19
"""The least processor time, for what floods: it gets what the others leave."""
BODY = b"x" * 200
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
REQUEST = f"GET /simple/thing/?a=b HTTP/1.1\r\nHost: {{}}:{TLS_PORT}\r\nUser-Agent: bench/1\r\nAccept: */*\r\nAccept-Encoding: gzip\r\n\r\n"
STREAM = 128 * 1024 * 1024
PROXY_STREAM = 32 * 1024 * 1024
"""Octets of one run of the relay; fewer through mitmproxy, which is slow at it and keeps them all."""

Started = Any  # multiprocessing's Event, whose class is a function's


def serve_origin(address: str, niceness: int, context: ssl.SSLContext, started: Started) -> None:
    """The process of a site that answers every request with the same, and of a server that sends as many octets as it is asked for.

    Threads and plain sockets: what the bench itself costs is taken from what it measures.
    """

    os.nice(niceness)

    def site(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(sock, server_side=True) as stream:
            while data := stream.recv(65536):  # requests of this bench come whole
                stream.sendall(ANSWER * data.count(b"\r\n\r\n"))

    def octets(sock: socket.socket) -> None:
        left, piece = int(sock.recv(32) or b"0"), bytes(256 * 1024)
        while left > 0:
            sock.sendall(piece[:left])
            left -= len(piece)
        sock.close()

    def serve(serving: Callable[[socket.socket], None], sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            serving(sock)

    def accept(port: int, serving: Callable[[socket.socket], None]) -> None:
        with socket.create_server((address, port), backlog=1024) as listener:
            while True:
                threading.Thread(target=serve, args=(serving, listener.accept()[0]), daemon=True).start()

    threading.Thread(target=accept, args=(TCP_PORT, octets), daemon=True).start()
    threading.Thread(target=accept, args=(TLS_PORT, site), daemon=True).start()
    started.set()
    threading.Event().wait()


class Unrecorded:
    """An audit sink that takes everything and keeps nothing."""

    full = False

    def record(self, entry: Entry, *, bounded: bool = False) -> None:
        """See `egress.auditing.AuditSink`."""


def policy_of(name: str) -> EgressSpec:
    """Lets one name pass, over TLS that is looked into and as octets."""
    origin = ORIGIN_OF_FLOOD if name == NAMES["busy"] else ORIGIN
    rules = [
        {
            "id": kind,
            "to": {"hosts": [host]},
            "protocol": protocol,
            "ports": [port],
            "resolve": {"private": "allow"},
        }
        for kind, host, protocol, port in (("web", name, "http", TLS_PORT), ("octets", f"tcp.{name}", "tcp", TCP_PORT))
    ]
    document = {
        "version": 1,
        "rules": rules,
        "dns": {"records": {name: [origin], f"tcp.{name}": [origin]}},
        "limits": {"connections": 1024, "connections_per_s": 10_000},
    }
    text = canonical(load(json.dumps(document)))
    return EgressSpec(revision=1, documents=(PolicyDocument(tier="platform", name="bench", version=1, text=text),))


def address_of(name: str) -> str:
    """The address that the gateway gives a name, which follows from the name."""
    return str(SyntheticNames().bind(name))


def serve_gateways(ca: Path, idle: int, started: Started, told: Any) -> None:
    """The process of the gateways: two for the bench, and as many more that only are there, whose memory it tells."""
    asyncio.run(_serve_gateways(ca, idle, started, told))


async def _serve_gateways(ca: Path, idle: int, started: Started, told: Any) -> None:
    network = ipaddress.ip_network("127.0.0.0/30")
    dialler = Dialler(
        OutConfig(extra_ca=(ca,), host_services=tuple(HostService(network, port) for port in (TLS_PORT, TCP_PORT)))
    )
    kept = []

    def gateway(number: int, spec: EgressSpec, addresses: tuple[tuple[str, int], ...]) -> Gateway:
        return Gateway(
            GatewaySpec(sandbox_id=f"{number:020d}", project="bench", generation=1, egress=spec),
            _listeners(*addresses),
            dialler=dialler,
            http=HttpSession(),
            sink=Unrecorded(),
            tell=lambda event, params: None,
        )

    for number, name in enumerate(NAMES.values()):
        kept.append(gateway(number, policy_of(name), ((address_of(name), TLS_PORT),)))
        kept.append(gateway(10 + number, policy_of(name), ((address_of(f"tcp.{name}"), TCP_PORT),)))
    before = _resident()
    for number in range(idle):
        kept.append(gateway(100 + number, policy_of(NAMES["quiet"]), (("127.0.0.1", 0),)))
    told.value = (_resident() - before) / max(1, idle)
    started.set()
    await asyncio.Event().wait()


def _listeners(tcp: tuple[str, int]) -> list[socket.socket]:
    made = []
    for kind, where in (
        (socket.SOCK_STREAM, tcp),
        (socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.SOCK_STREAM, ("127.0.0.1", 0)),
    ):
        sock = socket.socket(socket.AF_INET, kind)
        sock.setblocking(False)
        sock.bind(where)
        if kind == socket.SOCK_STREAM:
            sock.listen(1024)
        made.append(sock)
    return made


def _resident() -> float:
    """KiB of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


# -- what is measured


def unverified() -> ssl.SSLContext:
    """TLS of a client; certificates are the tests' matter, not the bench's, and cost all ways the same."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def requests_per_s(where: tuple[str, int], name: str, seconds: float) -> float:
    """Kept-alive requests a second over some connections: one on each, then the answers."""
    request, context = REQUEST.format(name).encode(), unverified()
    with ExitStack() as stack:
        streams = [stack.enter_context(_tls(where, name, context)) for _ in range(CONNECTIONS)]
        count, warm = 0, time.perf_counter() + seconds / 4
        began = until = 0.0
        while True:
            for stream in streams:
                stream.sendall(request)
            for stream in streams:
                _answer(stream)
            now = time.perf_counter()
            if not began:
                began, until = (now, now + seconds) if now > warm else (0.0, 0.0)
            else:
                count += len(streams)
                if now > until:
                    return count / (now - began)


def _tls(where: tuple[str, int], name: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    sock = socket.create_connection(where, timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(sock, server_hostname=name)


def _answered(stream: ssl.SSLSocket, request: bytes) -> None:
    stream.sendall(request)
    _answer(stream)


def _answer(stream: ssl.SSLSocket) -> None:
    data = b""
    while not data.endswith(BODY):
        came = stream.recv(65536)
        if not came:
            raise RuntimeError("the connection ended without an answer")
        data += came


def handshakes_per_s(where: tuple[str, int], name: str, seconds: float) -> float:
    """New connections a second, each with one request: through a proxy both sides have to shake hands."""
    context, request, count = unverified(), REQUEST.format(name).encode(), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        with _tls(where, name, context) as stream:
            _answered(stream, request)
        count += 1
    return count / (time.perf_counter() - began)


def latencies(where: tuple[str, int], name: str, seconds: float) -> list[float]:
    """Microseconds of single requests, one after the other on one connection."""
    request, times = REQUEST.format(name).encode(), []
    with _tls(where, name, unverified()) as stream:
        for _ in range(20):
            _answered(stream, request)
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            _answered(stream, request)
            times.append((time.perf_counter() - began) * 1e6)
    return times


def stream_mib_per_s(where: tuple[str, int], octets: int) -> float:
    """Octets of one connection."""
    buffer, left = bytearray(1024 * 1024), octets
    with socket.create_connection(where, timeout=60) as sock:
        began = time.perf_counter()
        sock.sendall(b"%d\n" % octets)
        while left > 0:
            came = sock.recv_into(buffer)
            if not came:
                raise RuntimeError("the stream ended early")
            left -= came
    return octets / 1048576 / (time.perf_counter() - began)


def flood(where: tuple[str, int], name: str, stop: Started) -> None:
    """Opens connections as fast as it can, with what processor time the others leave: it is the gateway's sharing that is measured."""
    os.nice(LEAST)
    context, request = unverified(), REQUEST.format(name).encode()
    while not stop.is_set():
        try:
            with _tls(where, name, context) as stream:
                _answered(stream, request)
        except (OSError, RuntimeError):
            continue


# -- the whole


def tell(metric: str, value: float, unit: str, runs: int, floor: float | None = None) -> None:
    """One figure."""
    print(json.dumps({"metric": metric, "value": value, "unit": unit, "runs": runs, "floor": floor}), flush=True)


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[None]:
    """A process of the bench, until the block is left."""
    made = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    made.start()
    try:
        yield
    finally:
        made.terminate()
        made.join(10)
        if made.is_alive():
            made.kill()


@contextmanager
def mitmproxy(program: str, folder: Path) -> Iterator[None]:
    """mitmproxy in front of the origin, as it streams best."""
    modes = [
        "--mode", f"reverse:https://{ORIGIN}:{TLS_PORT}@{PROXY_TLS_PORT}",
        "--mode", f"reverse:tcp://{ORIGIN}:{TCP_PORT}@{PROXY_TCP_PORT}",
    ]  # fmt: skip
    options = ["--ssl-insecure", "--set", "stream_large_bodies=1m", "--set", f"confdir={folder}"]
    running = subprocess.Popen([program, "-q", *modes, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for port in (PROXY_TLS_PORT, PROXY_TCP_PORT):
            _wait_for(("127.0.0.1", port), running)
        yield
    finally:
        running.terminate()
        running.wait(10)


def _wait_for(where: tuple[str, int], running: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and running.poll() is None:
        try:
            socket.create_connection(where, timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("mitmproxy did not start")


def measure(runs: int, proxy: str, idle: int, seconds: float, folder: Path) -> None:
    """All figures; each run measures all ways in turn."""
    context = multiprocessing.get_context("fork")
    authority = Authority(b"", "bench", tuple(NAMES.values()), datetime.now(UTC))
    site = (
        authority.context(NAMES["quiet"], (), datetime.now(UTC)),
        authority.context(NAMES["busy"], (), datetime.now(UTC)),
    )

    def choose(sock: ssl.SSLObject, name: str | None, _: object) -> None:
        sock.context = site[1] if name == NAMES["busy"] else site[0]

    site[0].sni_callback = choose
    ca = folder / "ca.pem"
    ca.write_text(authority.certificate)
    with ExitStack() as stack:
        served, flooded, opened = context.Event(), context.Event(), context.Event()
        told = context.Value("d", 0.0)
        stack.enter_context(process(serve_origin, ORIGIN, 0, site[0], served))
        stack.enter_context(process(serve_origin, ORIGIN_OF_FLOOD, LEAST, site[0], flooded))
        stack.enter_context(process(serve_gateways, ca, idle, opened, told))
        if not (served.wait(30) and flooded.wait(30) and opened.wait(60)):
            raise RuntimeError("the origin or the gateways did not start")
        if proxy:
            stack.enter_context(mitmproxy(proxy, folder))
        _compare(runs, bool(proxy), seconds)
        tell("gateway_idle", told.value, "KiB", idle)
        _neighbour(runs, context, seconds)


def _compare(runs: int, proxied: bool, seconds: float) -> None:
    quiet = NAMES["quiet"]
    web = {"direct": (ORIGIN, TLS_PORT), "gateway": (address_of(quiet), TLS_PORT)}
    octets = {"direct": (ORIGIN, TCP_PORT), "gateway": (address_of(f"tcp.{quiet}"), TCP_PORT)}
    if proxied:
        web["mitmproxy"], octets["mitmproxy"] = ("127.0.0.1", PROXY_TLS_PORT), ("127.0.0.1", PROXY_TCP_PORT)
    found: dict[str, dict[str, list[float]]] = {}
    for run in range(runs + 1):
        for way in web:
            size = PROXY_STREAM if way == "mitmproxy" else STREAM
            values = {
                "requests": requests_per_s(web[way], quiet, seconds),
                "handshakes": handshakes_per_s(web[way], quiet, seconds),
                "latency": statistics.median(latencies(web[way], quiet, seconds / 2)),
                "tcp": stream_mib_per_s(octets[way], size),
            }
            if run:  # the first one is for warming up
                for name, value in values.items():
                    found.setdefault(name, {}).setdefault(way, []).append(value)
    middle = {name: {way: statistics.median(values) for way, values in ways.items()} for name, ways in found.items()}
    units = {"requests": "1/s", "handshakes": "1/s", "latency": "us", "tcp": "MiB/s"}
    for name, ways in middle.items():
        for way, value in ways.items():
            tell(f"{name}_{way}", value, units[name], runs, None if way == "direct" else ways["direct"])
        if proxied:
            tell(f"{name}_over_mitmproxy", ways["gateway"], units[name], runs, ways["mitmproxy"])
    if proxied:
        latency = middle["latency"]
        added = {way: max(1.0, latency[way] - latency["direct"]) for way in ("gateway", "mitmproxy")}
        tell("added_latency_over_mitmproxy", added["gateway"], "us", runs, added["mitmproxy"])


def _neighbour(runs: int, context: Any, seconds: float) -> None:
    """99th percentile of one sandbox's requests while another opens connections without end, over the same while it is quiet."""
    quiet, busy = NAMES["quiet"], NAMES["busy"]
    alone, beside = [], []
    for _ in range(runs):
        alone.append(percentile(latencies((address_of(quiet), TLS_PORT), quiet, seconds), 99))
        stop = context.Event()
        with ExitStack() as stack:
            for _ in range(FLOOD_CLIENTS):
                stack.enter_context(process(flood, (address_of(busy), TLS_PORT), busy, stop))
            beside.append(percentile(latencies((address_of(quiet), TLS_PORT), quiet, seconds), 99))
            stop.set()
    tell("p99_beside_flood", statistics.median(beside), "us", runs, statistics.median(alone))


def main() -> None:
    """Called as a program: runs, path of mitmdump or nothing, number of idle gateways, seconds of each rate."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for line in ("link set lo up", "route add local 198.18.0.0/15 dev lo"):
        subprocess.run(["ip", *line.split()], check=True)
    with tempfile.TemporaryDirectory(prefix="hatchway-bench-") as folder:
        measure(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), Path(folder))


if __name__ == "__main__":
    main()
