"""Requests of one sandbox that are held until somebody decides; nothing of them has left.

An answer holds once, until the sandbox stops or its policy changes, or for a time: for every request with the same key, and for no
longer than the rule says that answers may. What is not answered in time is denied.
"""

import asyncio
import time
from collections.abc import Callable

import msgspec

from hatchway.domain.ids import new_id
from hatchway.domain.policy.schema import Ask
from hatchway.egress.bounds import Bucket
from hatchway.wire.egress import AskAnswer, Asked, AskEnded

MAX_ANSWERS = 1024
"""Answers that are remembered; beyond it the oldest is forgotten, and asked about again."""


ASKS_PER_S, ASKS_AT_ONCE = 0.5, 30.0
"""How often a sandbox may have somebody asked: each time costs a person's look, whether who asked waits for the answer or not."""


class TooManyAsks(Exception):
    """As many requests of this sandbox are held, or were asked about within a minute, as may be. The text says which."""


class Asks:
    """See the module. `tell(event, params)` reaches the node."""

    def __init__(
        self,
        tell: Callable[[str, object], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._now = now
        self._bucket = Bucket(ASKS_PER_S, ASKS_AT_ONCE, clock)
        self._held: dict[str, tuple[Asked, Ask, asyncio.Future[AskAnswer | None]]] = {}
        self._answers: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> tuple[Asked, ...]:
        """What is held now."""
        return tuple(asked for asked, _, _ in self._held.values())

    def answered(self, rule: str, key: str) -> bool:
        """Whether an earlier answer allows this."""
        until = self._answers.get((rule, key))
        if until is None:
            return False
        if until > self._now():
            return True
        del self._answers[rule, key]
        return False

    def require_room(self, bound: int) -> None:
        """Raises `TooManyAsks` where nothing more may be held, or asked about now. What is let through counts as asked."""
        if len(self._held) >= bound:
            raise TooManyAsks(f"{bound} requests of this sandbox wait for an approval")
        if not self._bucket.take():
            raise TooManyAsks(f"this sandbox asks for approvals more than {ASKS_PER_S * 60:g} times a minute")

    async def hold(self, asked: Asked, terms: Ask) -> AskAnswer | None:
        """Holds a request, after `require_room`; returns the answer, None where none came or the ask ended.

        `terms`: of the rule: how long it is held, and how long an answer may hold.
        `ask_id`, `asked_at` and `expires_at` of `asked` are filled in here. Cancelled: the client is gone, and that is told.
        """
        now = self._now()
        asked = msgspec.structs.replace(asked, ask_id=new_id(), asked_at=now, expires_at=now + terms.timeout)
        future: asyncio.Future[AskAnswer | None] = asyncio.get_running_loop().create_future()
        self._held[asked.ask_id] = (asked, terms, future)
        self._tell("gateway.asked", asked)
        why = "client_gone"
        try:
            async with asyncio.timeout(terms.timeout):
                answer = await future
            why = ""
            return answer
        except TimeoutError:
            why = "timeout"
            return None
        finally:
            if self._held.pop(asked.ask_id, None) is not None and why:
                self._tell("gateway.ask_ended", AskEnded(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, why=why))

    def answer(self, answer: AskAnswer) -> None:
        """Takes a decision; one about an ask that is gone changes nothing."""
        asked, terms, future = self._held.get(answer.ask_id, (None, None, None))
        if asked is None or terms is None or future is None or future.done():
            return
        longest = {"once": 0.0, "ttl": terms.ttl, "session": float("inf")}[terms.scope]
        holds = min(longest, {"ttl": answer.ttl_s, "session": float("inf")}.get(answer.scope, 0.0))
        if answer.allow and holds > 0:
            self._answers[asked.rule, asked.key] = self._now() + holds
            while len(self._answers) > MAX_ANSWERS:
                self._answers.pop(next(iter(self._answers)))
        future.set_result(answer)

    def end_all(self, why: str) -> None:
        """Denies all that is held, and forgets all answers: the policy changed, or the gateway closes."""
        self._answers.clear()
        held, self._held = self._held, {}
        for asked, _, future in held.values():
            self._tell("gateway.ask_ended", AskEnded(ask_id=asked.ask_id, sandbox_id=asked.sandbox_id, why=why))
            if not future.done():
                future.set_result(None)
