"""An internet of a test's own: a host's namespace whose only way out leads to another one, in which addresses of the internet are.

What runs on that host believes to be on a machine of its own. Needs root.
"""

import contextlib
import http.server
import os
import shutil
import socket
import subprocess
import threading
import uuid
from typing import Any

import dns.message
import dns.rcode
import dns.rrset
from tests.support.slot_network import within

HOST, ROUTER = "192.0.2.1", "192.0.2.2"
RESOLVER = "9.9.9.9"


def lacking() -> str:
    """What this machine lacks for it; empty when nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    return f"there is no {missing[0]}" if missing else ""


class OwnInternet:
    """`zone` gives the addresses of names, those of `.NAME` all names below; `arrived` is what web sites were asked for: address and path."""

    def __init__(self, *sites: str) -> None:
        self.zone: dict[str, str] = {}
        self.arrived: list[tuple[str, str]] = []
        name = uuid.uuid4().hex[:10]
        self._host, self._far = f"hwt-h{name}", f"hwt-i{name}"
        self._servers: list[http.server.ThreadingHTTPServer] = []
        self._names: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        try:
            self._make(sites)
        except BaseException:
            self.close()
            raise

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command line begins with that is to run on the host."""
        return ("nsenter", f"--net=/run/netns/{self._host}", "--")

    def close(self) -> None:
        """Removes it; may be repeated."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self._names is not None:
            with contextlib.suppress(OSError):  # it is not connected; its reader wakes up all the same
                self._names.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join()
        if self._names is not None:
            self._names.close()
        self._servers, self._threads, self._names = [], [], None
        for namespace in (self._host, self._far):
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL, check=False)

    def _make(self, sites: tuple[str, ...]) -> None:
        for namespace in (self._host, self._far):
            _ip("netns", "add", namespace)
        _ip("link", "add", "eth0", "netns", self._host, "type", "veth", "peer", "name", "eth0", "netns", self._far)
        for namespace, address in ((self._host, HOST), (self._far, ROUTER)):
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", self._host, "route", "add", "default", "via", ROUTER)
        for address in (RESOLVER, *sites):
            _ip("-n", self._far, "addr", "add", f"{address}/32", "dev", "lo")
        for address in sites:
            self._serve(address)
        self._names = within(self._far, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._names.bind((RESOLVER, 53))
        self._begin(self._answer, self._names)

    def _serve(self, address: str) -> None:
        arrived = self.arrived

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                arrived.append((address, self.path))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer((address, 80), Handler, bind_and_activate=False)
        server.socket.close()
        server.daemon_threads = True
        server.socket = within(self._far, lambda: socket.create_server((address, 80)))
        self._servers.append(server)
        self._begin(server.serve_forever)

    def _begin(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _answer(self, sock: socket.socket) -> None:
        while True:
            try:
                data, peer = sock.recvfrom(4096)
            except OSError:
                return
            if not data:
                return
            query = dns.message.from_wire(data)
            answer = dns.message.make_response(query)
            question = query.question[0]
            address = self._address(str(question.name).rstrip(".").lower())
            if address is None:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            elif question.rdtype == 1:
                answer.answer.append(dns.rrset.from_text(question.name, 30, "IN", "A", address))
            sock.sendto(answer.to_wire(), peer)

    def _address(self, name: str) -> str | None:
        below = (address for known, address in self.zone.items() if known.startswith(".") and name.endswith(known))
        return self.zone.get(name) or next(below, None)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
