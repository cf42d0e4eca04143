"""Streams a request's body into a program in the guest, while the program may end at any time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import msgspec

from hatchway.domain.errors import HatchwayError, Unauthenticated
from hatchway.node.dataplane.files import answers
from hatchway.node.dataplane.files.access import Call
from hatchway.node.dataplane.files.program import Argument, Program, run
from hatchway.node.dataplane.requests import Body, ClientGone

T = TypeVar("T", bound=msgspec.Struct)
Filter = Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]
_GRACE_S = 5.0
"""How long a program whose upload was cut off may take to clear away what it wrote."""


async def upload(call: Call, operation: str, arguments: Sequence[Argument], kind: type[T], through: Filter) -> T:
    """Runs an operation with the body, changed by `through`, as its upload; returns what it says at its end.

    A body that is cut off is never ended for the program, which would take it for whole: it is told to end and to clear away what
    it wrote, and then killed.
    """
    await call.files.plane.ready(call.sandbox_id)
    link, user = call.link, call.query.user()
    within = call.limits.transfer_s
    with call.files.counted(call.sandbox_id):
        body = Body(call.receive, call.limits.upload_ahead)
        try:
            async with run(link, operation, arguments, user=user, limits=call.limits, upload=True) as program:
                try:
                    async with asyncio.timeout(within):
                        feeding = _both(program, through(call.pace.receiving(body.chunks())), kind, call.limits.work_s)
                        return await call.held(feeding, departed=body.departed)
                except TimeoutError:
                    raise answers.no_answer(within) from None
                except (ClientGone, Unauthenticated):
                    await _let_clear_away(program, kind)
                    raise
        finally:
            body.close()


async def _both(program: Program, chunks: AsyncIterator[bytes], kind: type[T], work_s: float) -> T:
    """Feeds the program and waits for its end, whichever comes first."""
    loop = asyncio.get_running_loop()
    feeding = loop.create_task(_feed(program, chunks))
    ending = loop.create_task(program.done(kind, forever=True))
    try:
        await asyncio.wait({feeding, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            feeding.result()
            await asyncio.wait({ending}, timeout=work_s)
            if not ending.done():
                raise answers.no_answer(work_s)
        return ending.result()
    finally:
        for task in (feeding, ending):
            task.cancel()
        await asyncio.gather(feeding, ending, return_exceptions=True)


async def _feed(program: Program, chunks: AsyncIterator[bytes]) -> None:
    async for chunk in chunks:
        if not await program.write(chunk):
            return
    await program.write_end()


async def _let_clear_away(program: Program, kind: type[msgspec.Struct]) -> None:
    with contextlib.suppress(HatchwayError, TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            await program.terminate()
            await program.done(kind)
