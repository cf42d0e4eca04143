"""Accepts connections of a sandbox from its listener, not more and not faster than its bounds: who is beyond them waits in the kernel."""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from hatchway.egress.bounds import Bucket

AT_ONCE = 4
"""Connections that are taken before the loop turns to other sandboxes."""
EXHAUSTED_PAUSE_S = 0.5
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}

log = logging.getLogger(__name__)


class Acceptor:
    """One listener. `taken` gets each connection, `room` says whether there is room for one more; `again` is to be called when there is."""

    def __init__(
        self,
        listener: socket.socket,
        taken: Callable[[socket.socket], None],
        room: Callable[[], bool],
        bucket: Bucket,
    ) -> None:
        self._listener = listener
        self._taken = taken
        self._room = room
        self._bucket = bucket
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watching = False
        self._closed = False
        self.paused = 0
        """How often it had to wait."""
        listener.setblocking(False)
        self.again()

    def again(self) -> None:
        """Goes on accepting, if it may."""
        if not self._closed and not self._watching and self._timer is None and self._room():
            self._watching = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Lets go of the listener: nobody accepts from it here any more."""
        if self._closed:
            return
        self._pause()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._room():
                self._pause()
                self.paused += 1
                return
            wait = self._bucket.wait_s()
            if wait > 0:
                self._pause(wait)
                self.paused += 1
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    log.warning("no connection can be accepted: %s", error.strerror)
                self._pause(EXHAUSTED_PAUSE_S)
                return
            self._bucket.take()
            sock.setblocking(False)
            self._taken(sock)

    def _pause(self, seconds: float | None = None) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._listener.fileno())
        if seconds is not None and self._timer is None:
            self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.again()
