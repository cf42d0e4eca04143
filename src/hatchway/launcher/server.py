"""The socket: who may ask, how much, and in which order the answers come.

A connection's requests are answered one after another, in their order: the next datagram is read when the one before
was answered. Who wants several at once opens several connections.
"""

import errno
import os
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from hatchway.launcher.errors import Refused
from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop
from hatchway.launcher.vms import Reply, Vms
from hatchway.wire.launcher import (
    MAX_DATAGRAM,
    Answer,
    Count,
    Counters,
    Counts,
    Failed,
    ForgetVm,
    Hello,
    HelloAnswer,
    InspectVm,
    KillVm,
    Listeners,
    ListVms,
    Request,
    StartVm,
)

MAX_CONNECTIONS = 32
MAX_FDS = 96
PAUSE_S = 0.2
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * 4)
_PEER = struct.Struct("3i")
_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_encoder = msgspec.json.Encoder()


class Server:
    """Accepts, checks and serves."""

    def __init__(self, loop: Loop, listener: socket.socket, vms: Vms, hello: HelloAnswer, peers: set[int]) -> None:
        self._loop = loop
        self._listener = listener
        self._vms = vms
        self._hello = hello
        self._peers = peers
        self._connections: set[_Connection] = set()
        self._closed = False
        self._answered: dict[str, dict[str, int]] = {}
        self._turned_away = 0
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Drops every connection."""
        self._closed = True
        self._loop.unwatch(self._listener.fileno())
        for connection in list(self._connections):
            connection.close()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # who waits goes on waiting, and would be reported again at once
                self._loop.unwatch(self._listener.fileno())
                self._loop.later(PAUSE_S, self._listen)
            return
        uid = peer_uid(sock)
        if uid not in self._peers or len(self._connections) >= MAX_CONNECTIONS:
            self._turned_away += 1
            say(f"uid {uid} was turned away: " + ("not allowed" if uid not in self._peers else "too many connections"))
            sock.close()
            return
        sock.setblocking(False)
        self._connections.add(_Connection(self._loop, sock, self))

    def forget(self, connection: "_Connection") -> None:
        """The connection closed."""
        self._connections.discard(connection)

    def handle(self, data: bytes, fds: list[int], connection: "_Connection") -> None:
        """Does what one datagram asks."""
        reply = _once(connection.reply)
        try:
            request = _decoder.decode(data)
            reply = _once(self._counted(request, connection.reply))
            match request:
                case Hello():
                    reply(self._hello)
                case StartVm():
                    self._vms.start(request, fds, reply)
                case KillVm():
                    self._vms.kill(request.sandbox_id, reply)
                case ForgetVm():
                    self._vms.forget(request.sandbox_id, reply)
                case ListVms():
                    self._vms.list_vms(request.after, reply)
                case InspectVm():
                    self._vms.inspect(request.sandbox_id, reply)
                case Listeners():
                    self._vms.listeners(request.sandbox_id, request.generation, reply)
                case Counters():
                    self._vms.dropped(request.sandbox_id, reply)
                case Count():
                    reply(self._counts())
        except msgspec.DecodeError as error:
            reply(Failed(code="invalid", message=f"not a request: {error}"))
        except UnicodeError:
            reply(Failed(code="invalid", message="not a request: text that is no UTF-8"))
        except Refused as error:
            reply(error.answer())
        except OSError as error:
            # The host lacks something, or what came along cannot even be looked at: no reason to end for all others.
            say(f"a request failed: {error}")
            reply(Failed(code="host_exhausted", message=f"the host refused: {error}"))

    def _counted(self, request: Request, reply: Reply) -> Reply:
        """Counts the answer, and writes down what was done for which request of the API."""
        began = time.monotonic()
        verb = str(request.__struct_config__.tag)

        def answer(what: Answer, fds: Sequence[int] = ()) -> None:
            result = what.code if isinstance(what, Failed) else "ok"
            counts = self._answered.setdefault(verb, {})
            counts[result] = counts.get(result, 0) + 1
            if isinstance(request, StartVm | KillVm | ForgetVm):
                say(
                    verb,
                    level="info" if result == "ok" else "warning",
                    request_id=request.request_id,
                    sandbox_id=request.sandbox_id[:64],
                    result=result,
                    ms=round((time.monotonic() - began) * 1e3, 2),
                )
            reply(what, fds)

        return answer

    def _counts(self) -> Counts:
        slots, free, prepared = self._vms.places()
        return Counts(
            answered=self._answered,
            turned_away=self._turned_away,
            slots=slots,
            slots_free=free,
            slots_prepared=prepared,
        )


def _once(reply: Reply) -> Reply:
    """Returns a reply of which only the first counts: a later one would be taken for the answer to the next request."""
    owed = True

    def answer(what: Answer, fds: Sequence[int] = ()) -> None:
        nonlocal owed
        if owed:
            owed = False
            reply(what, fds)

    return answer


class _Connection:
    """One client."""

    def __init__(self, loop: Loop, sock: socket.socket, server: Server) -> None:
        self._loop = loop
        self._sock = sock
        self._server = server
        loop.watch(sock.fileno(), self._receive)

    def _receive(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(MAX_DATAGRAM + 1, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        fds = [
            fd
            for level, kind, payload in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
            for (fd,) in struct.iter_unpack("i", payload[: len(payload) - len(payload) % 4])
        ]
        try:
            if not data:
                self.close()
                return
            # The answer is owed from now on; it may come in a later round of the loop.
            self._loop.unwatch(self._sock.fileno())
            if len(data) > MAX_DATAGRAM or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                self.reply(Failed(code="invalid", message=f"at most {MAX_DATAGRAM} octets and {MAX_FDS} descriptors"))
            else:
                self._server.handle(data, fds, self)
        finally:
            for fd in fds:
                os.close(fd)

    def reply(self, what: Answer, fds: Sequence[int] = ()) -> None:
        """Sends the answer that is owed, with duplicates of `fds` beside it; a client that does not take it is dropped."""
        if self._sock.fileno() < 0:
            return
        data = _encoder.encode(what)
        if len(data) > MAX_DATAGRAM:
            data = _encoder.encode(Failed(code="host_exhausted", message="the answer does not fit into a datagram"))
        try:
            socket.send_fds(self._sock, [data], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            self.close()
            return
        self._loop.watch(self._sock.fileno(), self._receive)

    def close(self) -> None:
        """Drops the client. May be repeated."""
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._server.forget(self)


def peer_uid(sock: socket.socket) -> int:
    """Returns the uid that the peer had when it connected, in our user namespace."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid) & 0xFFFFFFFF
