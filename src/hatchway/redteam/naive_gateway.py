"""A naive gateway: one thing at a time, for whoever comes first, with no bound for anybody. Floods have to take it from others."""

import contextlib
import socket
import threading
import time
from pathlib import Path

from hatchway.redteam.ground import within

PATIENCE_S = 1.0
"""How long it waits for whoever has connected to say something."""
WORK_S = 0.02
"""How long an answer to a question takes it."""
OUTSIDE_S = 1.0
"""How long a site outside takes, whose answer it waits for."""
SERVED_WITHIN_S = 3.0
_BACKLOG = 4


class NaiveGateway:
    """Listens in a namespace, for connections and for questions, on one port."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._closing = False
        self._tcp, self._udp = within(namespace, self._listen)
        self.port: int = self._tcp.getsockname()[1]
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._connections, self._questions)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> tuple[socket.socket, socket.socket]:
        Path("/proc/sys/net/ipv4/tcp_syncookies").write_text("0")
        tcp = socket.create_server(("", 0), backlog=_BACKLOG)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("", tcp.getsockname()[1]))
        for one in (tcp, udp):
            one.settimeout(0.2)
        return tcp, udp

    def _connections(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):
                stream, _ = self._tcp.accept()
                with stream:
                    stream.settimeout(PATIENCE_S)
                    if stream.recv(65536):
                        time.sleep(OUTSIDE_S)
                        stream.sendall(b"yes")

    def _questions(self) -> None:
        while not self._closing:
            with contextlib.suppress(OSError):
                data, peer = self._udp.recvfrom(4096)
                time.sleep(WORK_S)
                self._udp.sendto(data, peer)

    def serves(self) -> bool:
        """Whether somebody else is answered, in either way, in time."""

        def ask(kind: socket.SocketKind) -> bool:
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, kind) as sock:
                sock.settimeout(SERVED_WITHIN_S)
                sock.connect(("127.0.0.1", self.port))
                sock.sendall(b"please")
                return bool(sock.recv(10))
            return False

        return within(self._namespace, lambda: ask(socket.SOCK_STREAM) and ask(socket.SOCK_DGRAM))

    def close(self) -> None:
        """Ends it."""
        self._closing = True
        for thread in self._threads:
            thread.join(5)
        self._tcp.close()
        self._udp.close()
