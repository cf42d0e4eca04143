"""The node's end of the launcher's socket."""

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hatchway.node import metrics
from hatchway.node.vmm import seqpacket
from hatchway.node.vmm.seam import LauncherUnavailable, LaunchRefused
from hatchway.wire import tracing
from hatchway.wire.egress import LISTENERS
from hatchway.wire.launcher import (
    MAX_DATAGRAM,
    Answer,
    Count,
    Counters,
    Counts,
    Done,
    Dropped,
    Failed,
    ForgetVm,
    Hello,
    HelloAnswer,
    InspectVm,
    KillVm,
    Listeners,
    ListenersAnswer,
    ListVms,
    Request,
    Started,
    StartVm,
    VmList,
    VmRecord,
    VmUsage,
)

MAX_CONNECTIONS = 8
RECONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 20.0
"""The launcher's own bounds are 5 s for a start and 10 s for a kill."""

_RETRY_S = 0.02
_decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_T = TypeVar("_T", bound=Answer)


class LauncherClient:
    """Asks the launcher. Calls may be made at once: each takes a connection of its own, up to `MAX_CONNECTIONS`.

    Every verb is idempotent, so that a request whose answer was lost with a launcher that died is sent again to the next one. All
    raise `LauncherUnavailable` when there is none within about 5 s, and `LaunchRefused` for its no.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[socket.socket] = []
        self._permits = asyncio.Semaphore(MAX_CONNECTIONS)

    async def hello(self) -> HelloAnswer:
        """Returns what the launcher can do here."""
        return await self._ask(Hello(), HelloAnswer)

    async def start_vm(self, request: StartVm, fds: Sequence[int]) -> VmRecord:
        """Starts a VM; `fds` are the jail's root and one per entry of `pass_as`, and stay the caller's."""
        return (await self._ask(request, Started, fds)).vm

    async def kill_vm(self, sandbox_id: str) -> None:
        """Ends a VM; on return nothing of it runs. Idempotent."""
        await self._ask(KillVm(sandbox_id=sandbox_id), Done)

    async def forget_vm(self, sandbox_id: str) -> None:
        """Removes what is left of a VM that ended. Idempotent."""
        await self._ask(ForgetVm(sandbox_id=sandbox_id), Done)

    async def list_vms(self) -> tuple[VmRecord, ...]:
        """Returns every VM that the launcher has a record of, in the order of their ids."""
        found: list[VmRecord] = []
        while True:
            page = await self._ask(ListVms(after=found[-1].sandbox_id if found else ""), VmList)
            found += page.vms
            if not page.more or not page.vms:
                return tuple(found)

    async def inspect_vm(self, sandbox_id: str) -> VmUsage:
        """Returns what the VM's cgroup counts, also after its end, until it is forgotten."""
        return await self._ask(InspectVm(sandbox_id=sandbox_id), VmUsage)

    async def counts(self) -> Counts:
        """Returns what the launcher counts of itself."""
        return await self._ask(Count(), Counts)

    async def listeners(self, sandbox_id: str, generation: int) -> list[int]:
        """Returns the sockets of the VM's network slot, in the order of `wire.egress.LISTENERS`; they are the caller's to close.

        Each call gives new duplicates. `LaunchRefused`: `unknown`, `no_network`.
        """
        fds: list[int] = []
        try:
            await self._ask(Listeners(sandbox_id=sandbox_id, generation=generation), ListenersAnswer, taken=fds)
            if len(fds) != len(LISTENERS):
                raise LauncherUnavailable(f"the launcher gave {len(fds)} sockets, not {len(LISTENERS)}")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    async def dropped(self, sandbox_id: str) -> Dropped:
        """Returns how many packets of the VM its slot's rules dropped, by reason, also after its end, until it is forgotten.

        `LaunchRefused`: `unknown`, `no_network`.
        """
        return await self._ask(Counters(sandbox_id=sandbox_id), Dropped)

    async def close(self) -> None:
        """Drops the connections; the client can be used again."""
        while self._idle:
            self._idle.pop().close()

    async def _ask(
        self, request: Request, kind: type[_T], fds: Sequence[int] = (), taken: list[int] | None = None
    ) -> _T:
        """`taken`: where the descriptors go that come with the answer."""
        request_id = tracing.current().get("request_id", "")
        data = msgspec.json.encode(msgspec.structs.replace(request, request_id=request_id) if request_id else request)
        if len(data) > MAX_DATAGRAM:
            raise LaunchRefused("invalid", f"the request has {len(data)} octets, more than {MAX_DATAGRAM}")
        with metrics.timed(metrics.LAUNCHER_CALLS, str(request.__struct_config__.tag)):
            async with self._permits:
                answer = _decoder.decode(await self._exchange(data, fds, taken))
            if isinstance(answer, Failed):
                raise LaunchRefused(answer.code, answer.message, answer.remedy)
            if not isinstance(answer, kind):
                raise LauncherUnavailable(f"the launcher answered {type(answer).__name__}, not {kind.__name__}")
            return answer

    async def _exchange(self, data: bytes, fds: Sequence[int], taken: list[int] | None) -> bytes:
        """One request and its answer, sent again over a new connection as long as the bound allows."""
        loop = asyncio.get_running_loop()
        until = loop.time() + RECONNECT_WITHIN_S
        while True:
            try:
                return await self._once(data, fds, taken)
            except TimeoutError as error:
                raise LauncherUnavailable(f"the launcher did not answer within {ANSWER_WITHIN_S:g} s") from error
            except OSError as error:
                if loop.time() >= until:
                    raise LauncherUnavailable(f"no launcher at {self._path}: {error.strerror or error}") from error
                await asyncio.sleep(_RETRY_S)

    async def _once(self, data: bytes, fds: Sequence[int], taken: list[int] | None) -> bytes:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            sock = self._idle.pop() if self._idle else await seqpacket.connect(self._path)
            try:
                await seqpacket.send(sock, data, fds)
                if taken is None:
                    answer = await seqpacket.receive(sock, MAX_DATAGRAM + 1)
                else:
                    answer, given = await seqpacket.receive_with_fds(sock, MAX_DATAGRAM + 1, len(LISTENERS))
                    taken += given
            except BaseException:
                # Also when cancelled: the answer that is still to come must not be taken for that of another request.
                sock.close()
                raise
        if not answer:
            sock.close()
            raise ConnectionResetError(104, "it closed the connection")
        self._idle.append(sock)
        return answer
