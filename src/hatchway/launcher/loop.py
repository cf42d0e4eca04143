"""The event loop: descriptors, timers and the reaping of children, in one thread."""

import contextlib
import heapq
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

Callback = Callable[[], None]


class Timer:
    """A call in the future that can be taken back."""

    __slots__ = ("at", "callback")

    def __init__(self, at: float, callback: Callback) -> None:
        self.at = at
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """It will not be called. May be repeated."""
        self.callback = None

    def __lt__(self, other: "Timer") -> bool:
        return self.at < other.at


class Loop:
    """Runs until `stop`. SIGTERM and SIGINT stop it; SIGCHLD reaps every child that ended."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._timers: list[Timer] = []
        self._running = True
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        self.watch(self._wake_read.fileno(), self._woken)

    def watch(self, fd: int, callback: Callback) -> None:
        """Calls `callback` whenever `fd` is readable or at its end."""
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        """Forgets `fd`; must come before it is closed. Unknown ones are ignored."""
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def later(self, seconds: float, callback: Callback) -> Timer:
        """Calls `callback` once, after `seconds`."""
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def stop(self) -> None:
        """Lets `run` return."""
        self._running = False

    def run(self) -> None:
        """Serves events until `stop`."""
        while self._running:
            self._run_timers()
            wait = None if not self._timers else max(0.0, self._timers[0].at - time.monotonic())
            for key, _ in self._selector.select(wait):
                # An earlier callback of this round may have dropped this one.
                if key.fd in self._selector.get_map() and self._selector.get_map()[key.fd].data is key.data:
                    key.data()

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and (self._timers[0].callback is None or self._timers[0].at <= now):
            callback = heapq.heappop(self._timers).callback
            if callback is not None:
                callback()

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there may have been exactly that many
            while len(self._wake_read.recv(512)) == 512:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        except ChildProcessError:
            pass
