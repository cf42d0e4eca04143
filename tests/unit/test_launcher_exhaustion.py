"""The launcher on a host that lacks something: it answers and goes on, for it is the only one there is."""

import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hatchway.domain.ids import new_id
from hatchway.launcher.cgroups import Cgroups
from hatchway.launcher.errors import Refused
from hatchway.launcher.loop import Loop
from hatchway.launcher.server import Server
from hatchway.launcher.stock import Stock
from hatchway.wire.launcher import Answer, Done, Failed, HelloAnswer, KillVm


class FakeLoop:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[], None]] = {}
        self.timers: list[Callable[[], None]] = []

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        assert fd not in self.watched
        self.watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def later(self, _seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append(callback)


@pytest.fixture
def stock(tmp_path: Path) -> Stock:
    shim = tmp_path / "shim"
    shim.write_text("#!/bin/sh\nexec sleep 1000\n")
    shim.chmod(0o755)
    return Stock(FakeLoop(), Cgroups("x", []), str(shim), slots=1, target=0, rules=None)  # type: ignore[arg-type]


def _no_more(*_: object) -> object:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("module", "name"), [(socket, "socketpair"), (os, "posix_spawn"), (os, "pidfd_open")])
def test_a_slot_that_cannot_be_prepared_is_free_again(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    asked: list[object] = []

    def refuse(*words: object, **_: object) -> object:
        asked.extend(words)
        return _no_more()

    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(Refused, match="Too many open files") as refused:
            stock.claim()
        assert refused.value.code == "host_exhausted"
    if name == "pidfd_open":
        with pytest.raises(ChildProcessError):  # it was started, and was ended and reaped
            os.waitpid(int(str(asked[0])), os.WNOHANG)
    slot = stock.claim()
    assert slot.number == 0
    signal.pidfd_send_signal(slot.pidfd, signal.SIGKILL)
    os.waitid(os.P_PIDFD, slot.pidfd, os.WEXITED)
    slot.close()


def test_a_slot_of_a_launcher_that_had_more_is_not_handed_out(stock: Stock) -> None:
    stock.reserve(0)
    stock.release(7)
    with pytest.raises(Refused, match="all slots are taken"):
        stock.claim()


class BrokenVms:
    """Fails, and answers late nevertheless."""

    def __init__(self) -> None:
        self.late: list[Callable[[Answer], None]] = []

    def kill(self, _sandbox_id: str, reply: Callable[[Answer], None]) -> None:
        self.late.append(reply)
        _no_more()


def test_a_request_that_the_host_refuses_is_answered_once(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    loop, vms = FakeLoop(), BrokenVms()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(path)
        listener.listen(1)
        hello = HelloAnswer(rootless=False, network=False, cgroups="none")
        server = Server(loop, listener, vms, hello, {os.geteuid()})  # type: ignore[arg-type]
        client.connect(path)
        loop.watched[listener.fileno()]()
        (serve,) = (callback for fd, callback in loop.watched.items() if fd != listener.fileno())
        client.settimeout(10)
        for _ in range(2):
            client.send(msgspec.json.encode(KillVm(sandbox_id=new_id())))
            serve()
            answer = msgspec.json.decode(client.recv(65_536), type=Failed)
            assert (answer.code, "Too many open files" in answer.message) == ("host_exhausted", True)
        for reply in vms.late:
            reply(Done())
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(65_536)
        server.close()


def test_who_cannot_be_accepted_now_is_asked_for_later(tmp_path: Path) -> None:
    class Listener:
        def fileno(self) -> int:
            return 99

        def setblocking(self, _flag: bool) -> None:
            pass

        def accept(self) -> object:
            return _no_more()

    loop = FakeLoop()
    hello = HelloAnswer(rootless=False, network=False, cgroups="none")
    server = Server(loop, Listener(), BrokenVms(), hello, {0})  # type: ignore[arg-type]
    loop.watched[99]()
    assert loop.watched == {}
    (again,) = loop.timers
    again()
    assert 99 in loop.watched
    server.close()
    again()
    assert loop.watched == {}


def test_any_number_of_signals_at_once_is_taken() -> None:
    kept = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)}
    loop = Loop()
    try:
        for count in (511, 512, 513, 1024, 0):
            loop._wake_write.send(b"\0" * count)
            loop._woken()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in kept.items():
            signal.signal(number, handler)
        loop._wake_read.close()
        loop._wake_write.close()
