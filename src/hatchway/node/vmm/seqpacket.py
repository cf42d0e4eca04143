"""Datagrams with descriptors over Unix SOCK_SEQPACKET sockets, for asyncio: what the launcher and the shims speak."""

import array
import asyncio
import errno
import socket
from collections.abc import Sequence
from pathlib import Path

from hatchway.wire.paths import address

_RETRY_S = 0.005


def exhausted(error: OSError) -> bool:
    """Tells whether this process lacks what it needs to ask: that says nothing about whom it asks."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


async def connect(path: Path) -> socket.socket:
    """Connects, however long the path is. Raises `OSError`; while the peer's queue is full it waits: bound it."""
    with address(path) as reached:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            while True:
                try:
                    sock.connect(reached)
                    return sock
                except BlockingIOError:
                    # For Unix sockets this means a full queue, not a connection on its way.
                    await asyncio.sleep(_RETRY_S)
        except BaseException:
            sock.close()
            raise


async def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one datagram, with descriptors beside it. Raises `OSError`."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        try:
            sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            await _writable(sock)


async def receive(sock: socket.socket, most: int) -> bytes:
    """Receives one datagram; empty at the end. Raises `OSError`."""
    return await asyncio.get_running_loop().sock_recv(sock, most)


async def receive_with_fd(sock: socket.socket, most: int) -> tuple[bytes, int | None]:
    """Receives one datagram and the descriptor beside it, which is the caller's, or None. Raises `OSError`."""
    data, fds = await receive_with_fds(sock, most, 1)
    return data, fds[0] if fds else None


async def receive_with_fds(sock: socket.socket, most: int, most_fds: int) -> tuple[bytes, list[int]]:
    """Receives one datagram and the descriptors beside it, which are the caller's. Raises `OSError`."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, most, most_fds, socket.MSG_CMSG_CLOEXEC)
            return data, list(fds)
        except BlockingIOError:
            await _readable(sock)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(sock, wake)
    try:
        await ready
    finally:
        loop.remove_writer(sock)
